"""Versions and situations that no public log at hand shows: `data/explain/made/SOURCE.txt`."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from slotwise.explain.readers import read_files
from slotwise.explain.record import Life, Request

DATA = Path(__file__).parents[1] / "data" / "explain" / "made"
SERVER = "llamacpp-2026-11-verbose.log"


def lives(name: str) -> tuple[Life, ...]:
    return read_files([DATA / name]).lives


def life(name: str) -> Life:
    (one,) = lives(name)
    return one


def tokens(request: Request) -> tuple[float | None, ...]:
    """Prompt, reused, read, generated."""
    return tuple(v.value for v in (request.prompt, request.reused, request.read, request.generated))


def phases(request: Request) -> dict[str, float | None]:
    return {p.name: p.ms.value for p in request.phases if p.lane == "request"}


def test_blocks_of_2023_belong_to_the_slot_released_after_them() -> None:
    found = life("llamacpp-2023-11-two-slots.log")
    assert (found.dialect, found.version) == ("llama.cpp", "build 1497")
    first, second, cut = found.requests
    assert (tokens(first), first.prompt_ms.value) == ((171, 0, 171, 100), 2051.25)
    assert (tokens(second), second.prompt_ms.value) == ((57, 45, 12, 10), 140.5)
    assert (cut.status, cut.prompt.value, cut.reused.value) == ("incomplete", 871, 271)
    assert any("without timings" in warning for warning in cut.warnings)


def test_json_lines_of_2024_are_not_the_forks() -> None:
    found = life("llamacpp-2024-05-json.log")
    assert (found.dialect, found.version) == ("llama.cpp", "build 2900")
    assert found.facts["request_slots"].value == 2
    cut, done = found.requests
    assert (cut.status, cut.prompt_ms.how) == ("incomplete", "missing")
    assert (tokens(done), done.prompt_ms.value, done.decode_ms.value) == (
        (192, 64, 128, 40),
        512.0,
        2000.0,
    )


def test_a_journals_process_numbers_are_lives() -> None:
    first, second = lives("llamacpp-2025-03-journal.log")
    done, embedding = first.requests
    assert (tokens(done), done.prompt_ms.value) == ((2952, 0, 2952, 2200), 5904.0)
    assert done.facts["context_shifts"].value == 2
    assert any("5000 tokens was cut" in warning for warning in done.warnings)
    assert [(p.ms.value, p.tokens) for p in done.phases if p.name == "batch"] == [
        (4000.0, 2048),
        (2000.0, 904),
    ]
    assert (embedding.status, embedding.prompt_ms.how) == ("done", "missing")
    (cancelled,) = second.requests
    assert (cancelled.status, cancelled.read.low, second.first_line) == ("cancelled", 2048, 26)


def test_verbose_log_with_parallel_slots_quotes_and_a_restart() -> None:
    first, second = lives(SERVER)
    assert (first.version, second.first_line) == ("build 11020", 35)
    cancelled, done = first.requests
    assert (cancelled.status, tokens(cancelled)) == ("cancelled", (6000, 1000, 5000, 100))
    assert phases(cancelled) == {"prompt cache update": 120.0, "prompt eval": 4500.0}
    assert cancelled.ttft_ms.low == 4620.0
    assert (done.status, tokens(done), done.prompt_ms.value) == ("done", (400, 0, 400, 20), 1600.0)
    assert (done.facts["drafts_accepted"].value, done.facts["drafts"].value) == (6, 10)
    assert all(any("other request slots" in w for w in r.warnings) for r in first.requests)
    assert first.facts["cancelled_before_a_slot"].value == 1
    assert [(r.status, r.prompt.value, phases(r)) for r in second.requests] == [
        ("failed", 70000, {})
    ]


def test_ik_prompt_cache_save_and_load_are_before_the_prompt() -> None:
    found = life("ik-2026-02-slots.log")
    assert (found.dialect, found.version) == ("ik_llama.cpp", "build 4182")
    first, second = found.requests
    assert tokens(first) == (3900, 0, 3900, 100)
    assert [p.ms.value for p in first.phases if p.name == "checkpoint"] == [61.5]
    assert phases(second) == {"prompt cache update": 240.75, "prompt eval": 1000.0}
    assert tokens(second) == (680, 500, 180, 50)


def test_programs_that_are_no_servers() -> None:
    (cli,) = life("llama-cli-2024-12.log").requests
    assert (tokens(cli), phases(cli)) == ((37, 0, 37, 127), {"prompt eval": 222.0})
    bench = life("llama-bench-2025-09.txt")
    assert bench.version == "build 6400"
    short, deep, answer = bench.requests
    assert (tokens(short), short.prompt_ms.value) == ((512, 0, 512, None), 320.0)
    assert (tokens(deep)[:3], deep.prompt_ms.how) == ((6144, 4096, 2048), "derived")
    assert (answer.generated.value, answer.decode_ms.value) == (128, 2000.0)
    assert answer.prompt_ms.how == "missing"


def test_lines_inside_dockers_json() -> None:
    (request,) = life("docker-json.log").requests
    assert (tokens(request), request.prompt_ms.value) == ((1200, 200, 1000, 98), 4000.0)


def _colours(text: str) -> bytes:
    return "".join(f"\x1b[34m{line}\x1b[0m\n" for line in text.splitlines()).encode()


def _compose(text: str) -> bytes:
    return "".join(f"llama-server-1  | {line}\n" for line in text.splitlines()).encode()


def _kubernetes(text: str) -> bytes:
    stamp = "2026-11-03T10:00:00.123456789Z stderr F "
    return "".join(f"{stamp}{line}\n" for line in text.splitlines()).encode()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda text: text.replace("\n", "\r\n").encode("utf-16"),
        lambda text: gzip.compress(text.encode()),
        _colours,
        _compose,
        _kubernetes,
    ],
    ids=["utf-16 crlf", "gzip", "colours", "compose", "kubernetes"],
)
@pytest.mark.parametrize("name", [SERVER, "llama-cli-2024-12.log", "llama-bench-2025-09.txt"])
def test_wrappings_change_nothing(name: str, wrap: Callable[[str], bytes], tmp_path: Path) -> None:
    plain = (DATA / name).read_text(encoding="utf-8")
    path = tmp_path / name
    path.write_bytes(wrap(plain))
    assert [r for found in read_files([path]).lives for r in found.requests] == [
        r for found in lives(name) for r in found.requests
    ]


def test_vllm_restarts_and_quoted_rates() -> None:
    first, second = lives("vllm-0.6-docker.log")
    facts = {name: value.value for name, value in first.facts.items()}
    assert facts["interval_prompt_tokens_per_s_max"] == 2000
    assert (facts["requests_finished"], facts["requests_aborted"]) == (1, 1)
    assert (facts["drafts_accepted"], facts["drafts"]) == (130, 200)
    assert facts["hit_rate_percent_last"] == 12.5
    assert (second.first_line, second.facts["batched_tokens_max"].value) == (13, 2048)
    newer = life("vllm-0.11-k8s.log")
    assert (newer.version, newer.requests) == ("0.11.0", ())
    assert (newer.facts["drafts_accepted"].value, newer.facts["drafts"].value) == (120, 200)
    assert newer.facts["intervals_reading_unseen"].value == 1


def test_a_benchmarks_summary_is_no_request() -> None:
    found = life("serving-benchmark.txt")
    assert (found.dialect, found.requests) == ("client", ())
    assert found.facts["ttft_ms_median"].value == 333.88


def test_sglang_stages_print_the_same_batch() -> None:
    old = life("sglang-2024-02.log")
    assert [old.facts[n].value for n in ("new_tokens", "cached_tokens", "queue_max")] == [
        904,
        1541,
        6,
    ]
    stages, ranks = lives("sglang-2025-pp.log")
    assert (stages.facts["new_tokens"].value, stages.facts["prefill_batches"].value) == (9000, 2)
    (request,) = stages.requests
    assert (request.prompt.value, request.prompt_ms.how, request.prompt_ms.high) == (
        9000,
        "bounded",
        9000.0,
    )
    assert stages.facts["aborted"].value == 1
    assert ranks.facts["new_tokens"].value == 150


def test_ktransformers_requests() -> None:
    first, second = life("ktransformers-two.log").requests
    assert (first.read.value, first.read.how, first.generated.value) == (200, "derived", 200)
    assert phases(second) == {"tokenize": 20.0, "prefill": 12500.0}
