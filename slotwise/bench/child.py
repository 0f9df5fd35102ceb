"""A worker process seen from the benchmark: ask it, time it from outside, prove it idle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Self, TypeVar, cast

from slotwise.bench.cgroup import MemoryGroup
from slotwise.bench.workers.protocol import Answer
from slotwise.errors import SlotwiseError

PACKAGE = Path(__file__).parents[1]
IDLE_CHECK_S = 0.05
IDLE_SHARE = 0.02
"""A process counts as idle when it uses less than this share of one core."""
IDLE_TIMEOUT_S = 10.0
END_TIMEOUT_S = 20.0
MEMORY_KINDS = ("VmHWM", "VmRSS", "RssAnon", "RssFile", "RssShmem")

ELSEWHERE = """\
import sys, types
sys.modules["slotwise"] = ours = types.ModuleType("slotwise")
ours.__path__ = [sys.argv.pop(1)]
from importlib import import_module
import_module("slotwise.bench.workers." + sys.argv.pop(1)).main()
"""
"""Runs a worker in an interpreter that lacks slotwise: it sees this folder, and no other package
of ours that may be built for another Python."""

T = TypeVar("T")


Schedule = dict[str, tuple[int, int]]
"""Thread -> (nanoseconds on a core, nanoseconds ready to run without one)."""


LAST_WORDS = 8
"""Lines of what a worker said that are shown when it ends early."""


def how_it_ended(code: int) -> str:
    """An exit status of subprocess in words: negative ones are signals."""
    if code >= 0:
        return f"ended early with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    refused = ": it was not built for this processor; build it here" if name == "SIGILL" else ""
    return f"was killed by {name}{refused}"


class WorkerEnded(SlotwiseError):
    """A worker ended before it had answered."""


class Child:
    """A worker `slotwise.bench.workers.NAME` in a process of its own, in a memory group if one is
    given; use it as a context manager. Raises WorkerEnded when it ends before it is ready."""

    def __init__(
        self,
        name: str,
        *args: str,
        python: str = sys.executable,
        group: MemoryGroup | None = None,
    ) -> None:
        self.name, self._group = name, group
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        command = [python, *_start(name, python), *args]
        try:
            self._process = subprocess.Popen(
                group.inside(command) if group else command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._words,
                start_new_session=True,  # Ctrl-C is for us; we end it
            )
        except OSError as error:
            self._words.close()
            raise SlotwiseError(
                f"{python} cannot be started: {error.strerror}",
                next_step="Name a Python interpreter that is there.",
            ) from None
        try:
            self.ready = self.read()
            """What the worker says of itself: versions, sizes, settings."""
        except BaseException:
            self.kill()
            raise

    # -- asking ------------------------------------------------------------------------

    def ask(self, op: str, **arguments: Any) -> Answer:
        """Sends one request and waits for its one answer."""
        self.send(op, **arguments)
        return self.read()

    def send(self, op: str, **arguments: Any) -> int:
        """Sends a request; returns the clock just before its bytes left."""
        line = json.dumps({"op": op, **arguments}).encode() + b"\n"
        pipe = cast(Any, self._process.stdin)
        at = perf_counter_ns()
        try:
            pipe.write(line)
            pipe.flush()
        except BrokenPipeError:
            raise self._ended() from None
        return at

    def read(self) -> Answer:
        return self.read_stamped()[1]

    def read_stamped(self) -> tuple[int, Answer]:
        """(clock when the answer's first byte was here, the answer)."""
        pipe = cast(Any, self._process.stdout)
        first = pipe.peek(1)
        at = perf_counter_ns()
        if not first:
            raise self._ended()
        return at, json.loads(pipe.readline())

    def _ended(self) -> WorkerEnded:
        code = self._process.wait()
        if self._group and self._group.oom_kills():
            return WorkerEnded(
                f"the worker {self.name} was killed: its control group of "
                f"{self._group.limit / 2**20:,.0f} MiB was full"
            )
        self._words.seek(0)
        words = self._words.read().decode(errors="replace").strip().splitlines()
        said = "\n".join(words[-LAST_WORDS:]) or "nothing"
        return WorkerEnded(f"the worker {self.name} {how_it_ended(code)}\nLast it said:\n{said}")

    # -- watching ------------------------------------------------------------------------

    def cpu_ns(self) -> int:
        """CPU time of its threads so far."""
        return sum(
            int(path.read_text().split()[0])
            for path in Path(f"/proc/{self._process.pid}/task").glob("*/schedstat")
        )

    def schedule(self) -> Schedule:
        """What its threads have done so far."""
        found: Schedule = {}
        for path in Path(f"/proc/{self._process.pid}/task").glob("*/schedstat"):
            with suppress(OSError):  # a thread that has just ended
                cpu, waited, _ = map(int, path.read_text().split())
                found[path.parent.name] = cpu, waited
        return found

    def memory(self) -> dict[str, int]:
        """Resident bytes: the peak (VmHWM), and what is there now by kind."""
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        found = dict(line.split(":", 1) for line in lines)
        return {kind: int(found[kind].split()[0]) * 1024 for kind in MEMORY_KINDS}

    def wait_idle(self) -> None:
        """Until its threads have stopped spinning: OpenMP lets them turn for a while."""
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        before = self.cpu_ns()
        while time.monotonic() < deadline:
            time.sleep(IDLE_CHECK_S)
            now = self.cpu_ns()
            if now - before < IDLE_SHARE * IDLE_CHECK_S * 1e9:
                return
            before = now
        raise SlotwiseError(
            f"the worker {self.name} has not come to rest within {IDLE_TIMEOUT_S:.0f} s"
        )

    # -- ending ----------------------------------------------------------------------------

    def close(self) -> None:
        """Lets it end in order; kills it when it does not."""
        cast(Any, self._process.stdin).close()
        try:
            self._process.wait(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.kill()

    def kill(self) -> None:
        """Ends it now, whatever it does, and frees what belongs to it."""
        with suppress(ProcessLookupError):  # with whatever it has started: it leads its session
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):  # what it was not there to read any more
                cast(Any, pipe).close()
        self._words.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close() if kind is None else self.kill()


def _start(name: str, python: str) -> list[str]:
    if python == sys.executable:
        return ["-m", f"slotwise.bench.workers.{name}"]
    return ["-c", ELSEWHERE, str(PACKAGE), name]


def crowding(before: Schedule, after: Schedule, wall_ns: int) -> float:
    """The share of the time in which a thread that computes was kept from a core by others. Threads
    that compute are those with at least half the CPU time of the busiest one; I/O lanes are not."""
    spent = {
        thread: (cpu - before.get(thread, (0, 0))[0], waited - before.get(thread, (0, 0))[1])
        for thread, (cpu, waited) in after.items()
    }
    busiest = max((cpu for cpu, _ in spent.values()), default=0)
    return max((w for cpu, w in spent.values() if 2 * cpu >= busiest), default=0) / max(1, wall_ns)


def while_idle(others: Sequence[Child], work: Callable[[], T]) -> tuple[T, int]:
    """`work()` while `others` rest; its result, and the CPU nanoseconds they used meanwhile."""
    for child in others:
        child.wait_idle()
    before = sum(child.cpu_ns() for child in others)
    result = work()
    return result, sum(child.cpu_ns() for child in others) - before
