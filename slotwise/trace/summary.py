"""Turns records into the rows that a report shows. All arithmetic of a report is here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slotwise.trace.codec import How
from slotwise.trace.ledger import LedgerRecord
from slotwise.trace.record import ExpertCounts, RequestRecord

Number = int | None
Unit = str


@dataclass(frozen=True, kw_only=True)
class PhaseRow:
    """One line of the table of where the time to the first token went."""

    name: str
    ns: int
    share: float
    """Of the ledger's wall time, 0 to 1."""
    calls: int
    bytes: int | None
    slots: int | None


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """One number of two records. Units: ns, slots, calls or bytes."""

    label: str
    unit: Unit
    left: Number
    right: Number
    difference: Number
    """right - left, None if either is."""
    how: How
    reason: str
    """Why a value is None; "" if none is."""


def phase_rows(ledger: LedgerRecord) -> tuple[PhaseRow, ...]:
    """The phases of a ledger in order of first use, `other` last."""
    wall = max(ledger.wall_ns, 1)
    return tuple(
        PhaseRow(
            name=name,
            ns=phase.ns,
            share=phase.ns / wall,
            calls=phase.calls,
            bytes=phase.bytes,
            slots=phase.slots,
        )
        for name, phase in ledger.phases.items()
    )


def comparison_rows(left: RequestRecord, right: RequestRecord) -> tuple[ComparisonRow, ...]:
    """What two requests that differ in one setting are compared by."""
    rows = []
    for label, unit, how, reason, value in _COMPARED:
        a, b = value(left), value(right)
        difference = None if a is None or b is None else b - a
        rows.append(
            ComparisonRow(
                label=label,
                unit=unit,
                left=a,
                right=b,
                difference=difference,
                how=how,
                reason=reason if difference is None else "",
            )
        )
    return tuple(rows)


def _refill_waited(record: RequestRecord) -> Number:
    return record.ledger.ns("refill")


def _first_64(record: RequestRecord) -> Number:
    return record.decode.first_64_tokens_ns if record.decode else None


def _refill_and_first_64(record: RequestRecord) -> Number:
    first_64 = _first_64(record)
    return None if first_64 is None else first_64 + record.ledger.ns("refill")


def _start_to_64(record: RequestRecord) -> Number:
    first_64, first = _first_64(record), record.time_to_first_token_ns
    return None if first_64 is None or first is None else first + first_64


def _decode(record: RequestRecord) -> ExpertCounts:
    return record.decode_experts


_SHORT = "an answer has fewer than 64 tokens"
_UNCOUNTED = "not counted in one of the two"
_COMPARED: tuple[tuple[str, Unit, How, str, Callable[[RequestRecord], Number]], ...] = (
    (
        "time to first token",
        "ns",
        "measured",
        "a request did not reach its first token",
        lambda record: record.time_to_first_token_ns,
    ),
    ("  of it waiting for refill", "ns", "measured", "", _refill_waited),
    ("first token to 64th token", "ns", "measured", _SHORT, _first_64),
    ("  plus waiting for refill", "ns", "derived", _SHORT, _refill_and_first_64),
    ("request to 64th token", "ns", "derived", _SHORT, _start_to_64),
    (
        "refill on its own lane",
        "ns",
        "measured",
        "no refill lane in one of the two",
        lambda record: record.refill.lane_ns if record.refill else None,
    ),
    (
        "expert slots lent",
        "slots",
        "measured",
        "no loan in one of the two",
        lambda record: record.loan.slots if record.loan else None,
    ),
    (
        "expert slots refilled",
        "slots",
        "measured",
        "no refill in one of the two",
        lambda record: record.refill.slots if record.refill else None,
    ),
    ("misses in decode", "calls", "measured", _UNCOUNTED, lambda r: _decode(r).misses),
    ("store reads in decode", "bytes", "measured", _UNCOUNTED, lambda r: _decode(r).bytes),
    ("expert wait in decode", "ns", "measured", _UNCOUNTED, lambda r: _decode(r).wait_ns),
)
