"""Keeps the books of one request and writes them up as a `RequestRecord`."""

from __future__ import annotations

from slotwise.engine.loading import Loaded
from slotwise.experts.lending import Loan as PoolLoan
from slotwise.experts.stats import StageStats, Stats
from slotwise.trace.lanes import LaneLog
from slotwise.trace.ledger import LedgerRecord, Status
from slotwise.trace.record import (
    DecodeTally,
    Edges,
    ExpertCounts,
    Loan,
    Refill,
    RequestRecord,
    Settings,
    Tokens,
)


class RequestBooks:
    """Collects what happens to one request."""

    def __init__(self, name: str, loaded: Loaded, *, prompt: int, reused: int) -> None:
        self.name = name
        self.prompt, self.reused, self.read, self.generated = prompt, reused, 0, 0
        self.loan: PoolLoan | None = None
        self.ledger: LedgerRecord | None = None
        self.tally: DecodeTally | None = None
        self._loaded = loaded
        self._before = self._stats()

    def _stats(self) -> Stats:
        experts = self._loaded.experts
        return experts.snapshot() if experts else Stats()

    def so_far(self) -> Stats:
        """Expert counters of this request."""
        return self._stats() - self._before

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
            loan=self._loan(stats),
            refill=self._refill(stats),
            decode=self.tally.record() if self.tally else None,
            prefill_experts=_counts(stats.read),
            refill_experts=ExpertCounts(bytes=stats.refill_bytes),
            decode_experts=_counts(stats.decode),
            lanes=window.lanes,
            lanes_complete=window.complete,
            settings=settings_record(self._loaded),
        )

    def _loan(self, stats: Stats) -> Loan | None:
        if self.loan is None:
            return None
        nbytes = sum(length for _, length in self.loan.extents)
        return Loan(slots=self.loan.slots, bytes=nbytes, read_misses=stats.loan_misses)

    def _refill(self, stats: Stats) -> Refill | None:
        experts = self._loaded.experts
        if experts is None or self.loan is None:
            return None
        return Refill(
            policy=experts.refill_mode,
            slots=stats.refill_slots,
            bytes=stats.refill_bytes,
            lane_ns=stats.refill_ns,
            waited_ns=stats.refill_waited_ns,
            saved_misses=stats.refill_hits,
        )


def _counts(stage: StageStats) -> ExpertCounts:
    return ExpertCounts(
        hits=stage.hits, misses=stage.misses, bytes=stage.bytes_read, wait_ns=stage.wait_ns
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
        profile=s.profile.name if s.profile else None,
        pack=s.pack.name if s.pack else None,
    )
