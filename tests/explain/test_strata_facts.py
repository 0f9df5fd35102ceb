"""Strata's counters and averages: facts with a name, differences inside one engine life."""

from __future__ import annotations

from slotwise.explain.readers.strata import StrataReader
from slotwise.explain.record import Life, Request


def summary(prompt: int) -> str:
    return (
        f"strata serve: prompt {prompt} tokens = 0 reused + {prompt} read in 900 ms "
        "(100.0 tok/s), 10 generated in 100 ms (100.0 tok/s), drafts accepted 1 of 2\n"
    )


def life(text: str) -> Life:
    reader = StrataReader("made.log")
    for number, line in enumerate(text.splitlines(), 1):
        reader.feed(number, line)
    (found,) = reader.finish()
    assert not reader.unknown.counts
    return found


def value(request: Request, name: str) -> tuple[str, float | None]:
    known = request.facts[name]
    return known.how, known.value


def stage(number: int, windows: int, wait: float) -> str:
    return (
        f"strata serve: stage {number}: {windows} windows; per window: wait for the GPU {wait:.3f} "
        "ms, pool + plan 1.000 ms, host staging 0.500 ms, commit 0.250 ms\n"
    )


def test_kv_streaming_counts_from_the_start() -> None:
    line = "strata serve: KV streaming: 97.34% of 1947168 block reads hit VRAM, 208.9 MiB read\
 from RAM - OVERFLOW (too few resident cells)\n"
    (request,) = life(summary(100) + line).requests
    assert value(request, "KV reads in VRAM % (since start)") == ("measured", 97.34)
    assert value(request, "KV MiB from RAM (since start)") == ("measured", 208.9)


def test_stage_averages_become_a_requests_own() -> None:
    """10 windows of 2 ms, then 30 windows of 4 ms on the average: 100 ms in the second request."""
    first, second = life(
        summary(100) + stage(0, 10, 2.0) + stage(3, 10, 1.0) + summary(200) + stage(0, 30, 4.0)
    ).requests
    assert first.facts["stage 0: wait for the GPU ms"].how == "bounded"
    assert value(second, "stage 0: wait for the GPU ms") == ("derived", 100.0)
    assert value(second, "stage 0: windows") == ("derived", 20)
    assert first.facts["stage 3: windows"].high == 10
    assert not [p for r in (first, second) for p in r.phases if "stage" in p.lane]


def test_a_second_cards_line_is_of_its_request_in_new_versions() -> None:
    line = (
        "strata serve: CUDA1: 50835 expert entries, 3657 active layer launches, 140.1 MiB returned "
        "(1401.0 MiB with full rows){}; host 184 ms staging+launching, 1133 ms waiting for it{}\n"
    )
    new = " in this request"
    (request,) = life(summary(100) + line.format(new, new)).requests
    assert value(request, "CUDA1: waiting ms") == ("measured", 1133.0)
    first, second = life(
        summary(100)
        + line.format("", "")
        + summary(200)
        + line.format("", "").replace("1133", "1200")
    ).requests
    assert first.facts["CUDA1: waiting ms"].how == "bounded"
    assert value(second, "CUDA1: waiting ms") == ("derived", 67.0)


def test_decode_stages_are_per_window() -> None:
    line = (
        "strata decode GPU stages (ms/window): GDN layers: q8+qkv/q-idx gemv 5.66 conv 0.10 waitA "
        "0.16 VRAM hits 11.40 (gap) 0.03 | QSA layers: attention 0.83 VRAM hits 3.28 | total 40.50 "
        "ms/window over 118 windows\n"
    )
    (request,) = life(line + summary(100)).requests
    assert value(request, "decode GPU ms a window") == ("measured", 40.5)
    assert value(request, "decode GDN: VRAM hits ms a window") == ("measured", 11.4)
    assert value(request, "decode QSA: attention ms a window") == ("measured", 0.83)


def test_batch_averages_are_the_lifes() -> None:
    found = life(
        summary(100)
        + "strata batch: 500 windows, avg 1.80 rows, 30.50 ms/window = run 25.00 (CUDA0 GPU-reach "
        "wait 9.00 + CPU experts 3.00) + commit 1.00 + emit 0.50; per layer-window: CPU experts "
        "1.00, VRAM hits 20.00, PCIe 0.00; 59.0 rows/s over 15250 ms of wall time (admissions "
        "included)\n"
    )
    assert found.facts["batch rows a window (last line)"].value == 1.8
    assert found.facts["batch wall ms (last line)"].value == 15250
