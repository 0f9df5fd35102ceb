"""One model, opened; one request at a time, end to end.

    lookup -> lend -> read in chunks -> give back -> first window -> sample -> emit   (ledger)
    then decode windows, while the refill lane fills the empty slots                  (tally)

Knows tokens, not text: templates and the tokenizer are used by the callers, inside the same
ledger.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Self

import numpy as np

from slotwise.engine.conversations import Conversations
from slotwise.engine.forecast import Forecaster
from slotwise.engine.loading import Loaded, Progress, load
from slotwise.engine.prompt import PromptReader
from slotwise.engine.request import Extras, Request, Step
from slotwise.engine.sampling import Sampler, Sampling
from slotwise.engine.settings import EngineSettings
from slotwise.engine.tracing import Tracing, pool_fill
from slotwise.errors import PromptTooLong, UsageError
from slotwise.trace.ledger import CLOCK, Ledger, LedgerRecord
from slotwise.trace.record import RequestRecord
from slotwise.weights.shards import ModelFile, open_model


class Engine:
    """An open model. Use as a context manager, from one thread at a time."""

    def __init__(self, loaded: Loaded, tracing: Tracing) -> None:
        self.loaded, self.tracing = loaded, tracing
        self.last_record: RequestRecord | None = None
        """Of the latest request, once its generator has ended."""
        self.on_record: Callable[[RequestRecord], None] = _nobody
        """Called with every request's record, by the thread that ends it."""
        self._requests = 0
        self.forecaster = Forecaster()
        self.running: Request | None = None
        self.conversations = Conversations(loaded.state, loaded.settings.park)
        self.reader = PromptReader(
            loaded.network,
            backend=loaded.backend,
            experts=loaded.experts,
            arena=loaded.arena,
            chunk=min(loaded.settings.chunk, loaded.settings.context),
            gemm=loaded.settings.gemm,
            crew=loaded.crew,
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
        self.conversations.close()
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
        extras: Extras | None = None,
    ) -> Generator[Step]:
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
        request = Request(self, name, ledger=ledger, cancel=cancel, extras=extras)
        try:
            self.check_prompt(prompt, max_tokens)
        except UsageError:
            request.finish("failed")
            raise
        return request.run(prompt, Sampler(sampling or Sampling()), max_tokens, stop)

    def withdraw(self, name: str, closed: LedgerRecord, *, error: str | None = None) -> None:
        """Files the record of a request that ended before its tokens came here."""
        Request(self, name, closed=closed).finish(closed.status, error=error)

    def check_prompt(self, prompt: Sequence[int], max_tokens: int) -> None:
        """UsageError for what `generate` would refuse."""
        context = self.loaded.settings.context
        n_vocab = self.loaded.blueprint.architecture.hyper.n_vocab
        if max_tokens < 1:
            raise UsageError(f"max_tokens is {max_tokens}, expected at least 1")
        if not prompt:
            raise UsageError("the prompt is empty", next_step="Give at least one token.")
        if len(prompt) >= context:
            raise PromptTooLong(f"{len(prompt):,}", context)
        worst = max(prompt, key=lambda token: max(token, n_vocab - 1 - token))
        if not 0 <= worst < n_vocab:
            raise UsageError(f"token id {worst}, expected 0 to {n_vocab - 1}")

    def expert_slots(self) -> dict[str, int]:
        """How many expert slots are resident, loading, lent and free; empty without experts."""
        if self.loaded.experts is None:
            return {}
        fill = pool_fill(CLOCK(), self.loaded.experts)
        return {name: getattr(fill, name) for name in ("resident", "loading", "lent", "free")}

    # -- for tests and tools -----------------------------------------------------------

    def forget(self) -> None:
        """Drops the conversation: the next prompt reuses nothing."""
        self.loaded.state.clear()

    def read_only(self, tokens: Sequence[int]) -> None:
        """Reads `tokens` into an empty state, for what the experts do meanwhile."""
        self.check_prompt(tokens, 1)
        self.forget()
        self.reader.read(tokens, 0, ledger=Ledger(), check=_never, done=self.loaded.state.advance)

    def logits(
        self, tokens: Sequence[int], *, chunk: int | None = None, one_by_one: bool = False
    ) -> np.ndarray:
        """Logits f32 [len(tokens), n_vocab] after each token, from an empty state.

        In chunks as the prompt read does it, or token by token as decode does it.
        """
        self.check_prompt(tokens, 1)
        loaded = self.loaded
        self.forget()
        if one_by_one:
            rows = []
            for position, token in enumerate(tokens):
                rows.append(self.window(token, position).copy())
            return np.stack(rows)
        reader = PromptReader(
            loaded.network,
            backend=loaded.backend,
            experts=loaded.experts,
            arena=loaded.arena,
            chunk=chunk or loaded.settings.chunk,
            gemm=loaded.settings.gemm,
            crew=loaded.crew,
        )
        rows = []
        reader.read(
            tokens, 0, ledger=Ledger(), check=_never, done=loaded.state.advance, logits=rows
        )
        return np.concatenate(rows)

    def window(self, token: int, position: int) -> np.ndarray:
        """Logits f32 [n_vocab] after `token`, which becomes part of the state."""
        loaded = self.loaded
        logits = loaded.windows.run(
            [token], position, backend=loaded.backend, experts=loaded.experts
        )
        loaded.state.advance([token])
        return logits


def _never() -> None:
    """The check of a read that cannot be cancelled."""


def _nobody(_record: RequestRecord) -> None:
    """Nobody asked for the records."""
