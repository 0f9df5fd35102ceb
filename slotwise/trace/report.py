"""Renders records with rich: a table of where the time went, two requests side by side, JSON.

Nothing is computed here beyond formatting; the rows come from `summary.py`. Colour, width and
plain output when piped are rich's business (NO_COLOR and FORCE_COLOR are honoured).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from slotwise.trace.codec import Record
from slotwise.trace.lanes import LaneTotal
from slotwise.trace.record import RequestRecord
from slotwise.trace.summary import ComparisonRow, PhaseRow, comparison_rows, phase_rows

_BAR_WIDTH = 12
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def where_time_went(record: RequestRecord) -> RenderableType:
    """The phases of the time to the first token, their sum, and the lanes beside them."""
    ledger = record.ledger
    parts: list[RenderableType] = [
        Text(_title(record), style="bold"),
        _phase_table(phase_rows(ledger), wall_ns=ledger.wall_ns),
    ]
    if ledger.counted_twice_ns:
        warning = f"DEFECT: {ledger.counted_twice_ns} ns were counted twice; do not use this table"
        parts.append(Text(warning, style="bold red"))
    if lines := cost_lines(record):
        parts.append(Text("\n".join(lines)))
    if record.lanes:
        note = "" if record.lanes_complete else " (lower bounds)"
        heading = f"On the lanes meanwhile: overlapped, not part of the sum{note}"
        parts += [Text(heading, style="bold"), _lane_table(record.lanes)]
    return Group(*parts)


def side_by_side(
    left: RequestRecord, right: RequestRecord, *, names: tuple[str, str]
) -> RenderableType:
    """Two requests that differ in one setting, number by number, with how each was obtained."""
    table = _table()
    table.add_column("", no_wrap=True)
    for name in (*names, "difference"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("unit")
    table.add_column("how", style="dim", no_wrap=True)
    rows = comparison_rows(left, right)
    for row in rows:
        table.add_row(row.label, *_compared(row), _shown_unit(row.unit), row.how)
    reasons = dict.fromkeys(f"- {row.label.strip()}: {row.reason}" for row in rows if row.reason)
    return Group(table, *(Text(reason, style="dim") for reason in reasons))


def to_json(records: Record | Sequence[Record]) -> str:
    """One JSON document: an object for one record, a list for several."""
    if isinstance(records, Record):
        return json.dumps(records.to_dict(), indent=2, allow_nan=False)
    return json.dumps([record.to_dict() for record in records], indent=2, allow_nan=False)


@dataclass(frozen=True)
class Bar:
    """A share from 0 to 1 as a bar of block characters, or of # where those do not exist."""

    share: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        eighths = round(self.share * _BAR_WIDTH * 8)
        whole, rest = divmod(eighths, 8)
        if options.ascii_only:
            yield Segment("#" * round(self.share * _BAR_WIDTH))
        else:
            yield Segment("█" * whole + _EIGHTHS[rest].strip())


def cost_lines(record: RequestRecord) -> list[str]:
    """What the loan cost, what became of the refill, and how good the forecast was."""
    lines, loan, refill, forecast = [], record.loan, record.refill, record.forecast
    if loan is not None:
        lines.append(
            f"Loan: {loan.slots:,} expert slots ({_mib(loan.bytes)} MiB); it cost the read "
            f"{_count(loan.read_misses)} misses, decode {_count(loan.decode_misses)}"
        )
    if refill is not None:
        state = {"running": ", not finished yet", "cut_short": ", cut short"}.get(refill.end)
        lines.append(
            f"Refill ({refill.policy}): {refill.slots:,} expert slots ({_mib(refill.bytes)} MiB)"
            f"{state or ''}; waited {_ms(refill.waited_ns)} ms, "
            f"saved {_count(refill.saved_misses)} misses"
        )
    if forecast.time_to_first_token_ns is not None and forecast.error_ns is not None:
        share = forecast.error_ns / forecast.time_to_first_token_ns
        lines.append(
            f"Forecast before the read: {_ms(forecast.time_to_first_token_ns)} ms; "
            f"it took {share:+.1%}"
        )
    return lines


def _title(record: RequestRecord) -> str:
    tokens = record.tokens
    if record.ledger.status != "done":
        return f"Where the time went, {record.ledger.status} before the first token"
    return (
        f"Time to the first token: {_ms(record.ledger.wall_ns)} ms\n{tokens.prompt:,} prompt tokens"
        f" = {tokens.reused:,} reused + {tokens.read:,} read + 1 (first window)"
    )


def _table() -> Table:
    return Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))


def _phase_table(rows: Sequence[PhaseRow], *, wall_ns: int) -> Table:
    table = _table()
    table.show_footer = True
    table.add_column("phase", footer="sum = wall time", no_wrap=True)
    table.add_column("ms", footer=_ms(wall_ns), justify="right", no_wrap=True)
    table.add_column("share", footer="100.0%", justify="right", no_wrap=True)
    table.add_column("", width=_BAR_WIDTH)
    for name in ("calls", "MiB", "expert\nslots"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        counts = (f"{row.calls:,}", _mib(row.bytes), _count(row.slots))
        style = "dim" if row.name == "other" else ""
        table.add_row(
            row.name, _ms(row.ns), f"{row.share:.1%}", Bar(row.share), *counts, style=style
        )
    return table


def _lane_table(lanes: Mapping[str, LaneTotal]) -> Table:
    table = _table()
    table.add_column("lane", no_wrap=True)
    for name in ("ms busy", "calls", "MiB", "expert\nslots"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, lane in lanes.items():
        counts = (f"{lane.calls:,}", _mib(lane.bytes), _count(lane.slots))
        table.add_row(name, _ms(lane.busy_ns), *counts, style="italic")
    return table


def _compared(row: ComparisonRow) -> tuple[str, str, str]:
    def shown(value: int | None, sign: str = "") -> str:
        if value is None:
            return "-"
        scale = {"ns": 1e6, "bytes": 2**20}.get(row.unit)
        return f"{value / scale:{sign},.2f}" if scale else f"{value:{sign},}"

    return shown(row.left), shown(row.right), shown(row.difference, "+")


def _shown_unit(unit: str) -> str:
    return {"ns": "ms", "bytes": "MiB", "calls": "", "slots": ""}[unit]


def _ms(ns: int) -> str:
    return f"{ns / 1e6:,.2f}"


def _mib(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:,.1f}"


def _count(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"
