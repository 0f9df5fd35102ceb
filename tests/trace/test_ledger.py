"""The exclusive clock: exact numbers, exact sums, and what it refuses."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotwise.errors import SlotwiseError
from slotwise.trace import PHASES, Ledger, LedgerRecord, PhaseRecord

ENTERABLE = PHASES[:-1]


def test_inner_phase_pauses_outer_and_rest_is_other(clock: Any) -> None:
    ledger = Ledger(clock=clock)
    clock.tick(5)
    with ledger.phase("read.router"):
        clock.tick(10)
        with ledger.phase("read.expert_wait"):
            clock.tick(100)
        clock.tick(1000)
    clock.tick(7)
    record = ledger.close("done")
    assert record.phases == {
        "read.router": PhaseRecord(ns=1010, calls=1),
        "read.expert_wait": PhaseRecord(ns=100, calls=1),
        "other": PhaseRecord(ns=12, calls=1),
    }
    assert (record.wall_ns, record.counted_twice_ns) == (1122, 0)
    assert record.end_ns == clock.now


def test_same_phase_inside_itself_counts_once_in_time_and_twice_in_calls(clock: Any) -> None:
    ledger = Ledger(clock=clock)
    with ledger.phase("draft"):
        clock.tick(1)
        with ledger.phase("draft"):
            clock.tick(2)
        clock.tick(4)
    record = ledger.close("done")
    assert record.phases["draft"] == PhaseRecord(ns=7, calls=2)
    assert record.wall_ns == 7


def test_order_of_first_use_with_other_last(clock: Any) -> None:
    ledger = Ledger(clock=clock)
    for name in ("sample", "lend", "sample", "queue"):
        with ledger.phase(name):
            clock.tick(1)
    assert list(ledger.close("done").phases) == ["sample", "lend", "queue", "other"]


def test_time_before_the_ledger_was_made_is_queue(clock: Any) -> None:
    spans = []
    ledger = Ledger(clock=clock, start_ns=clock.now - 30, on_span=lambda *span: spans.append(span))
    start = clock.now - 30
    clock.tick(4)
    record = ledger.close("done")
    assert (record.start_ns, record.wall_ns) == (start, 34)
    assert (record.ns("queue"), record.ns("other"), record.ns("lend")) == (30, 4, 0)
    assert record.counted_twice_ns == 0
    assert spans == [("queue", start, start + 30, 1)]


def test_start_in_the_future_is_refused(clock: Any) -> None:
    with pytest.raises(ValueError, match="5 ns in the future"):
        Ledger(clock=clock, start_ns=clock.now + 5)


def test_unknown_phase_and_other_are_refused() -> None:
    ledger = Ledger()
    with pytest.raises(ValueError, match=r"'read\.magic'.*read\.embed"):
        ledger.phase("read.magic")
    for use in (ledger.phase, ledger.add):
        with pytest.raises(ValueError, match="cannot be entered or counted"):
            use("other")


def test_counts_add_up_and_uncounted_stays_none(clock: Any) -> None:
    ledger = Ledger(clock=clock)
    ledger.add("lend", slots=3)
    ledger.add("lend", slots=4, bytes=0)
    with ledger.phase("emit"):
        clock.tick(1)
    phases = ledger.close("done").phases
    assert phases["lend"] == PhaseRecord(ns=0, calls=0, bytes=0, slots=7)
    assert phases["emit"] == PhaseRecord(ns=1, calls=1, bytes=None, slots=None)


def test_exception_leaves_the_clock_right(clock: Any) -> None:
    ledger = Ledger(clock=clock)
    with contextlib.suppress(KeyError), ledger.phase("lend"):
        clock.tick(2)
        with ledger.phase("draft"):
            clock.tick(3)
            raise KeyError
    clock.tick(5)
    record = ledger.close("failed")
    assert [phase.ns for phase in record.phases.values()] == [2, 3, 5]
    assert record.status == "failed"


def test_close_ends_open_phases_and_their_exits_are_harmless(clock: Any) -> None:
    spans = []
    ledger = Ledger(clock=clock, on_span=lambda *span: spans.append(span))
    start = clock.now
    with ledger.phase("emit"):
        clock.tick(2)
        with ledger.phase("sample"):
            clock.tick(3)
            record = ledger.close("cancelled")
            clock.tick(100)
    assert record.wall_ns == 5
    assert (record.ns("emit"), record.ns("sample"), record.counted_twice_ns) == (2, 3, 0)
    assert spans == [("sample", start + 2, start + 5, 2), ("emit", start, start + 5, 1)]


def test_closed_ledger_refuses_everything(clock: Any) -> None:
    ledger = Ledger(clock=clock)
    held = ledger.phase("lend")
    ledger.close("done")
    with pytest.raises(RuntimeError, match="closed as 'done'"), held:
        pass
    with pytest.raises(RuntimeError, match="closed as 'done'"):
        ledger.add("lend", slots=1)
    with pytest.raises(RuntimeError, match="closed as 'done'"):
        ledger.close("done")


def test_it_moves_between_threads_but_not_used_by_two_at_once(clock: Any) -> None:
    ledger = Ledger(clock=clock)

    def in_thread(work: Any) -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    outer, inner = ledger.phase("lend"), ledger.phase("draft")
    in_thread(outer.__enter__)
    clock.tick(3)
    outer.__exit__(None, None, None)
    assert ledger.phase("lend").ns == 3

    outer.__enter__()
    in_thread(inner.__enter__)
    with pytest.raises(RuntimeError, match="'lend' was left while 'draft' was running"):
        outer.__exit__(None, None, None)


def test_exception_inside_an_inner_enter_unwinds_to_the_outer_phase(clock: Any) -> None:
    """Ctrl-C can strike between the two halves of an `__enter__`, which then has no exit."""
    ledger = Ledger(clock=clock)
    with contextlib.suppress(KeyboardInterrupt), ledger.phase("lend"):
        clock.tick(2)
        ledger.phase("draft").__enter__()
        clock.tick(3)
        raise KeyboardInterrupt
    clock.tick(4)
    record = ledger.close("cancelled")
    assert [phase.ns for phase in record.phases.values()] == [2, 3, 4]
    assert record.counted_twice_ns == 0


def test_counted_twice_shows_a_phase_that_was_charged_too_much(clock: Any) -> None:
    ledger = Ledger(clock=clock)
    with ledger.phase("lend"):
        clock.tick(10)
    ledger.phase("lend").ns += 6  # the defect
    assert ledger.close("done").counted_twice_ns == 6


def test_record_that_does_not_add_up_is_refused() -> None:
    good = Ledger(clock=iter([0, 10]).__next__).close("done").to_dict()
    assert LedgerRecord.from_dict(good).wall_ns == 10
    with pytest.raises(ValueError, match=r"add up to 10 ns, expected .* = 11 [+] 0"):
        LedgerRecord.from_dict({**good, "wall_ns": 11})
    with pytest.raises(ValueError, match="no `other`"):
        LedgerRecord.from_dict({**good, "phases": {}, "wall_ns": 0})


def test_record_survives_json_and_names_its_clock(make_ledger: Any, clock: Any) -> None:
    record = make_ledger(clock)
    data = record.to_dict()
    assert data["schema"] == "slotwise.ledger/v1"
    assert data["clock"] == "injected"
    assert data["phases"]["tokenize"] == {"ns": 1_000_000, "calls": 1, "bytes": None, "slots": None}
    assert data["how"]["phases.*.ns"] == "measured"
    assert data["missing"]["phases.*.bytes"]
    assert LedgerRecord.from_dict(data) == record
    assert "perf_counter" not in Ledger().close("done").clock
    assert Ledger().close("done").clock != "injected"


@pytest.mark.parametrize("schema", ["slotwise.ledger/v2", "slotwise.trace/v1", None, 3])
def test_other_schemas_are_refused(schema: object) -> None:
    data = {**Ledger().close("done").to_dict(), "schema": schema}
    with pytest.raises(SlotwiseError, match=r"expected|reads up to"):
        LedgerRecord.from_dict(data)


# --- random use -------------------------------------------------------------------------------

Operation = tuple[Any, ...]
_names = st.sampled_from(ENTERABLE)
_leaves = st.one_of(
    st.tuples(st.just("tick"), st.integers(0, 10**12)),
    st.tuples(st.just("add"), _names, st.integers(0, 1000)),
    st.tuples(st.just("raise")),
    st.tuples(st.just("close")),
)
_operations = st.recursive(
    st.lists(_leaves, max_size=4),
    lambda inner: st.lists(
        st.one_of(_leaves, st.tuples(st.just("phase"), _names, inner, st.booleans())), max_size=5
    ),
    max_leaves=25,
)


class _Raised(Exception):
    pass


class _Closed(Exception):
    pass


class _Run:
    """Runs operations on a ledger and, apart from it, charges each tick to the innermost phase."""

    def __init__(self, *, traced: bool) -> None:
        self.now = 0
        self.spans: list[tuple[str, int, int, int]] = []
        hook = (lambda *span: self.spans.append(span)) if traced else None
        self.ledger = Ledger(clock=lambda: self.now, on_span=hook)
        self.open = ["other"]
        self.expected: Counter[str] = Counter()
        self.record: LedgerRecord | None = None

    def run(self, operations: list[Operation]) -> None:
        for kind, *rest in operations:
            if kind == "tick":
                self.now += rest[0]
                self.expected[self.open[-1]] += rest[0]
            elif kind == "add":
                self.ledger.add(rest[0], bytes=rest[1])
            elif kind == "raise":
                raise _Raised
            elif kind == "close":
                self.record = self.ledger.close("cancelled")
                raise _Closed
            else:
                self.phase(*rest)

    def phase(self, name: str, inner: list[Operation], catches: bool) -> None:
        self.open.append(name)
        try:
            with self.ledger.phase(name):
                self.run(inner)
        except _Raised:
            if not catches:
                raise
        finally:
            self.open.pop()


@given(operations=_operations, traced=st.booleans())
def test_any_use_adds_up_exactly(operations: list[Operation], traced: bool) -> None:
    run = _Run(traced=traced)
    with contextlib.suppress(_Raised, _Closed):
        run.run(operations)
    record = run.record or run.ledger.close("done")
    found = {name: phase.ns for name, phase in record.phases.items()}
    assert sum(found.values()) == record.wall_ns == run.now
    assert record.counted_twice_ns == 0
    assert {n: ns for n, ns in found.items() if ns} == {n: t for n, t in run.expected.items() if t}
    if traced:
        assert _exclusive(run.spans) == {n: ns for n, ns in found.items() if ns and n != "other"}


def _exclusive(spans: list[tuple[str, int, int, int]]) -> dict[str, int]:
    """Time per phase from spans alone: each span minus the spans one level deeper inside it."""
    total: Counter[str] = Counter()
    inside: Counter[int] = Counter()
    for name, start, end, depth in spans:  # inner spans end, and are reported, first
        total[name] += end - start - inside.pop(depth + 1, 0)
        inside[depth] += end - start
    return {name: ns for name, ns in total.items() if ns}


def test_a_million_phases_need_no_memory() -> None:
    ledger = Ledger(clock=itertools.count().__next__)
    with ledger.phase("read.router"):
        before = sys.getallocatedblocks()
        for _ in range(1_000_000):
            with ledger.phase("read.expert_wait"):
                pass
        grown = sys.getallocatedblocks() - before
    assert grown < 1000
    assert ledger.close("done").phases["read.expert_wait"].calls == 1_000_000
