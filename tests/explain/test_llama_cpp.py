"""llama.cpp and ik_llama.cpp server logs: the public ones' right figures, and other versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from slotwise.explain.readers.llama_cpp import LlamaCppReader
from slotwise.explain.record import Life, Phase, Request

DATA = Path(__file__).parents[1] / "data" / "explain"


def lives(text: str) -> list[Life]:
    reader = LlamaCppReader("made.log")
    for number, line in enumerate(text.splitlines(), 1):
        reader.feed(number, line)
    return reader.finish()


def life(text: str) -> Life:
    (one,) = lives(text)
    return one


def corpus(name: str) -> Life:
    return life((DATA / name).read_text(encoding="utf-8"))


def named(request: Request, name: str) -> list[Phase]:
    return [phase for phase in request.phases if phase.name == name]


def batches(request: Request) -> list[tuple[float | None, int | None]]:
    return [(phase.ms.value, phase.tokens) for phase in named(request, "batch")]


def test_progress_lines_count_from_the_prompts_start() -> None:
    (request,) = corpus("llamacpp/27327-progress-task856.log").requests
    assert request.status == "incomplete"
    assert (request.prompt_ms.how, request.prompt_ms.low) == ("bounded", 20380.0)
    assert batches(request)[0] == (530.0, 512)
    assert request.facts["progress_tokens_per_s"].value == pytest.approx(1030.1, abs=0.1)
    assert request.facts["later_tokens_per_s"].value == pytest.approx(979.2, abs=0.1)


def test_shared_tokens_that_were_read_again_are_said() -> None:
    first, second = corpus("llamacpp/19408-qwen3-coder-next-reprocess.log").requests
    assert (first.prompt_ms.value, first.read.value) == (5093.47, 1360)
    assert (second.status, second.prompt.value, second.reused.value) == ("incomplete", 1371, 0)
    assert second.facts["shared_tokens"].value == 848
    assert any("read again" in warning for warning in second.warnings)


def test_prompt_cache_update_is_before_prompt_eval() -> None:
    (request,) = corpus("llamacpp/llamaswap560-prompt-cache-update.log").requests
    (phase,) = request.phases
    assert (phase.name, phase.lane, phase.ms.value) == ("prompt cache update", "request", 1973.25)
    assert request.prompt_ms.how == "missing"
    assert request.ttft_ms.low == 1973.25


def test_cut_prompt_cache_update_is_bounded() -> None:
    first, second = corpus("llamacpp/23269-mtp-small-prompts.log").requests
    assert (first.read.value, first.prompt_ms.value) == (27, 789.03)
    assert any("fixed cost" in warning for warning in first.warnings)
    assert second.phases[0].ms.low == pytest.approx(49.0, abs=0.1)


def test_update_is_added_to_the_request_it_precedes() -> None:
    (request,) = life(
        "srv  get_availabl: updating prompt cache\n"
        "srv  get_availabl: prompt cache update took 335.74 ms\n"
        "slot launch_slot_: id  1 | task 7 | processing task, is_child = 0\n"
        "slot   operator(): id  1 | task 7 | new prompt, n_ctx_slot = 4096, n_keep = 4, "
        "task.n_tokens = 600\n"
        "slot   operator(): id  1 | task 7 | cached n_tokens = 88, memory_seq_rm [88, end)\n"
        "slot print_timing: id  1 | task 7 | \n"
        "prompt eval time =    1000.00 ms /   512 tokens (    1.95 ms per token,   512.00 t/s)\n"
        "       eval time =     200.00 ms /    10 tokens\n"
        "      total time =    1200.00 ms /   522 tokens\n"
    ).requests
    assert [phase.name for phase in request.phases] == ["prompt cache update", "prompt eval"]
    assert request.ttft_ms.low == pytest.approx(1335.74)
    assert (request.prompt.value, request.reused.value, request.read.value) == (600, 88, 512)
    assert request.remainders == ()


def test_checkpoints_lie_inside_prompt_eval() -> None:
    first, second = corpus("llamacpp/22746-qwen36-27b-checkpoint.log").requests
    assert (first.read.value, first.prompt_ms.value) == (157, 819.73)
    assert (second.read.value, second.prompt_ms.value) == (1443, 3150.0)
    assert second.prompt_ms.how == "derived"
    assert named(second, "checkpoint")[0].lane == "prompt eval"


def test_last_batch_of_64_is_a_batch_of_its_own() -> None:
    (request,) = corpus("llamacpp/19345-qwen-coder-next-batches.log").requests
    assert [tokens for _, tokens in batches(request)] == [2048, 2048, 1160, 64]
    assert all(ms is None for ms, _ in batches(request))
    assert (request.prompt_ms.value, request.generated.value) == (2168.33, 7)


def test_lengths_that_differ_are_not_comparable() -> None:
    found = corpus("llamacpp/13386-no-op-offload.log")
    assert [r.prompt_ms.value for r in found.requests] == [78715.84, 268849.41]
    assert any("do not compare" in note for note in found.notes)


def test_ollama_block_and_server_block_are_two_requests() -> None:
    ollama, server = corpus("llamacpp/12237-ollama-vs-server.log").requests
    assert (ollama.read.value, ollama.prompt_ms.value) == (1119, 2185.0)
    assert named(ollama, "model load")[0].ms.value == pytest.approx(11.114031)
    assert (server.read.value, server.prompt_ms.value) == (971, 8734.21)


def test_idle_time_and_load_are_not_in_time_to_first_token() -> None:
    found = corpus("llamacpp/beellama157-startup-to-prefill.log")
    (request,) = found.requests
    assert found.facts["load_ms"].value == pytest.approx(8320.0)
    assert (request.read.low, request.ttft_ms.low) == (12288, 3900.0)


def test_marks_are_starts_of_batches_not_a_cost() -> None:
    (request,) = corpus("ik_llamacpp/issue-1695-qwen35-397b.log").requests
    assert batches(request)[:3] == [(19000.0, 1024), (20000.0, 1024), (19000.0, 1024)]
    assert 50 < (request.facts["batch_tokens_per_s"].value or 0) < 54
    assert named(request, "checkpoint")[0].ms.value == 71.94
    assert request.reused.how == "bounded"


def test_two_batches_seen_from_one_mark() -> None:
    (request,) = corpus("ik_llamacpp/discussion-586-slow-kv-rm.log").requests
    assert request.prompt_ms.value == 128443.9
    assert named(request, "batches before")[0].ms.value == pytest.approx(67_132, abs=1)
    assert batches(request)[0][0] == pytest.approx(61_311, abs=1)


def test_checkpoint_is_not_the_cost_of_a_long_read() -> None:
    (request,) = corpus("ik_llamacpp/pr-1673-checkpoints.log").requests
    assert (request.read.value, request.prompt_ms.value) == (1110, 49152.01)
    assert named(request, "checkpoint")[0].ms.value == pytest.approx(157.56)
    assert batches(request)[0] == (48000.0, 1105)


def test_one_token_is_no_speed() -> None:
    first, second = corpus("ik_llamacpp/issue-1294-cache.log").requests
    assert (first.read.value, first.prompt_ms.value) == (2771, 2942.25)
    assert "read_tokens_per_s" not in second.facts
    assert any("no prompt speed" in warning for warning in second.warnings)


def test_nothing_reused_is_noted() -> None:
    found = corpus("ik_llamacpp/issue-455-kv-never-reused.log")
    assert (found.dialect, found.version) == ("ik_llama.cpp", "build 3712")
    assert [r.read.value for r in found.requests] == [13, 536, 536, 536]
    assert [r.reused.value for r in found.requests] == [0, 0, 0, 0]
    assert any("cache_prompt" in note for note in found.notes)


@pytest.mark.parametrize(
    ("name", "reads", "prompt_ms"),
    [
        ("issue-474-pp-regression.log", [10188] * 4, [161791.56, 612061.95, 937934.38, 613312.38]),
        ("pr-405-gpu-offload-policy.log", [3596, 3003], [32736.15, 13435.86]),
        (
            "pr-394-incompatible-deepseek.log",
            [3218, 3252, 3218, 3218],
            [246500.09, 51369.66, 35950.29, 104442.5],
        ),
    ],
)
def test_copied_blocks(name: str, reads: list[int], prompt_ms: list[float]) -> None:
    requests = corpus(f"ik_llamacpp/{name}").requests
    assert [r.read.value for r in requests] == reads
    assert [r.prompt_ms.value for r in requests] == prompt_ms


def test_bench_rows_and_served_requests() -> None:
    found = corpus("ik_llamacpp/issue-521-ot-semi-layers.log")
    served = [r for r in found.requests if "task" in r.facts]
    assert [r.reused.value for r in served] == [536, 1276, 3312, 5481]
    assert [r.read.value for r in served] == [740, 2036, 2169, 2751]
    assert found.requests[1].reused.value == 2048
    assert len(found.requests) == 13


def test_sum_over_requests_is_not_split() -> None:
    found = corpus("ik_llamacpp/pr-2353-reuse-lost.txt")
    assert [r.read.value for r in found.requests][4:] == [3366, 3250, 3306, 3362]
    assert all(r.prompt_ms.how == "missing" for r in found.requests)
    assert found.requests[0].facts["prompt_ms_of_all"].value == 8594.9


def test_classic_block_guards_against_zero() -> None:
    (request,) = life(
        "main: number of tokens in prompt = 3\n"
        "llama_print_timings: prompt eval time =     0.00 ms /     1 tokens\n"
        "llama_print_timings:        eval time =    20.00 ms /     2 runs\n"
        "llama_print_timings:       total time =    25.00 ms\n"
    ).requests
    assert (request.read.how, request.read.low, request.read.high) == ("bounded", 0, 1)
    assert request.remainders[0].ms.value == 5.0


def test_a_programs_summary_is_not_the_open_slots() -> None:
    slot, summary = life(
        "1.00.000.000 I slot print_timing: id  0 | task 9 | prompt processing, n_tokens =   64, "
        "progress = 0.20\n"
        "1.01.000.000 I common_perf_print: prompt eval time =     328.96 ms /     5 tokens\n"
    ).requests
    assert (slot.status, slot.read.low) == ("incomplete", 64)
    assert summary.read.value == 5


def test_slots_that_interleave_stay_apart() -> None:
    def slot(number: int, task: int, text: str) -> str:
        return f"1.00.{task:03d}.000 I slot update_slots: id  {number} | task {task} | {text}\n"

    one, two = life(
        slot(0, 10, "processing task, is_child = 0")
        + slot(0, 10, "new prompt, n_ctx_slot = 8192, n_keep = 0, task.n_tokens = 900")
        + slot(0, 10, "n_tokens = 0, memory_seq_rm [0, end)")
        + slot(1, 11, "processing task, is_child = 0")
        + slot(1, 11, "new prompt, n_ctx_slot = 8192, n_keep = 0, task.n_tokens = 300")
        + slot(1, 11, "n_tokens = 100, memory_seq_rm [100, end)")
        + slot(1, 11, "prompt eval time =     400.00 ms /   200 tokens (x)")
        + slot(0, 10, "prompt eval time =     900.00 ms /   900 tokens (x)")
        + slot(1, 11, "       eval time =      50.00 ms /     5 tokens (x)")
        + slot(0, 10, "       eval time =      70.00 ms /     7 tokens (x)")
    ).requests
    assert (one.read.value, one.prompt_ms.value, one.generated.value) == (900, 900.0, 7)
    assert (two.read.value, two.reused.value, two.decode_ms.value) == (200, 100, 50.0)
    assert any("other request slots" in warning for warning in one.warnings)


def test_cancelled_inside_the_prompt() -> None:
    (request,) = life(
        "0.01.000.000 I slot launch_slot_: id  0 | task 36 | processing task, is_child = 0\n"
        "0.06.000.000 I slot print_timing: id  0 | task 36 | prompt processing, n_tokens =   8192, "
        "progress = 0.23, t =   5.11 s / 1602.30 tokens per second\n"
        "0.07.000.000 W srv          stop: cancel task, id_task = 36\n"
        "0.07.500.000 I slot      release: id  0 | task 36 | stop processing: n_tokens = 8192\n"
    ).requests
    assert (request.status, request.read.low) == ("cancelled", 8192)


def test_restart_is_a_new_life_and_ports_are_lives() -> None:
    block = (
        "[{p}] build: 7404 (52392291b) with GNU 13.3.0\n"
        "[{p}] 0.01.000.000 I slot launch_slot_: id  0 | task 0 | processing task\n"
        "[{p}] 0.02.000.000 I slot print_timing: id  0 | task 0 | prompt eval time =  10.00 ms / "
        "5 tokens\n"
    )
    found = lives(block.format(p=8001) + block.format(p=8002) + block.format(p=8001))
    assert [(item.version, len(item.requests)) for item in found] == [("build 7404", 1)] * 3
    assert [item.first_line for item in found] == [1, 4, 7]


def test_json_timings_on_one_line_and_over_several() -> None:
    one, two = life(
        'data: {"content":"\\"prompt_ms\\": 5","timings":{"cache_n":690,"prompt_n":87,'
        '"prompt_ms":101.5,"predicted_n":1,"predicted_ms":9.0}}\n'
        'data: {"timings":{"cache_n":690,"prompt_n":87,"prompt_ms":101.5,"predicted_n":7,'
        '"predicted_ms":60.0,"draft_n":10,"draft_n_accepted":4}}\n'
        '"timings": {\n"prompt_n": 6,\n"prompt_ms": 201.665,\n"predicted_n": 600,\n'
        '"predicted_ms": 47212.818,\n"predicted_per_second": 12.7\n}\n'
    ).requests
    assert (one.prompt.value, one.reused.value, one.read.value) == (777, 690, 87)
    assert (one.generated.value, one.facts["drafts_accepted"].value) == (7, 4)
    assert (two.read.value, two.prompt_ms.value) == (6, 201.665)


def test_finish_does_not_change_what_follows() -> None:
    text = (DATA / "llamacpp/19345-qwen-coder-next-batches.log").read_text(encoding="utf-8")
    reader = LlamaCppReader("made.log")
    for number, line in enumerate(text.splitlines(), 1):
        reader.feed(number, line)
        reader.finish()
    assert reader.finish() == lives(text.replace("\r", ""))


def test_newer_key_value_and_json_logs() -> None:
    (request,) = life(
        '{"tid":"1","timestamp":1720645907,"level":"INFO","function":"update_slots","line":1,'
        '"msg":"kv cache rm [p0, end)","id_slot":0,"id_task":1,"p0":0}\n'
        '{"tid":"1","timestamp":1720645909,"level":"INFO","function":"print_timings","line":2,'
        '"msg":"prompt eval time     =    1048.86 ms /   221 tokens (","id_slot":0,"id_task":1}\n'
    ).requests
    assert (request.read.value, request.prompt_ms.value, request.facts["task"].value) == (
        221,
        1048.86,
        1,
    )
