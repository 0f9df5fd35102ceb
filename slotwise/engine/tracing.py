"""Connects the engine to the trace: lanes always, a JSONL file when the user asks for one."""

from __future__ import annotations

from pathlib import Path

from slotwise import __version__
from slotwise.engine.loading import Loaded
from slotwise.engine.records import settings_record
from slotwise.experts.lending import Loan
from slotwise.experts.loader import Experts
from slotwise.experts.refill import RefillBooks
from slotwise.trace import (
    Header,
    LaneLog,
    LoanMade,
    ModelShape,
    Note,
    PoolFill,
    RefillDone,
    RefillTotal,
    RequestEnd,
    RequestRecord,
    RequestStart,
    TraceSink,
    WindowDone,
)
from slotwise.trace.ledger import CLOCK, SpanHook


class Tracing:
    """Owns the lane log and the sink. Loader threads only ever touch the lane log."""

    def __init__(self) -> None:
        self.lanes = LaneLog()
        self.sink: TraceSink | None = None
        self._refill: tuple[str, RefillBooks] | None = None
        """The latest request with a refill, and the refill's books."""

    def on_event(self, name: str, **fields: object) -> None:
        """Called by the I/O lanes for every read."""
        if name != "expert_read":
            return
        self.lanes.record(
            f"io.{fields['lane']}",
            f"{fields['purpose']} failed" if fields["error"] else str(fields["purpose"]),
            int(str(fields["start_ns"])),
            int(str(fields["end_ns"])),
            bytes=int(str(fields["bytes"])),
            slots=1,
        )

    def start(self, path: Path | None, loaded: Loaded, *, overwrite: bool) -> None:
        """Opens the trace file. Raises UsageError where it must not be written."""
        if path is None:
            return
        layout, model = loaded.blueprint.layout, loaded.blueprint.model
        shape = ModelShape(
            file=model.path.name,
            arch=model.arch,
            digest=model.digest,
            layers=loaded.blueprint.architecture.hyper.n_layers,
            moe_layers=layout.n_moe_layers if layout else 0,
            experts=layout.n_experts if layout else 0,
            experts_used=layout.n_used if layout else 0,
            pool_slots=loaded.plan.slots,
            slot_bytes=tuple(c.slot_bytes for c in layout.classes) if layout else (),
        )
        header = Header(engine_version=__version__, model=shape, settings=settings_record(loaded))
        self.sink = TraceSink(path, header, overwrite=overwrite)
        if loaded.store is not None and loaded.store.note:
            self.sink.emit(Note(at_ns=CLOCK(), code="store", text=loaded.store.note))

    def request(self, name: str, start_ns: int | None) -> SpanHook | None:
        """Announces a request; returns the hook that receives its phases."""
        if self.sink is None:
            return None
        self.sink.emit(RequestStart(request=name, start_ns=start_ns or CLOCK()))
        return self.sink.span_hook(name)

    def window(self, name: str, start_ns: int, end_ns: int, wait_ns: int) -> None:
        if self.sink is not None:
            self.sink.emit(WindowDone(name, start_ns, end_ns, 1, wait_ns))

    @property
    def stopped(self) -> str:
        """Why the trace file is incomplete; empty while it is not."""
        return self.sink.stopped if self.sink is not None else ""

    def end(
        self,
        record: RequestRecord,
        loan: Loan | None,
        experts: Experts | None,
        error: str | None,
        *,
        refill: RefillBooks | None = None,
    ) -> None:
        """Writes the end of a request and everything before it to disk."""
        if self.sink is None:
            return
        at = CLOCK()
        if self._refill is not None and self._refill[1].superseded:
            self._end_refill(at)
        if refill is not None:
            self._refill = record.request, refill
        if loan is not None and record.loan is not None:
            self.sink.emit(
                LoanMade(
                    request=record.request,
                    at_ns=record.ledger.start_ns,
                    slots=record.loan.slots,
                    bytes=record.loan.bytes,
                    extents=len(loan.extents),
                )
            )
        if record.refill is not None:
            self.sink.emit(
                RefillDone(
                    request=record.request,
                    policy=record.refill.policy,
                    start_ns=record.ledger.end_ns,
                    end_ns=at,
                    slots=record.refill.slots,
                    bytes=record.refill.bytes,
                    waited_ns=record.refill.waited_ns,
                )
            )
        if experts is not None:
            self.sink.emit(pool_fill(at, experts))
        self.sink.take_lanes(self.lanes)
        self.sink.emit(
            RequestEnd(
                request=record.request,
                at_ns=at,
                status=record.status,
                record=record,
                error=error,
            )
        )

    def _end_refill(self, at_ns: int) -> None:
        """Writes what became of a request's refill after that request had ended."""
        if self.sink is None or self._refill is None:
            return
        (request, books), self._refill = self._refill, None
        self.sink.emit(
            RefillTotal(
                request=request,
                at_ns=books.end_ns or at_ns,
                end=books.end,
                slots=books.done,
                failed=books.failed,
                bytes=books.bytes,
                lane_ns=books.ns,
                waited_ns=books.waited_ns,
                saved_misses=books.saved_misses,
            )
        )

    def close(self) -> None:
        if self.sink is not None:
            self._end_refill(CLOCK())
            self.sink.close()
            self.sink = None


def pool_fill(at_ns: int, experts: Experts) -> PoolFill:
    """Where the expert slots are at this moment."""
    counts = [experts.pool.counts(region.index) for region in experts.pool.regions]
    return PoolFill(
        at_ns=at_ns,
        resident=sum(c.resident for c in counts),
        loading=sum(c.loading for c in counts),
        lent=sum(c.lent for c in counts),
        free=sum(c.free for c in counts),
    )
