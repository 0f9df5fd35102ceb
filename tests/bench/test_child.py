"""What is said of a worker that ends before it has answered: real processes, really killed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from slotwise.bench.child import Child, WorkerEnded, how_it_ended


def interpreter(folder: Path, script: str) -> str:
    """Something that starts like a Python and does what the shell `script` says."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def ending(folder: Path, script: str) -> list[str]:
    with pytest.raises(WorkerEnded) as raised:
        Child("peer", python=interpreter(folder, script))
    return str(raised.value).splitlines()


def test_a_signal_is_named_and_only_the_last_words_are_shown(tmp_path: Path) -> None:
    lines = ending(tmp_path, "seq 1 500 >&2; kill -ILL $$")
    assert lines[0] == (
        "the worker peer was killed by SIGILL: it was not built for this processor; build it here"
    )
    assert lines[1:] == ["Last it said:", *map(str, range(493, 501))]


def test_an_exit_code_is_named_and_silence_too(tmp_path: Path) -> None:
    assert ending(tmp_path, "exit 3") == [
        "the worker peer ended early with exit code 3",
        "Last it said:",
        "nothing",
    ]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-signal.SIGSEGV, "was killed by SIGSEGV"),
        (-signal.SIGRTMIN - 1, f"was killed by signal {signal.SIGRTMIN + 1}"),
        (0, "ended early with exit code 0"),
    ],
)
def test_how_it_ended(code: int, words: str) -> None:
    assert how_it_ended(code) == words
