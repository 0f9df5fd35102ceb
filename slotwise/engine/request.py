"""One run of `Engine.generate`: the order of a request's steps, and its end in every case."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from slotwise.engine.logprobs import TokenLogprobs, token_logprobs
from slotwise.engine.prompt import Cancelled
from slotwise.engine.records import RequestBooks
from slotwise.engine.sampling import Sampler
from slotwise.errors import UsageError
from slotwise.trace.ledger import CLOCK, Ledger, LedgerRecord, Status
from slotwise.trace.record import DecodeTally, Edges

if TYPE_CHECKING:
    from slotwise.engine.engine import Engine


@dataclass(frozen=True)
class Step:
    """One token of an answer."""

    token: int
    first: bool
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class ReadProgress:
    """How far the prompt read is. `read` counts whole chunks; `share` also their layers."""

    prompt: int
    reused: int
    read: int
    share: float


@dataclass(frozen=True, kw_only=True)
class Extras:
    """What a server wants of a request beyond its tokens."""

    logprobs: int | None = None
    """Give each step its logprob, and those of so many most probable tokens."""
    reuse: bool = True
    """False reads the whole prompt, whatever the state holds of it."""
    enough: threading.Event = field(default_factory=threading.Event)
    """Set by the caller to end the answer in order: it is `done`, not cancelled."""
    on_progress: Callable[[ReadProgress], None] | None = None
    """Called by the engine's thread before each layer of the prompt read."""
    on_ledger: Callable[[LedgerRecord], None] | None = None
    """Called by the engine's thread when the first token is out."""
    edges: Callable[[], Edges] = Edges
    """Asked for when the request has ended."""


class Request:
    """What happens to one prompt, and the books about it."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        *,
        ledger: Ledger | None = None,
        closed: LedgerRecord | None = None,
        cancel: threading.Event | None = None,
        extras: Extras | None = None,
    ) -> None:
        self._engine, self._loaded = engine, engine.loaded
        self._ledger, self._cancel = ledger or Ledger(), cancel or threading.Event()
        self._extras = extras or Extras()
        self._books = RequestBooks(name, engine.loaded, engine.forecaster)
        self._books.ledger = closed
        self._error: str | None = None
        self._layers_begun = 0

    def run(
        self, prompt: Sequence[int], sampler: Sampler, max_tokens: int, stop: frozenset[int]
    ) -> Generator[Step]:
        status: Status = "failed"
        try:
            self._begin()
            step = self._first_step(prompt, sampler)
            if step.token not in stop:
                with self._ledger.phase("emit"):
                    self._books.generated = 1
                    yield step
            self._close_ledger("done")
            if step.token not in stop:
                yield from self._decode(step.token, len(prompt), sampler, max_tokens, stop)
            status = "done"
        except (Cancelled, GeneratorExit, KeyboardInterrupt):
            status = "cancelled"
            raise
        except Exception as error:
            self._error = type(error).__name__
            raise
        finally:
            self.finish(status)

    def _begin(self) -> None:
        if self._engine.running is not None:
            raise UsageError(
                f"request {self._engine.running._books.name} has not ended",
                next_step="Read its steps to the end or close them first.",
            )
        self._engine.running = self
        self._books.begin()
        if self._loaded.experts:
            self._loaded.experts.watch(self._check)

    def _first_step(self, prompt: Sequence[int], sampler: Sampler) -> Step:
        loaded, ledger, books = self._loaded, self._ledger, self._books
        books.prompt = len(prompt)
        self._look_up(prompt)
        part = prompt[books.reused : -1]
        if part:
            self._read(part)
        if loaded.experts and loaded.experts.refill_mode == "blocking":
            with ledger.phase("refill"):
                loaded.experts.refill()
                books.refill = loaded.experts.refill_books if books.loan else None
        with ledger.phase("first_window"):
            self._check()
            logits = self._engine.window(prompt[-1], len(prompt) - 1)
        with ledger.phase("sample"):
            return self._step(sampler, logits, first=True)

    def _look_up(self, prompt: Sequence[int]) -> None:
        found = self._engine.conversations.enter(prompt, self._ledger, reuse=self._extras.reuse)
        self._books.conversation, self._books.reused = found, found.reused
        with self._ledger.phase("lookup"):
            self._books.foretell(self._ledger)

    def _step(self, sampler: Sampler, logits: np.ndarray, *, first: bool) -> Step:
        token = sampler.sample(logits)
        wanted = self._extras.logprobs
        if wanted is None:
            return Step(token, first)
        return Step(token, first, token_logprobs(logits, token, top=wanted))

    def _read(self, part: Sequence[int]) -> None:
        loaded, reader = self._loaded, self._engine.reader
        if loaded.experts:
            loaded.experts.stage = "read"
        try:
            reader.read(
                part,
                self._books.reused,
                ledger=self._ledger,
                check=self._check_layer,
                done=self._chunk_done,
            )
        finally:
            self._books.loan = reader.last_loan
            stats = self._books.so_far()
            self._ledger.add("read.expert_wait", bytes=stats.read.bytes_read)
            if loaded.experts:
                loaded.experts.stage = "decode"

    def _chunk_done(self, tokens: Sequence[int]) -> None:
        self._loaded.state.advance(tokens)
        self._books.read += len(tokens)
        self._layers_begun = 0

    def _close_ledger(self, status: Status) -> None:
        self._books.ledger = record = self._ledger.close(status)
        self._books.tally = DecodeTally(start_ns=record.end_ns)
        if self._extras.on_ledger is not None:
            self._extras.on_ledger(record)
        self._start_refill()

    def _start_refill(self) -> None:
        experts = self._loaded.experts
        if experts and experts.refill_mode == "deferred" and self._books.loan is not None:
            experts.refill()
            self._books.refill = experts.refill_books

    def _decode(
        self,
        token: int,
        position: int,
        sampler: Sampler,
        max_tokens: int,
        stop: frozenset[int],
    ) -> Generator[Step]:
        books, tally, enough = self._books, self._books.tally, self._extras.enough
        last = min(position + max_tokens - 1, self._loaded.settings.context - 1)
        while position < last and tally is not None and not enough.is_set():
            self._check()
            begin, waited = CLOCK(), self._waited()
            step = self._step(sampler, self._engine.window(token, position), first=False)
            end = CLOCK()
            wait_ns = self._waited() - waited
            tally.window(begin, end, tokens=1, expert_wait_ns=wait_ns)
            self._engine.tracing.window(books.name, begin, end, wait_ns)
            position, token = position + 1, step.token
            if token in stop:
                return
            books.generated += 1
            yield step

    def _waited(self) -> int:
        experts = self._loaded.experts
        return experts.decode_wait_ns if experts else 0

    def _check(self) -> None:
        if self._cancel.is_set():
            raise Cancelled

    def _check_layer(self) -> None:
        """Called by the prompt read before each layer of a chunk."""
        self._check()
        if self._extras.on_progress is not None:
            books, hyper = self._books, self._loaded.blueprint.architecture.hyper
            planned = max(1, books.prompt - books.reused - 1)
            chunk = min(self._loaded.settings.chunk, planned - books.read)
            part = chunk * self._layers_begun / hyper.n_layers
            share = min(1.0, (books.read + part) / planned)
            self._extras.on_progress(ReadProgress(books.prompt, books.reused, books.read, share))
        self._layers_begun += 1

    def finish(self, status: Status, *, error: str | None = None) -> None:
        """Closes what is open and files the record."""
        if self._engine.running is self:
            self._engine.running = None
            if self._loaded.experts:
                self._loaded.experts.watch(None)
        if self._books.ledger is None:
            self._books.ledger = self._ledger.close(status)
            self._start_refill()  # what was lent comes back also when no token came out
        books, tracing = self._books, self._engine.tracing
        record = books.record(status, tracing.lanes, edges=self._extras.edges())
        self._engine.last_record = record
        tracing.end(
            record, books.loan, self._loaded.experts, error or self._error, refill=books.refill
        )
        self._engine.on_record(record)
