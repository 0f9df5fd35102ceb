"""`slotwise serve` as a process: exit codes, signals, refusals."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PROGRAM = [sys.executable, "-c", "from slotwise.cli import entry; entry()", "serve"]
SMALL = ("--threads", "1", "--memory", "64MiB", "--park-disk", "0")


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [*PROGRAM, *arguments, *SMALL], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def until_ready(child: subprocess.Popen[str]) -> str:
    assert child.stderr is not None
    for line in child.stderr:
        if found := re.search(r"(http://\S+) is ready", line):
            return found[1]
    raise AssertionError(f"it ended with {child.wait()}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_the_end_in_order(talking: Path, number: signal.Signals) -> None:
    with process(str(talking), "--port", "0") as child:
        url = until_ready(child)
        with urllib.request.urlopen(f"{url}/health") as response:
            assert response.status == 200
        child.send_signal(number)
        out, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    assert "stopping: the running answer is finished first" in err
    assert out == ""


def test_a_port_that_is_taken(talking: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with process(str(talking), "--port", str(taken.getsockname()[1])) as child:
            _, err = child.communicate(timeout=60)
    assert child.returncode == 2
    assert "cannot listen on 127.0.0.1 port" in err
    assert "--port (0 takes any free one)" in err


def test_a_model_that_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(20))
    with process(str(tmp_path / "bad.gguf"), "--port", "0") as child:
        _, err = child.communicate(timeout=60)
    assert child.returncode == 3
    assert "refusal: " in err
    assert "Traceback" not in err


def test_an_open_door_is_refused(talking: Path) -> None:
    with process(str(talking), "--host", "0.0.0.0") as child:
        _, err = child.communicate(timeout=60)
    assert child.returncode == 2
    assert "there is no --api-key" in err
