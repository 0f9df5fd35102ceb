"""JSON lines between a benchmark and the process it measures; standard library only.

A worker says one line when it is ready, then one line for every line it gets, and ends when its
stdin does.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

Answer = dict[str, Any]


def storage_bytes(process: str = "self") -> int | None:
    """What a process has had fetched from storage so far, as the kernel counts it; direct reads
    and page faults alike. None where it does not count."""
    try:
        with open(f"/proc/{process}/io") as file:  # noqa: PTH123 - as few imports as can be
            return int(dict(line.split(":") for line in file)["read_bytes"])
    except (OSError, KeyError, ValueError):
        return None


def between(before: int | None, after: int | None) -> int | None:
    """The difference, or None where there is none."""
    return None if before is None or after is None else after - before


class Pipe:
    """The worker's end. Whatever a library prints goes to stderr, not between the lines."""

    def __init__(self) -> None:
        self._in: BinaryIO = os.fdopen(os.dup(0), "rb")
        self._out = os.dup(1)
        os.dup2(2, 1)
        sys.stdout = sys.stderr

    def say(self, answer: Answer) -> None:
        line = json.dumps(answer).encode() + b"\n"
        while line:
            line = line[os.write(self._out, line) :]

    def line(self) -> bytes:
        """The next request; b"" at the end."""
        return self._in.readline()

    def serve(self, ready: Answer, handlers: dict[str, Callable[..., Answer]]) -> None:
        """Answers {"op": name, ...} with `handlers[name](...)` until stdin ends."""
        self.say(ready)
        while line := self.line():
            request = json.loads(line)
            self.say(handlers[request.pop("op")](**request))
