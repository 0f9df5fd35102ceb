"""One request on its way through the server, and what it tells whoever waits for it."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from slotwise.engine.text import Prompt
from slotwise.serve.ask import Ask
from slotwise.serve.faults import ApiError
from slotwise.serve.pieces import Piece
from slotwise.trace.ledger import CLOCK, LedgerRecord
from slotwise.trace.record import Edges, RequestRecord

Finish = Literal["stop", "length", "tool_calls"]
_order = itertools.count(1)


@dataclass(frozen=True)
class Progress:
    """How far the prompt read is, and where its time went so far."""

    prompt: int
    reused: int
    processed: int
    share: float
    elapsed_ns: int
    phases: dict[str, int]
    expert_slots: dict[str, int]


@dataclass(frozen=True)
class Done:
    """The answer's end. `cause` says more than OpenAI's reason does."""

    finish: Finish
    cause: Literal["stop token", "stop string", "max_tokens", "context", "time limit"]
    record: RequestRecord


Event = Piece | Progress | LedgerRecord | Done | ApiError
Post = Callable[[Event], None]


class Stamps:
    """When the response's bytes were written, on the ledger's clock."""

    def __init__(self, start_ns: int) -> None:
        self._start_ns = start_ns
        self._at: dict[str, int] = {}

    def mark(self, edge: str) -> None:
        """Keeps the first time only."""
        self._at.setdefault(f"{edge}_ns", CLOCK() - self._start_ns)

    def edges(self) -> Edges:
        return Edges(**self._at)


@dataclass(eq=False)
class Job:
    """A request that was accepted. Its events are posted by the engine's thread."""

    ask: Ask
    start_ns: int
    post: Post
    name: str
    """The client's X-Request-Id, or one made up."""
    order: int = field(default_factory=lambda: next(_order))
    received: float = field(default_factory=time.time)
    cancel: threading.Event = field(default_factory=threading.Event)
    enough: threading.Event = field(default_factory=threading.Event)
    written: threading.Event = field(default_factory=threading.Event)
    """Set when the first token's bytes are with the system, or will never be."""
    out_of_time: bool = False
    prompt: Prompt | None = None
    running: bool = False
    record: RequestRecord | None = None
    """Once it has ended."""
    stamps: Stamps = field(init=False)

    def __post_init__(self) -> None:
        self.stamps = Stamps(self.start_ns)

    @property
    def request(self) -> str | None:
        """Its name in ledgers and traces, once it has one."""
        return self.prompt.opened[0] if self.prompt else None

    def abandon(self) -> None:
        """Nobody waits for it any more."""
        self.cancel.set()
        self.written.set()

    def summary(self) -> dict[str, Any]:
        """For /v1/requests while it has not ended."""
        return {
            "id": self.name,
            "request": self.request,
            "state": "running" if self.running else "queued",
            "received": self.received,
            "prompt_tokens": len(self.prompt.tokens) if self.prompt else None,
        }


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"
