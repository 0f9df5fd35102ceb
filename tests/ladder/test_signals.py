"""Signals to a real ladder without a window of service: no process of an arm outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ladder.place import PATIENCE, Place, eventually, taken

from slotwise.ladder.processes import marked
from slotwise.ladder.record import read_record

STUBBORN = """
import signal, sys, runpy
sys.argv = sys.argv[1:]
signal.signal(signal.SIGTERM, lambda *_: print("asked to end", flush=True))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""A server that does not end when it is asked to."""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.end()


def measuring(place: Place) -> tuple[subprocess.Popen[bytes], str]:
    """A ladder with an arm running, and the mark of its processes."""
    ladder = place.program(samples=10_000, window=False)
    eventually(lambda: taken(place) >= 2)
    mark = read_record(place.out)["run"]
    assert marked(mark)
    return ladder, mark


def stubborn(place: Place) -> list[str]:
    return [sys.executable, "-c", STUBBORN, *place.server[1:]]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_one_signal_ends_the_arm_and_completes_the_record(
    place: Place, number: int, code: int
) -> None:
    ladder, mark = measuring(place)
    ladder.send_signal(number)
    _, said = ladder.communicate(timeout=PATIENCE)
    assert ladder.returncode == code, said
    assert b"Traceback" not in said
    assert marked(mark) == []
    record = read_record(place.out)
    assert record["status"] == "interrupted"
    assert record["pairing"] is not None


def test_a_second_one_ends_an_arm_at_once_that_does_not_want_to(place: Place) -> None:
    place.write_arm(command=stubborn(place))
    log = place.folder / "arm.log"
    text = place.arm_file.read_text().replace("[request]", "log = 'arm.log'\n[request]")
    place.arm_file.write_text(text)
    ladder, mark = measuring(place)
    ladder.send_signal(signal.SIGINT)
    eventually(lambda: "asked to end" in log.read_text())
    assert marked(mark)
    for _ in range(3):
        ladder.send_signal(signal.SIGINT)
    _, said = ladder.communicate(timeout=15.0)  # less than it would have waited
    assert ladder.returncode == 130, said
    assert b"cannot be interrupted" in said
    assert marked(mark) == []
    assert read_record(place.out)["status"] == "interrupted"


def test_signals_in_quick_succession(place: Place) -> None:
    ladder, mark = measuring(place)
    for _ in range(20):
        os.kill(ladder.pid, signal.SIGINT)
        os.kill(ladder.pid, signal.SIGTERM)
    _, said = ladder.communicate(timeout=PATIENCE)
    assert ladder.returncode in (130, 143), said
    assert marked(mark) == []
    assert read_record(place.out)["status"] == "interrupted"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_a_kill_of_the_ladder_takes_the_arm_along(place: Place) -> None:
    ladder, mark = measuring(place)
    ladder.kill()
    ladder.communicate()
    eventually(lambda: marked(mark) == [])


def test_what_an_arm_left_behind_is_ended_too(place: Place) -> None:
    place.write_arm(command=place.behind_another_process())
    ladder, mark = measuring(place)
    ladder.send_signal(signal.SIGINT)
    ladder.communicate(timeout=PATIENCE)
    assert marked(mark) == []


def test_a_terminal_that_is_gone_does_not_stop_the_restoration(place: Place) -> None:
    """Nobody reads what the ladder says any more when it is interrupted."""
    ladder = place.program(samples=10_000)
    eventually(lambda: taken(place) >= 1)
    assert ladder.stderr is not None
    ladder.stderr.close()
    ladder.send_signal(signal.SIGHUP)
    ladder.wait(PATIENCE)
    assert place.steps()[-1] == "restored"
    assert place.status() == 200
    assert read_record(place.out)["status"] == "interrupted"
