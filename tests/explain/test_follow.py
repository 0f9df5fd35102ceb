"""`--follow`: another process writes while we read: half lines, rotation, truncation."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slotwise.explain.readers import follow_files, read_files
from slotwise.explain.record import Reading, Request

DATA = Path(__file__).parents[1] / "data" / "explain"
LOGS = [
    "made/llamacpp-2026-11-verbose.log",
    "made/ik-2026-02-slots.log",
    "made/vllm-0.6-docker.log",
    "made/sglang-2025-pp.log",
    "made/ktransformers-two.log",
    "bigmoe/2026-07-12__qwen_stream.log",
    "strata-yqyo1-mtp-serve/layout3.log",
    "strata-niko-3070ti-ladder/orchestrator-session1.log",
]
WRITER = """
import os, sys, time
out, step, *rest = sys.argv[1:]
parts = [open(name, "rb").read() for name in rest]
for number, data in enumerate(parts):
    if number and step == "rotate":
        os.rename(out, out + f".{number}")
    mode = "ab" if number == 0 else "wb"
    with open(out, mode, buffering=0) as log:
        for at in range(0, len(data), max(1, len(data) // 7)):
            log.write(data[at : at + max(1, len(data) // 7)])
            time.sleep(0.01)
    time.sleep(0.6)
"""


def followed(path: Path, mode: str, sources: list[Path]) -> Iterator[Reading]:
    """Readings while a process writes the sources to `path`, then one after its end."""
    path.touch()
    command = [sys.executable, "-c", WRITER, str(path), mode, *map(str, sources)]
    with subprocess.Popen(command) as writer:
        end = time.monotonic() + 60
        ended = [False]

        def keep_going() -> bool:
            if ended[0] or time.monotonic() > end:
                return False
            ended[0] = writer.poll() is not None
            return True

        yield from follow_files([path], interval_s=0.02, keep_going=keep_going)
        assert writer.wait(timeout=10) == 0


def requests(reading: Reading) -> list[Request]:
    return [request for life in reading.lives for request in life.requests]


@pytest.mark.parametrize("name", LOGS)
def test_a_log_that_grows_is_read_as_if_it_were_whole(name: str, tmp_path: Path) -> None:
    readings = list(followed(tmp_path / Path(name).name, "append", [DATA / name]))
    whole = read_files([DATA / name])
    assert len(readings) > 1
    assert readings[-1].lives == whole.lives
    assert sum(readings[-1].unknown.values()) == sum(whole.unknown.values())


@pytest.mark.parametrize("mode", ["rotate", "truncate"])
def test_a_log_rotated_or_truncated_goes_on_in_the_new_one(mode: str, tmp_path: Path) -> None:
    first = DATA / "made/llamacpp-2026-11-verbose.log"
    second = DATA / "made/llama-cli-2024-12.log"
    path = tmp_path / "engine.log"
    *_, last = followed(path, mode, [first, second])
    before, after = requests(read_files([first])), requests(read_files([second]))
    found = requests(last)
    assert len(found) == len(before) + len(after)
    assert [r.prompt_ms for r in found] == [r.prompt_ms for r in (*before, *after)]


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_text(
        "llama_print_timings: prompt eval time =     222.00 ms /    3", encoding="ascii"
    )
    steps = iter((True, True, False))

    def keep_going() -> bool:
        step = next(steps)
        if step:
            with path.open("a", encoding="ascii") as log:
                log.write("7 tokens\n")
        return step

    readings = list(follow_files([path], interval_s=0.01, keep_going=keep_going))
    assert requests(readings[0]) == []
    assert requests(readings[1])[0].read.value == 37
