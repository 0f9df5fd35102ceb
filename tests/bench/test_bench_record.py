"""The record of a benchmark run, its table, and the verdicts that need no measuring."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.report import GATE_FAILED, finish, interval
from bench.ttft_outside import agrees
from slotwise.bench.prose import cut, prose
from slotwise.bench.record import BenchRecord
from slotwise.bench.stats import Estimate, estimate


def _record(*, passed: bool) -> BenchRecord:
    record = BenchRecord(bench="speed_of_sound", settings={"threads": 1})
    record.samples.append({"arm": "A", "ns": 10})
    record.results["ns"] = estimate([10.0])
    record.how["ns"] = "measured with a fork"
    record.check("loud", wanted="at least 1", found="0.5", passed=passed)
    return record


def _finish(record: BenchRecord, out: Path, *, as_json: bool = False) -> None:
    finish(record, columns=("what", "ns"), rows=[["sound", "10"]], out=out, as_json=as_json)


def test_record_says_where_with_what_and_every_sample(tmp_path: Path) -> None:
    path, data = _record(passed=True).write(tmp_path / "out")
    assert json.loads(path.read_text()) == data
    assert path.name.startswith("speed_of_sound-")
    assert data["schema"] == "slotwise.bench/v1"
    assert {"cpu", "cores", "memory_bytes", "kernel", "load_at_start", "load_at_end"} <= set(
        data["machine"]
    )
    assert {"revision", "dirty"} == set(data["git"])
    assert data["software"]["numpy"] != "not installed"
    assert data["samples"] == [{"arm": "A", "ns": 10}]
    assert data["results"]["ns"] == {"n": 1, "median": 10.0, "low": None, "high": None}
    assert data["how"] == {"ns": "measured with a fork"}


def test_table_names_results_and_verdicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _finish(_record(passed=True), tmp_path)
    printed = capsys.readouterr().out
    assert "speed of sound" in printed
    assert "sound" in printed
    assert "passed: loud: 0.5, wanted at least 1" in printed


def test_a_failed_check_ends_with_4_after_the_record_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        _finish(_record(passed=False), tmp_path)
    assert caught.value.code == GATE_FAILED
    assert "FAILED: loud" in capsys.readouterr().out
    assert len(list(tmp_path.glob("*.json"))) == 1


def test_json_prints_the_record_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _finish(_record(passed=True), tmp_path, as_json=True)
    assert json.loads(capsys.readouterr().out)["bench"] == "speed_of_sound"


def test_cut_goes_round_at_the_end_of_the_text() -> None:
    assert cut([1, 2, 3], 5, start=2) == [3, 1, 2, 3, 1]


def test_the_prose_is_long_enough_for_the_largest_read() -> None:
    assert len(prose()) > 4 * 2048


def test_interval_of_one_sample_is_a_dash() -> None:
    assert interval(Estimate(n=1, median=1.0, low=None, high=None)) == "-"
    assert interval(Estimate(n=2, median=1.0, low=0.5, high=1.5), "{:.1f}") == "0.5 .. 1.5"


@pytest.mark.parametrize(
    ("apart_ms", "outside_ms", "close"),
    [(1.9, 10, True), (2.1, 10, False), (-2.1, 10, False), (9.9, 1000, True), (10.1, 1000, False)],
)
def test_agreement_is_two_milliseconds_or_one_percent(
    apart_ms: float, outside_ms: float, close: bool
) -> None:
    assert agrees(round(apart_ms * 1e6), round(outside_ms * 1e6)) is close
