"""Signals while a ladder runs: the first one unwinds, so that all is ended; later ones are noted.

What unwinding has to do (end an arm, restore production, write the record) cannot be broken off by
a second Ctrl-C. Nor can it by a terminal that is gone: what cannot be said is left unsaid.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

Say = Callable[[str], None]
NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STDERR = 2


class Signals:
    """Used once per run: `caught` around everything, `only_note` from where nothing may unwind."""

    def __init__(self) -> None:
        self._raised = False
        self._only_note = False
        self._doing = "what was started is being ended"
        self.noted = False
        """A signal came that did not unwind: what waits politely need not any more."""

    def only_note(self, doing: str) -> None:
        self._only_note, self._doing = True, doing

    def hurry(self) -> bool:
        return self.noted

    @contextmanager
    def caught(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._handle) for number in NUMBERS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, _frame: Any) -> None:
        if self._raised or self._only_note:
            self.noted = True
            with suppress(OSError):  # not through Python's buffers: they may be in use just now
                os.write(STDERR, f"{self._doing}; this cannot be interrupted\n".encode())
            return
        self._raised = True
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)


def never_failing(say: Callable[..., None]) -> Callable[..., None]:
    """`say`, for where the terminal or the pipe behind it may be gone."""

    def quietly(*arguments: Any) -> None:
        with suppress(OSError, ValueError):
            say(*arguments)

    return quietly
