"""One model, opened; one request at a time, end to end.

    lookup -> lend -> read in chunks -> give back -> first window -> sample -> emit   (ledger)
    then decode windows, while the refill lane fills the empty slots                  (tally)

Knows tokens, not text: templates and the tokenizer are used by the callers, inside the same
ledger.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from slotwise.engine.loading import Loaded, Progress, load
from slotwise.engine.prompt import Cancelled, PromptReader
from slotwise.engine.records import RequestBooks
from slotwise.engine.sampling import Sampler, Sampling
from slotwise.engine.settings import EngineSettings
from slotwise.engine.tracing import Tracing
from slotwise.errors import UsageError
from slotwise.trace.ledger import CLOCK, Ledger, Status
from slotwise.trace.record import DecodeTally, RequestRecord
from slotwise.weights.shards import ModelFile, open_model


@dataclass(frozen=True)
class Step:
    """One token of an answer."""

    token: int
    first: bool


class Engine:
    """An open model. Use as a context manager, from one thread at a time."""

    def __init__(self, loaded: Loaded, tracing: Tracing) -> None:
        self.loaded, self.tracing = loaded, tracing
        self.last_record: RequestRecord | None = None
        """Of the latest request, once its generator has ended."""
        self._requests = 0
        self._running: _Request | None = None
        self._reader = PromptReader(
            loaded.network,
            backend=loaded.backend,
            experts=loaded.experts,
            arena=loaded.arena,
            chunk=min(loaded.settings.chunk, loaded.settings.context),
        )

    @classmethod
    def open(
        cls,
        path: Path,
        settings: EngineSettings | None = None,
        *,
        trace: Path | None = None,
        overwrite: bool = False,
        progress: Progress | None = None,
    ) -> Self:
        """Opens the model that `path` belongs to. Raises Refused, StoreError, and UsageError for a
        trace that is there already (unless `overwrite`)."""
        model = open_model(path)
        tracing = Tracing()
        loaded = load(
            model, settings or EngineSettings(), on_event=tracing.on_event, progress=progress
        )
        try:
            tracing.start(trace, loaded, overwrite=overwrite)
        except BaseException:
            loaded.close()
            raise
        return cls(loaded, tracing)

    @property
    def model(self) -> ModelFile:
        return self.loaded.blueprint.model

    def close(self) -> None:
        self.loaded.close()
        self.tracing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- a request ---------------------------------------------------------------------

    def new_ledger(self, *, start_ns: int | None = None) -> tuple[str, Ledger]:
        """Name and running ledger of the next request, for what comes before its tokens."""
        self._requests += 1
        name = f"r{self._requests}"
        return name, Ledger(start_ns=start_ns, on_span=self.tracing.request(name, start_ns))

    def generate(
        self,
        prompt: Sequence[int],
        *,
        sampling: Sampling | None = None,
        max_tokens: int,
        stop: frozenset[int] = frozenset(),
        cancel: threading.Event | None = None,
        opened: tuple[str, Ledger] | None = None,
    ) -> Iterator[Step]:
        """Tokens that follow `prompt` (the whole conversation, as token ids).

        What the state already holds of it is reused. A stop token ends the answer and is not
        given. While the first step is with the caller its time counts as the phase `emit`: write
        it out before asking for the next.

        Raises Cancelled soon after `cancel` is set; UsageError for a prompt that is empty or too
        long, and while another request's steps are neither read to their end nor closed;
        StoreError when an expert cannot be read. The engine then serves the next request as if
        this one had not been.
        """
        name, ledger = opened or self.new_ledger()
        request = _Request(self, name, ledger, cancel or threading.Event())
        try:
            self._check_prompt(prompt, max_tokens)
        except UsageError:
            request.finish("failed")
            raise
        return request.run(prompt, Sampler(sampling or Sampling()), max_tokens, stop)

    def _check_prompt(self, prompt: Sequence[int], max_tokens: int) -> None:
        context = self.loaded.settings.context
        n_vocab = self.loaded.blueprint.architecture.hyper.n_vocab
        if max_tokens < 1:
            raise UsageError(f"max_tokens is {max_tokens}, expected at least 1")
        if not prompt:
            raise UsageError("the prompt is empty", next_step="Give at least one token.")
        if len(prompt) >= context:
            raise UsageError(
                f"the prompt has {len(prompt):,} tokens, the context holds {context:,} "
                "and at least one must be left for the answer",
                next_step="Give a larger --context or a shorter prompt.",
            )
        worst = max(prompt, key=lambda token: max(token, n_vocab - 1 - token))
        if not 0 <= worst < n_vocab:
            raise UsageError(f"token id {worst}, expected 0 to {n_vocab - 1}")

    # -- for tests and tools -----------------------------------------------------------

    def forget(self) -> None:
        """Drops the conversation: the next prompt reuses nothing."""
        self.loaded.state.clear()

    def read_only(self, tokens: Sequence[int]) -> None:
        """Reads `tokens` into an empty state, for what the experts do meanwhile."""
        self._check_prompt(tokens, 1)
        self.forget()
        self._reader.read(tokens, 0, ledger=Ledger(), check=_never, done=self.loaded.state.advance)

    def logits(
        self, tokens: Sequence[int], *, chunk: int | None = None, one_by_one: bool = False
    ) -> np.ndarray:
        """Logits f32 [len(tokens), n_vocab] after each token, from an empty state.

        In chunks as the prompt read does it, or token by token as decode does it.
        """
        self._check_prompt(tokens, 1)
        loaded = self.loaded
        self.forget()
        if one_by_one:
            rows = []
            for position, token in enumerate(tokens):
                rows.append(self._window(token, position).copy())
            return np.stack(rows)
        reader = PromptReader(
            loaded.network,
            backend=loaded.backend,
            experts=loaded.experts,
            arena=loaded.arena,
            chunk=chunk or loaded.settings.chunk,
        )
        rows = []
        reader.read(
            tokens, 0, ledger=Ledger(), check=_never, done=loaded.state.advance, logits=rows
        )
        return np.concatenate(rows)

    def _window(self, token: int, position: int) -> np.ndarray:
        loaded = self.loaded
        logits = loaded.windows.run(
            [token], position, backend=loaded.backend, experts=loaded.experts
        )
        loaded.state.advance([token])
        return logits


class _Request:
    """One run of `Engine.generate`."""

    def __init__(self, engine: Engine, name: str, ledger: Ledger, cancel: threading.Event) -> None:
        self._engine, self._loaded = engine, engine.loaded
        self._ledger, self._cancel = ledger, cancel
        self._books = RequestBooks(name, engine.loaded, prompt=0, reused=0)
        self._error: str | None = None

    def run(
        self, prompt: Sequence[int], sampler: Sampler, max_tokens: int, stop: frozenset[int]
    ) -> Iterator[Step]:
        status: Status = "failed"
        try:
            self._begin()
            token = self._first_token(prompt, sampler)
            if token not in stop:
                with self._ledger.phase("emit"):
                    self._books.generated = 1
                    yield Step(token, first=True)
            self._close_ledger("done")
            if token not in stop:
                yield from self._decode(token, len(prompt), sampler, max_tokens, stop)
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
        if self._engine._running is not None:
            raise UsageError(
                f"request {self._engine._running._books.name} has not ended",
                next_step="Read its steps to the end or close them first.",
            )
        self._engine._running = self

    def _first_token(self, prompt: Sequence[int], sampler: Sampler) -> int:
        loaded, ledger, books = self._loaded, self._ledger, self._books
        with ledger.phase("lookup"):
            books.prompt = len(prompt)
            books.reused = loaded.state.reuse(prompt)
        part = prompt[books.reused : -1]
        if part:
            self._read(part)
        if loaded.experts and loaded.experts.refill_mode == "blocking":
            with ledger.phase("refill"):
                loaded.experts.refill()
        with ledger.phase("first_window"):
            self._check()
            logits = self._engine._window(prompt[-1], len(prompt) - 1)
        with ledger.phase("sample"):
            return sampler.sample(logits)

    def _read(self, part: Sequence[int]) -> None:
        loaded, reader = self._loaded, self._engine._reader
        if loaded.experts:
            loaded.experts.stage = "read"
        try:
            reader.read(
                part,
                self._books.reused,
                ledger=self._ledger,
                check=self._check,
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

    def _close_ledger(self, status: Status) -> None:
        self._books.ledger = record = self._ledger.close(status)
        self._books.tally = DecodeTally(start_ns=record.end_ns)
        self._start_refill()

    def _start_refill(self) -> None:
        experts = self._loaded.experts
        if experts and experts.refill_mode == "deferred" and self._books.loan is not None:
            experts.refill()

    def _decode(
        self,
        token: int,
        position: int,
        sampler: Sampler,
        max_tokens: int,
        stop: frozenset[int],
    ) -> Iterator[Step]:
        books, tally = self._books, self._books.tally
        last = min(position + max_tokens - 1, self._loaded.settings.context - 1)
        while position < last and tally is not None:
            if self._cancel.is_set():
                raise Cancelled
            begin, waited = CLOCK(), self._waited()
            token = sampler.sample(self._engine._window(token, position))
            end = CLOCK()
            wait_ns = self._waited() - waited
            tally.window(begin, end, tokens=1, expert_wait_ns=wait_ns)
            self._engine.tracing.window(books.name, begin, end, wait_ns)
            position += 1
            if token in stop:
                return
            books.generated += 1
            yield Step(token, first=False)

    def _waited(self) -> int:
        experts = self._loaded.experts
        return experts.decode_wait_ns if experts else 0

    def _check(self) -> None:
        if self._cancel.is_set():
            raise Cancelled

    def finish(self, status: Status) -> None:
        """Closes what is open and files the record."""
        if self._engine._running is self:
            self._engine._running = None
        if self._books.ledger is None:
            self._books.ledger = self._ledger.close(status)
            self._start_refill()  # what was lent comes back also when no token came out
        self._engine.last_record = record = self._books.record(status, self._engine.tracing.lanes)
        self._engine.tracing.end(record, self._books.loan, self._loaded.experts, self._error)


def _never() -> None:
    """The check of a read that cannot be cancelled."""
