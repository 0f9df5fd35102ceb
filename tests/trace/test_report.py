"""Reports: the table adds up, lanes stay apart, comparisons say how each number was obtained."""

from __future__ import annotations

import dataclasses
import io
import json
from typing import Any

import pytest
from rich.console import Console, RenderableType

from slotwise.trace import Forecast, LedgerRecord, PhaseRecord
from slotwise.trace.report import Bar, cost_lines, side_by_side, to_json, where_time_went
from slotwise.trace.summary import comparison_rows, phase_rows


def printed(renderable: RenderableType, *, encoding: str = "utf-8", width: int = 80) -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    Console(file=file, width=width, _environ={}).print(renderable)
    file.flush()
    return raw.getvalue().decode(encoding)


def test_table_shows_phases_other_and_a_sum_that_is_the_wall_time(
    make_record: Any, clock: Any
) -> None:
    text = printed(where_time_went(make_record(clock)))
    assert "40 prompt tokens = 10 reused + 29 read + 1 (first window)" in text
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line.split()}
    assert lines["queue"] == ["queue", "2.00", "7.7%", "▉", "1", "-", "-"]
    assert lines["read.expert_wait"][1:] == ["6.00", "23.1%", "██▊", "2", "2.0", "4"]
    assert lines["other"][:3] == ["other", "1.00", "3.8%"]
    assert lines["sum"] == ["sum", "=", "wall", "time", "26.00", "100.0%"]
    shown = [float(lines[n][1]) for n in make_record(clock).ledger.phases]
    assert sum(shown) == 26.0


def test_lanes_are_marked_as_not_part_of_the_sum(make_record: Any, clock: Any) -> None:
    text = printed(where_time_went(make_record(clock)))
    before, heading, after = text.partition("overlapped, not part of the sum")
    assert heading
    assert "lower bounds" not in text
    assert "sum = wall time" in before
    assert "io.0" in after
    assert "io.0" not in before


def test_incomplete_lanes_and_failed_requests_say_so(failed_record: Any) -> None:
    text = printed(where_time_went(failed_record))
    assert "failed before the first token" in text
    assert "not part of the sum (lower bounds)" in text
    assert "other" in text


def test_time_counted_twice_is_shown_as_a_defect(make_record: Any, clock: Any) -> None:
    record = make_record(clock)
    assert "DEFECT" not in printed(where_time_went(record))
    ledger = record.ledger
    phases = {**ledger.phases, "emit": PhaseRecord(ns=ledger.ns("emit") + 5, calls=1)}
    wrong: LedgerRecord = dataclasses.replace(ledger, phases=phases, counted_twice_ns=5)
    text = printed(where_time_went(dataclasses.replace(record, ledger=wrong)))
    assert "DEFECT: 5 ns were counted twice" in text


def test_comparison_has_value_unit_and_how(make_record: Any, clock: Any) -> None:
    blocking = make_record(clock, policy="blocking", refill_ms=72)
    deferred = make_record(clock)
    rows = {row.label.strip(): row for row in comparison_rows(blocking, deferred)}
    first = rows["time to first token"]
    assert (first.left, first.right, first.difference) == (98_000_000, 26_000_000, -72_000_000)
    assert rows["of it waiting for refill"].right == 0
    assert rows["first token to 64th token"].left == 630_000_000
    assert rows["plus waiting for refill"].left == 702_000_000
    assert rows["plus waiting for refill"].how == "derived"
    assert rows["request to 64th token"].difference == -72_000_000
    assert all(row.reason == "" for row in rows.values())
    text = printed(side_by_side(blocking, deferred, names=("blocking", "deferred")))
    assert ["time", "to", "first", "token", "98.00", "26.00", "-72.00", "ms", "measured"] in [
        line.split() for line in text.splitlines()
    ]


def test_unknown_values_are_a_dash_with_a_reason(
    make_record: Any, failed_record: Any, clock: Any
) -> None:
    text = printed(side_by_side(make_record(clock, tokens=5), failed_record, names=("a", "b")))
    lines = [line.split() for line in text.splitlines()]
    assert ["time", "to", "first", "token", "26.00", "-", "-", "ms", "measured"] in lines
    assert "- first token to 64th token: an answer has fewer than 64 tokens" in text
    assert "- expert slots lent: no loan in one of the two" in text


def test_shares_add_up_to_one(make_record: Any, clock: Any) -> None:
    rows = phase_rows(make_record(clock).ledger)
    assert sum(row.share for row in rows) == pytest.approx(1)
    assert rows[-1].name == "other"


def test_piped_output_is_plain_and_fits_80_columns(make_record: Any, clock: Any) -> None:
    record = make_record(clock)
    for part in (where_time_went(record), side_by_side(record, record, names=("a", "b"))):
        text = printed(part)
        assert "\x1b" not in text
        assert "…" not in text
        assert max(len(line) for line in text.splitlines()) <= 80


def test_a_terminal_without_unicode_gets_ascii(make_record: Any, clock: Any) -> None:
    record = make_record(clock)
    assert "##" in printed(where_time_went(record), encoding="ascii")
    assert printed(side_by_side(record, record, names=("a", "b")), encoding="ascii")


@pytest.mark.parametrize(("share", "bar"), [(0, ""), (0.01, "▏"), (0.5, "█" * 6), (1, "█" * 12)])
def test_bar(share: float, bar: str) -> None:
    assert printed(Bar(share)).strip() == bar


def test_json_is_one_document(make_record: Any, failed_record: Any, clock: Any) -> None:
    record = make_record(clock)
    assert json.loads(to_json(record)) == record.to_dict()
    both = json.loads(to_json([record, failed_record]))
    assert both == [record.to_dict(), failed_record.to_dict()]


def test_a_loan_a_refill_and_a_forecast_have_a_line_each(make_record: Any, clock: Any) -> None:
    record = make_record(clock)
    loan = dataclasses.replace(record.loan, decode_misses=2)
    refill = dataclasses.replace(record.refill, end="running", saved_misses=None)
    forecast = Forecast(time_to_first_token_ns=20_000_000, error_ns=6_000_000)
    record = dataclasses.replace(record, loan=loan, refill=refill, forecast=forecast)
    assert cost_lines(record) == [
        "Loan: 9 expert slots (0.0 MiB); it cost the read 3 misses, decode 2",
        "Refill (deferred): 9 expert slots (0.0 MiB), not finished yet; waited 0.00 ms, "
        "saved - misses",
        "Forecast before the read: 20.00 ms; it took +30.0%",
    ]
    assert "it took +30.0%" in printed(where_time_went(record), width=120)


def test_without_a_loan_and_a_forecast_there_is_no_line(failed_record: Any) -> None:
    assert cost_lines(failed_record) == []
