"""Keeps the books of one request and writes them up as a `RequestRecord`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from slotwise.engine.forecast import Forecaster, Read, expected_bytes
from slotwise.engine.loading import Loaded
from slotwise.experts.lending import Loan as PoolLoan
from slotwise.experts.refill import RefillBooks
from slotwise.experts.stats import AheadStats, StageStats, Stats
from slotwise.trace.lanes import LaneLog
from slotwise.trace.ledger import Ledger, LedgerRecord, Status
from slotwise.trace.record import (
    Conversation,
    DecodeTally,
    Edges,
    ExpertCounts,
    Forecast,
    Loan,
    LookAhead,
    Refill,
    RequestRecord,
    Settings,
    Tokens,
)


class RequestBooks:
    """Collects what happens to one request."""

    def __init__(self, name: str, loaded: Loaded, forecaster: Forecaster) -> None:
        self.name = name
        self.prompt = self.reused = self.read = self.generated = 0
        self.conversation: Conversation | None = None
        self.loan: PoolLoan | None = None
        self.refill: RefillBooks | None = None
        """Of this request's loan; written on after the request has ended."""
        self.ledger: LedgerRecord | None = None
        self.tally: DecodeTally | None = None
        self._loaded, self._forecaster = loaded, forecaster
        self._planned: Read | None = None
        self._missing_bytes, self._forecast = 0.0, Forecast()
        self.begin()

    def begin(self) -> None:
        """The request's turn has come: what happened before is not its doing."""
        self._before = self._stats()

    def _stats(self) -> Stats:
        experts = self._loaded.experts
        return experts.snapshot() if experts else Stats()

    def so_far(self) -> Stats:
        """Expert counters of this request."""
        return self._stats() - self._before

    def foretell(self, ledger: Ledger) -> None:
        """Before the read: how long until the first token, by what earlier requests took."""
        settings, experts = self._loaded.settings, self._loaded.experts
        n = max(0, self.prompt - self.reused - 1)
        planned = Read(tokens=n, chunk=min(settings.chunk, settings.context))
        if experts is not None:
            layout, pool = experts.layout, experts.pool
            self._missing_bytes = expected_bytes(
                planned.chunks,
                experts.policy.heat,
                pool.table >= 0,
                np.array([c.slot_bytes for c in layout.classes])[list(layout.class_of)],
                layout.n_used,
            )
        self._planned = planned
        so_far = sum(ledger.so_far().values())
        self._forecast = self._forecaster.forecast(
            planned, so_far_ns=so_far, missing_bytes=self._missing_bytes
        )

    def _checked_forecast(self, ledger: LedgerRecord, stats: Stats) -> Forecast:
        """The forecast beside what happened, which later ones learn from."""
        if ledger.status != "done" or self._planned is None:
            return self._forecast
        self._forecaster.learn(
            self._planned,
            ledger,
            missing_bytes=self._missing_bytes,
            bytes_read=stats.read.bytes_read,
        )
        foretold = self._forecast.time_to_first_token_ns
        if foretold is None:
            return self._forecast
        return replace(self._forecast, error_ns=ledger.wall_ns - foretold)

    def record(
        self, status: Status, lanes: LaneLog, *, edges: Edges | None = None
    ) -> RequestRecord:
        """The request as it stands; the ledger must be closed."""
        if self.ledger is None:
            raise RuntimeError(f"the ledger of request {self.name} is still open")
        stats = self.so_far()
        window = lanes.window(self.ledger.start_ns, self.ledger.end_ns)
        return RequestRecord(
            request=self.name,
            status=status,
            ledger=self.ledger,
            edges=edges or Edges(),
            tokens=Tokens(
                prompt=self.prompt, reused=self.reused, read=self.read, generated=self.generated
            ),
            conversation=self.conversation,
            loan=self._loan(stats),
            refill=self._refill(),
            forecast=self._checked_forecast(self.ledger, stats),
            decode=self.tally.record() if self.tally else None,
            prefill_experts=_counts(stats.read),
            refill_experts=ExpertCounts(bytes=self.refill.bytes if self.refill else 0),
            decode_experts=_counts(stats.decode),
            lookahead=_look_ahead(stats.ahead),
            read_ahead=_look_ahead(stats.read_ahead),
            lanes=window.lanes,
            lanes_complete=window.complete,
            settings=settings_record(self._loaded),
        )

    def _loan(self, stats: Stats) -> Loan | None:
        if self.loan is None:
            return None
        nbytes = sum(length for _, length in self.loan.extents)
        return Loan(
            slots=self.loan.slots,
            bytes=nbytes,
            read_misses=stats.read.loan_misses,
            decode_misses=stats.decode.loan_misses,
            forgotten=self.loan.price.experts_forgotten,
        )

    def _refill(self) -> Refill | None:
        experts = self._loaded.experts
        if experts is None or self.loan is None:
            return None
        if (books := self.refill) is None:
            none = dict.fromkeys(("slots", "bytes", "lane_ns", "waited_ns", "saved_misses"), 0)
            return Refill(policy=experts.refill_mode, **none)
        return Refill(
            policy=experts.refill_mode,
            slots=books.done,
            bytes=books.bytes,
            lane_ns=books.ns,
            waited_ns=books.waited_ns,
            saved_misses=books.saved_misses,
            end=books.end,
        )


def _look_ahead(stats: AheadStats) -> LookAhead | None:
    return LookAhead(**vars(stats)) if stats.windows else None


def _counts(stage: StageStats) -> ExpertCounts:
    return ExpertCounts(
        hits=stage.hits,
        misses=stage.misses,
        bytes=stage.bytes_read,
        mirror_hits=stage.mirror_hits,
        wait_ns=stage.wait_ns,
    )


def settings_record(loaded: Loaded) -> Settings:
    """The settings with automatic values resolved; file names without folders."""
    s, plan = loaded.settings, loaded.plan
    return Settings(
        memory_bytes=plan.budget.nbytes,
        threads=loaded.backend.threads,
        context_tokens=s.context,
        chunk_tokens=s.chunk,
        expert_slots=sum(plan.slots) if plan.slots else None,
        io_lanes=s.io_lanes if loaded.experts else None,
        kv_type=s.kv_type,
        refill=s.refill if loaded.experts else None,
        policy=s.policy if loaded.experts else None,
        lookahead=s.lookahead if loaded.experts else "none",
        profile=s.profile.name if s.profile else None,
        pack=s.pack.name if s.pack else None,
        mirror_bytes=loaded.mirror_bytes,
    )
