"""A worker process seen from the benchmark: ask it, time it from outside, prove it idle."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Self, TypeVar, cast

import click

from bench.workers.protocol import Answer

ROOT = Path(__file__).parents[1]
IDLE_CHECK_S = 0.05
IDLE_SHARE = 0.02
"""A process counts as idle when it uses less than this share of one core."""
IDLE_TIMEOUT_S = 10.0
MEMORY_KINDS = ("VmHWM", "VmRSS", "RssAnon", "RssFile", "RssShmem")

T = TypeVar("T")


class Child:
    """A worker started as `python -m bench.workers.NAME ...`; use it as a context manager."""

    def __init__(self, name: str, *args: str, python: str = sys.executable) -> None:
        self.name = name
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        self._process = subprocess.Popen(
            [python, "-m", f"bench.workers.{name}", *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            cwd=ROOT,
        )
        self.ready = self.read()
        """What the worker says of itself: versions, sizes, settings."""

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
        pipe.write(line)
        pipe.flush()
        return at

    def read(self) -> Answer:
        return self.read_stamped()[1]

    def read_stamped(self) -> tuple[int, Answer]:
        """(clock when the answer's first byte was here, the answer)."""
        pipe = cast(Any, self._process.stdout)
        first = pipe.peek(1)
        at = perf_counter_ns()
        if not first:
            self._process.wait()
            self._words.seek(0)
            words = self._words.read().decode(errors="replace")[-2000:]
            raise click.ClickException(f"the worker {self.name} ended early. It said:\n{words}")
        return at, json.loads(pipe.readline())

    # -- watching ------------------------------------------------------------------------

    def cpu_ns(self) -> int:
        """CPU time of its threads so far."""
        return sum(
            int(path.read_text().split()[0])
            for path in Path(f"/proc/{self._process.pid}/task").glob("*/schedstat")
        )

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
        raise click.ClickException(
            f"the worker {self.name} has not come to rest within {IDLE_TIMEOUT_S:.0f} s"
        )

    # -- ending ----------------------------------------------------------------------------

    def close(self) -> None:
        cast(Any, self._process.stdin).close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        cast(Any, self._process.stdout).close()
        self._words.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def while_idle(others: Sequence[Child], work: Callable[[], T]) -> tuple[T, int]:
    """`work()` while `others` rest; its result, and the CPU nanoseconds they used meanwhile."""
    for child in others:
        child.wait_idle()
    before = sum(child.cpu_ns() for child in others)
    result = work()
    return result, sum(child.cpu_ns() for child in others) - before
