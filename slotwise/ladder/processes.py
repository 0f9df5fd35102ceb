"""Starts and stops the processes of a window, so that none of an arm is left behind.

An arm runs in a session of its own and carries a mark in its environment. Children inherit the
mark, so they are found again after they have left their parent, and by a second run too. Where the
kernel can (Linux), an arm dies with the process that started it, however that one ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from slotwise.errors import SlotwiseError

MARK = "SLOTWISE_LADDER_WINDOW"
GRACE_SECONDS = 20.0
POLL_SECONDS = 0.05
LONGEST_OUTPUT = 2_000
PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""

left_running: list[subprocess.Popen[bytes]] = []
"""Production servers that were started and stay: nobody waits for them."""


def launch(
    command: Sequence[str], *, environment: Mapping[str, str], log: Path | None, tied: bool
) -> subprocess.Popen[bytes]:
    """Starts a process in a session of its own; its output goes to `log` or nowhere.

    With `tied` it is killed when this process ends; call from the main thread, it is that one's
    end that counts.
    """
    out: IO[bytes] | int = subprocess.DEVNULL
    try:
        if log is not None:
            out = log.open("ab")
        return subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            env={**os.environ, **environment}, start_new_session=True,
            preexec_fn=dies_with_parent(signal.SIGKILL) if tied else None,
        )  # fmt: skip
    except OSError as error:
        raise SlotwiseError(
            f"{command[0]} cannot be started: {error.strerror}", next_step="Check the command."
        ) from error
    finally:
        if not isinstance(out, int):
            out.close()


def leave_running(process: subprocess.Popen[bytes]) -> None:
    left_running.append(process)


def run_to_end(command: Sequence[str], *, seconds: float) -> None:
    """Runs a command to its end. Raises SlotwiseError with the end of its output if it fails."""
    try:
        done = subprocess.run(
            list(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=seconds, check=False, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise SlotwiseError(f"{command[0]} cannot be started: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise SlotwiseError(f"{command[0]} did not end within {seconds:g} s") from error
    if done.returncode:
        said = done.stdout[-LONGEST_OUTPUT:].decode(errors="replace").strip()
        raise SlotwiseError(
            f"{command[0]} ended with {ended_with(done.returncode)}\n{said}".strip()
        )


def stop(
    process: subprocess.Popen[bytes], *, mark: str, hurry: Callable[[], bool],
    grace: float = GRACE_SECONDS,
) -> None:  # fmt: skip
    """Ends an arm and everything it started: politely, then by force; at once when in a hurry."""
    try:
        _signal_group(process.pid, signal.SIGTERM)
        end = time.monotonic() + grace
        while process.poll() is None and time.monotonic() < end and not hurry():
            time.sleep(POLL_SECONDS)
    finally:  # a signal to this process may have ended the waiting
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()
        stop_marked(mark, grace=0.0)


def stop_marked(mark: str, *, grace: float = GRACE_SECONDS) -> int:
    """Ends every process that carries the mark; how many there were."""
    found = marked(mark)
    for number, wait in ((signal.SIGTERM, grace), (signal.SIGKILL, GRACE_SECONDS)):
        left = marked(mark)
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        end = time.monotonic() + (wait if left else 0.0)
        while marked(mark) and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
    return len(found)


def marked(mark: str) -> list[int]:
    """Processes with the mark in their environment (Linux; elsewhere none is found)."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
            state = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            continue
        if wanted in environment.split(b"\0") and state not in "ZX":
            found.append(int(folder.name))
    return found


def _signal_group(leader: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def dies_with_parent(number: int) -> Callable[[], None] | None:
    """For `preexec_fn`: what a child calls to get this signal when this process ends (Linux)."""
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def tie() -> None:
        prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it ended in between
            os._exit(1)

    return tie


def ended_with(code: int) -> str:
    """`exit code 1` or `SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
