"""vLLM, SGLang, KTransformers, BigMoeOnEdge and client files; and what holds for every reader."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slotwise.explain.readers import new_readers, read_files
from slotwise.explain.record import Life, Reading

DATA = Path(__file__).parents[1] / "data" / "explain"
FOLDERS = {
    "llamacpp": {"llama.cpp"},
    "ik_llamacpp": {"ik_llama.cpp", "llama.cpp"},
    "sglang": {"sglang"},
    "ktransformers": {"ktransformers"},
    "bigmoe": {"bigmoe"},
    "vllm": {"vllm"},
    "fak": {"client"},
}
FILES = [
    path
    for folder in FOLDERS
    for path in sorted((DATA / folder).iterdir())
    if path.name != "SOURCE.txt"
]
SECRETS = ("/home/alice/secret", "hunter2", "sk-secret", "Alice Example", "the launch code is")
OURS = ("llama.cpp", "slotwise", "vllm", "sglang", "ktransformers", "bigmoe")


def one(name: str) -> Life:
    (life,) = read_files([DATA / name]).lives
    return life


def read_text(lines: Sequence[str], tmp_path: Path) -> Reading:
    path = tmp_path / "made.log"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return read_files([path])


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_file_is_recognised_as_its_dialect(path: Path) -> None:
    reading = read_files([path])
    assert {life.dialect for life in reading.lives} <= FOLDERS[path.parent.name]
    assert reading.lives


def test_vllm_log_has_no_request_speeds() -> None:
    life = one("vllm/agents-a1-fp8-262k-startup-and-requests.log")
    assert life.requests == ()
    assert life.facts["http_requests"].value == 68
    assert any("averages of an interval" in text for text in life.cannot_tell)
    assert life.version.startswith("0.23.1rc1")


def test_vllm_client_file_tells_time_to_first_token() -> None:
    requests = one("vllm/agents-a1-fp8-262k-capacity-240k-c1.json").requests
    assert [r.prompt.value for r in requests] == [231426, 231428]
    assert requests[0].ttft_ms.value == pytest.approx(32974.6949)
    first, *later = one("vllm/agents-a1-fp8-262k-capacity-8k-c1.json").requests
    assert first.first_of_life
    assert first.ttft_ms.value == pytest.approx(531.2478)
    assert all(240 < (r.ttft_ms.value or 0) < 255 for r in later)


def test_elapsed_time_only_bounds_time_to_first_token() -> None:
    (request,) = one("vllm/candidate-near-limit-needle.json").requests
    assert request.prompt.value == 130696
    assert (request.ttft_ms.how, request.ttft_ms.high) == ("bounded", 19809.0)


def test_first_event_is_not_the_first_token() -> None:
    (request,) = one("fak/dogfood-claude-probe.json").requests
    assert (request.ttft_ms.value, request.facts["first_event_ms"].value) == (312072, 51)
    assert any("buffered" in warning for warning in request.warnings)
    (turns,) = one("fak/dogfood-claude-probe-win.json").requests
    assert (turns.ttft_ms.value, turns.facts["turns"].value) == (352438, 7)


def test_sglang_batches_are_counted_not_averaged() -> None:
    life = one("sglang/22166-spiky-throughput.log")
    assert life.requests == ()
    assert life.facts["new_tokens"].value == 148 + 119 + 177 + 352
    assert any("do not average" in text for text in life.cannot_tell)
    assert one("sglang/30047-prefill-batches.log").facts["queue_max"].value == 97


def test_atom_tells_tokens_of_requests() -> None:
    requests = one("sglang/atom939-scheduled-prefill.log").requests
    assert [(r.reused.value, r.read.value) for r in requests] == [(0, 7820)] * 4 + [(7808, 12)] * 2
    assert all(r.prompt_ms.how == "missing" for r in requests)


def test_sglang_request_time_stats(tmp_path: Path) -> None:
    lines = [
        "[2026-09-08 23:29:09] ReqTimeStats(rid=4b5a, input_len=786432, cached_input_len=432, "
        "output_len=33, attempts=0, type=unified): queue_duration=0.98ms, "
        "initial_prefill_elapsed=142605.21ms, post_prefill_elapsed=257.57ms, "
        "forward_duration=142862.78ms, entry_time=1788881206.969",
        "[Scheduler] ReqTimeStats(rid='x', input_len=6, cached_input_len=0, output_len=16, "
        "attempts=1, type=unified): queue_duration=12.34ms, forward_duration=1.5s, entry_time=1.2",
    ]
    first, second = read_text(lines, tmp_path).lives[0].requests
    assert (first.prompt.value, first.read.value, first.prompt_ms.value) == (
        786432,
        786000,
        142605.21,
    )
    assert first.ttft_ms.low == pytest.approx(142606.19)
    assert [phase.name for phase in first.phases] == ["queue", "prefill"]
    assert (second.prompt_ms.how, second.prompt_ms.high) == ("bounded", 1500.0)


def test_ktransformers_steps_and_requests() -> None:
    life = one("ktransformers/1316-prefill-batch.log")
    rate = life.facts["prefill_step_tokens_per_s"]
    assert (rate.how, round(rate.value or 0, 1)) == ("derived", 32.7)
    assert life.requests == ()
    (chat,) = one("ktransformers/462-local-chat.log").requests
    assert (chat.read.value, round(chat.prompt_ms.value or 0)) == (7, 229231)
    assert any("fixed cost" in warning for warning in chat.warnings)
    (served,) = one("ktransformers/1261-balance-serve.log").requests
    assert (served.read.value, served.generated.value) == (9, 78)
    (cut,) = one("ktransformers/1302-long-context.log").requests
    assert (cut.status, cut.prompt.value) == ("incomplete", 46331)
    assert one("ktransformers/503-official-speed.txt").cannot_tell


def test_bigmoe_load_is_inside_and_parts_overlap() -> None:
    (stream,) = one("bigmoe/2026-07-12__qwen_stream.log").requests
    assert stream.ttft_ms.value == 20292
    assert [(p.name, p.ms.value) for p in stream.phases] == [
        ("model load", 14941),
        ("prefill", 5351),
    ]
    assert not any("overlap" in warning for warning in stream.warnings)
    (overlapped,) = one("bigmoe/2026-07-13__qwen_auto_ov.log").requests
    assert any("overlap" in warning for warning in overlapped.warnings)
    assert overlapped.facts["stall_ms_per_token"].value == 51
    for name in ("bigmoe/2026-07-12__qwen_mmap.log", "bigmoe/2026-07-12__qwen_mmap.csv"):
        (mmap,) = one(name).requests
        assert mmap.facts["flash_io_ms_per_token"].how == "missing"
    runs = read_files([DATA / "bigmoe/2026-07-14__gptoss-matrix.out"]).lives
    assert len(runs) == 14
    assert runs[0].requests[0].ttft_ms.value == 67667


def poisoned(path: Path) -> list[str]:
    """A file's lines with secrets between, before and after them, and inside JSON."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[:120]
    random.Random(path.name).shuffle(lines)
    out: list[str] = []
    for n, line in enumerate(lines):
        secret = SECRETS[n % len(SECRETS)]
        out += [line, f"{secret} {line}", f"{line} | prompt: {secret}"]
        out.append(f'{{"ttft_ms": 5, "prompt": "{secret}", "usage": {{"{secret}": 3}}}}')
        out.append(f"slot print_timing: id 1 | task {n} | {secret}")
    return lines[:60] + out


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_text_of_a_log_leaves_a_reader(path: Path, tmp_path: Path) -> None:
    out = json.dumps(read_text(poisoned(path), tmp_path).to_dict())
    for secret in SECRETS:
        assert secret not in out
    for word in ("secret", "hunter2", "alice", "Alice"):
        assert word not in out


REAL = [
    line
    for path in FILES
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines()[:60]
]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_line_whatever_raises(data: st.DataObject) -> None:
    some = data.draw(st.lists(st.sampled_from(REAL), max_size=25))
    noise = data.draw(st.lists(st.text(max_size=60), max_size=5))
    cut = data.draw(st.integers(0, 120))
    lines = [line[:cut] if n % 3 == 0 else line[cut // 2 :] for n, line in enumerate(some)]
    lines = data.draw(st.permutations(some + lines + noise))
    for reader in new_readers("x.log"):
        if reader.name not in OURS:
            continue
        assert 0.0 <= reader.sniff(lines) <= 1.0
        for number, line in enumerate(lines, 1):
            reader.feed(number, line)
        json.dumps([life.to_dict() for life in reader.finish()], allow_nan=False)


def test_numbers_of_any_length_do_not_raise() -> None:
    digits = "9" * 5000
    lines = [line.replace("1", digits) for line in REAL[:400]]
    for reader in new_readers("x.log"):
        if reader.name in OURS:
            for number, line in enumerate(lines, 1):
                reader.feed(number, line)
            json.dumps([life.to_dict() for life in reader.finish()], allow_nan=False)
