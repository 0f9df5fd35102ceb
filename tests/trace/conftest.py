"""A clock that is told what time it is, and records made with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slotwise.trace import (
    DecodeTally,
    Edges,
    ExpertCounts,
    Header,
    LaneLog,
    LaneTotal,
    Ledger,
    LedgerRecord,
    Loan,
    ModelShape,
    Refill,
    RequestRecord,
    Settings,
    Tokens,
    TraceSink,
)
from slotwise.trace.ledger import SpanHook

MS = 1_000_000


class FakeClock:
    """Returns `now` until `tick` moves it."""

    def __init__(self, now: int = 1_000 * MS) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now

    def tick(self, ns: int) -> int:
        self.now += ns
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def closed_ledger(
    clock: FakeClock, *, refill_ms: int = 0, on_span: SpanHook | None = None
) -> LedgerRecord:
    """queue 2, tokenize 1, 2 x (attention 5, router 1 with a wait of 3 in it), other 1, emit 4."""
    ledger = Ledger(clock=clock, start_ns=clock.now - 2 * MS, on_span=on_span)
    with ledger.phase("tokenize"):
        clock.tick(1 * MS)
    for _ in range(2):
        with ledger.phase("read.attention"):
            clock.tick(5 * MS)
        with ledger.phase("read.router"):
            clock.tick(1 * MS)
            with ledger.phase("read.expert_wait"):
                clock.tick(3 * MS)
                ledger.add("read.expert_wait", bytes=2**20, slots=2)
    if refill_ms:
        with ledger.phase("refill"):
            clock.tick(refill_ms * MS)
    clock.tick(1 * MS)
    with ledger.phase("emit"):
        clock.tick(4 * MS)
    return ledger.close("done")


@pytest.fixture
def make_ledger() -> Callable[..., LedgerRecord]:
    return closed_ledger


def request_record(
    clock: FakeClock,
    *,
    request: str = "1",
    policy: str = "deferred",
    refill_ms: int = 0,
    tokens: int = 70,
    lanes_capacity: int = 100,
    on_span: SpanHook | None = None,
) -> RequestRecord:
    """A whole record: the ledger above, a loan of 9 slots, windows of 10 ms and one token each."""
    lanes = LaneLog(capacity=lanes_capacity)
    start = clock.now
    ledger = closed_ledger(clock, refill_ms=refill_ms, on_span=on_span)
    lanes.record("io.0", "read", start, start + 2 * MS, bytes=2**20, slots=1)
    lanes.record("io.0", "read", start + 3 * MS, start + 4 * MS, bytes=2**20, slots=1)
    tally = DecodeTally(start_ns=clock.now)
    for _ in range(tokens - 1):
        window = clock.now
        tally.window(window, clock.tick(10 * MS), tokens=1, expert_wait_ns=1 * MS)
    overlapped = lanes.window(ledger.start_ns, ledger.end_ns)
    return RequestRecord(
        request=request,
        status="done",
        ledger=ledger,
        edges=Edges(first_token_ns=ledger.wall_ns, first_content_ns=ledger.wall_ns),
        tokens=Tokens(prompt=40, reused=10, read=29, generated=tokens),
        loan=Loan(slots=9, bytes=9 * 4096, read_misses=3),
        refill=Refill(
            policy=policy,
            slots=9,
            bytes=9 * 4096,
            lane_ns=80 * MS,
            waited_ns=refill_ms * MS,
        ),
        decode=tally.record(),
        prefill_experts=ExpertCounts(hits=5, misses=4, bytes=4 * 4096, wait_ns=6 * MS),
        decode_experts=ExpertCounts(hits=50, misses=2, bytes=2 * 4096, wait_ns=69 * MS),
        lanes=overlapped.lanes,
        lanes_complete=overlapped.complete,
        settings=Settings(threads=1, refill=policy, profile="hot.profile"),
    )


@pytest.fixture
def make_record() -> Callable[..., RequestRecord]:
    return request_record


def smallest_record() -> RequestRecord:
    """A request that failed at once: nearly everything about it is unknown."""
    return RequestRecord(
        request="2",
        status="failed",
        ledger=Ledger(clock=FakeClock()).close("failed"),
        tokens=Tokens(prompt=5, reused=0, read=0, generated=0),
        lanes={"io.0": LaneTotal(busy_ns=1, calls=1, bytes=0, slots=0)},
        lanes_complete=False,
    )


@pytest.fixture
def failed_record() -> RequestRecord:
    return smallest_record()


@pytest.fixture
def header() -> Header:
    return Header(
        engine_version="0.1.0",
        clock_ns=900 * MS,
        unix_ns=1_700_000_000_000_000_000,
        model=ModelShape(
            file="demo.gguf",
            arch="llama",
            layers=30,
            moe_layers=30,
            experts=16,
            experts_used=8,
            pool_slots=(96,),
            slot_bytes=(4096,),
        ),
        settings=Settings(threads=1),
    )


@pytest.fixture
def sink(tmp_path: Path, header: Header) -> TraceSink:
    return TraceSink(tmp_path / "trace.jsonl", header)
