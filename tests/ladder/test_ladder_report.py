"""The report of a record, on a terminal, as JSON, as a page, and through the verbs."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browser import opened
from ladder.driving import a_b, run, with_mode
from ladder.small_server import PROMPT_MS_PER_TOKEN, SmallServer
from rich.console import Console

from slotwise.cli import main
from slotwise.errors import Refused
from slotwise.findings.validate import violations
from slotwise.ladder import report_text
from slotwise.ladder.arms import Engaged
from slotwise.ladder.page import page
from slotwise.ladder.report import LadderReport, ladder_report
from slotwise.ladder.schema import ladder_schema
from slotwise.ladder.story import findings

if TYPE_CHECKING:
    from playwright.sync_api import Browser

SIZES = (60, 120, 300)


@pytest.fixture
def compared(server: SmallServer, tmp_path: Path) -> tuple[Path, LadderReport]:
    out = tmp_path / "run.json"
    data = run(out, url=server.url, sizes=SIZES, samples=6, arms=a_b())
    return out, ladder_report(data, file="run.json")


def shown(report: LadderReport) -> str:
    out = io.StringIO()
    Console(width=120, file=out).print(report_text.terminal(report))
    return out.getvalue()


def test_a_table_per_arm_with_its_fits(compared: tuple[Path, LadderReport]) -> None:
    _, report = compared
    assert [arm.name for arm in report.arms] == ["off", "on"]
    for arm in report.arms:
        assert [row.tokens for row in arm.rows] == list(SIZES)
        assert [row.n for row in arm.rows] == [6, 6, 6]  # all of them: the cold ones were before
        assert len(arm.first_rows) == 3
        clocks = [row.prompt_clock.value for row in arm.rows if row.prompt_clock]
        assert clocks == pytest.approx([n * PROMPT_MS_PER_TOKEN for n in SIZES])
        assert arm.read.line is not None
        assert arm.read.line.terms[1].value == pytest.approx(PROMPT_MS_PER_TOKEN)
        assert arm.first_token is not None
        assert arm.statuses == {"ok": 21}
    text = shown(report)
    assert "Arm off" in text
    assert "while the server was cold" in text
    assert "refill" not in text.split("Arm on")[0].split("n\n")[0]  # no column nobody can fill


def test_arms_are_set_against_the_first_in_pairs(compared: tuple[Path, LadderReport]) -> None:
    _, report = compared
    (comparison,) = report.comparisons
    assert comparison.names == ("off", "on")
    assert [size.outer.by.paired for size in comparison.sizes] == [True] * 3
    assert not any("not interleaved" in text for text in comparison.warnings)


SOMETIMES = Engaged(counter="response:slotwise.work", above=0, every_sample=False)


def with_work(server: SmallServer, out: Path, work: dict[int, int]) -> LadderReport:
    """A report of two arms, one with a lever that does as much work as said by size."""
    server.work = work
    off, on = a_b()
    arms = (off, replace(on, engaged=(*on.engaged, SOMETIMES)))
    return ladder_report(run(out, url=server.url, sizes=SIZES, arms=arms), file="run.json")


def test_a_lever_that_finds_nothing_to_do_at_one_size(server: SmallServer, tmp_path: Path) -> None:
    report = with_work(server, tmp_path / "run.json", {60: 0, 120: 3, 300: 5})
    setting, work = report.arms[1].proofs
    assert (setting.counted, setting.held) == (False, {60: 2, 120: 2, 300: 2})
    assert (work.counted, work.held) == (True, {60: 0, 120: 2, 300: 2})
    assert [row.n for row in report.arms[1].rows] == [2, 2, 2]  # they stay in the table
    (warning,) = report.warnings
    assert warning.startswith("arm on, 60 tokens: its lever never engaged")
    text = " ".join(shown(report).split())
    assert "response:slotwise.work is more than 0 in 4 of 6 samples" in text


def test_an_arm_whose_lever_never_did_anything_is_refused(
    server: SmallServer, tmp_path: Path
) -> None:
    """Set it was: only its counter shows that it had nothing to do."""
    out = tmp_path / "run.json"
    with pytest.raises(Refused, match=r"arm on: .*the arm's lever never engaged: .*in none of its"):
        with_work(server, out, dict.fromkeys(SIZES, 0))
    record = json.loads(out.read_text())
    assert {s["status"] for s in record["samples"] if s["arm"] == "on"} == {"refused"}
    assert {s["status"] for s in record["samples"] if s["arm"] == "off"} == {"ok"}
    report = ladder_report(record, file="run.json")
    assert report.comparisons == ()
    assert report.arms[1].rows == ()
    assert main(["explain", "compare", f"{out}:off", f"{out}:on"]) == 3


def test_an_arm_that_only_a_setting_proves_is_warned_of(
    compared: tuple[Path, LadderReport],
) -> None:
    assert compared[1].warnings == (
        "arm on is proven by a setting only, by nothing that its lever did",
    )


def test_arms_without_a_counter_in_the_record_are_not_compared(
    compared: tuple[Path, LadderReport],
) -> None:
    _, report = compared
    data = json.loads(json.dumps(report.record))
    data["arms"][1]["engaged"] = []
    other = ladder_report(data, file="run.json")
    assert other.comparisons == ()
    assert other.not_compared == ("arm on: no engaged counter in the record",)


def test_unusable_samples_are_counted_with_their_reason(
    server: SmallServer, tmp_path: Path
) -> None:
    out = tmp_path / "run.json"
    with pytest.raises(Refused):
        run(out, url=server.url, arms=with_mode("cached"))
    report = ladder_report(json.loads(out.read_text()), file="run.json")
    assert not report.anything
    text = shown(report)
    assert "6 of 6 samples: 5 prompt tokens came from the server's cache" in text
    assert "no usable sample" in text


def test_the_page_is_whole_and_holds_no_other_host(compared: tuple[Path, LadderReport]) -> None:
    _, report = compared
    html = page(report)
    assert html.count('<svg class="fit"') == 4
    for part in ("Arm off", "on against off", "Limitations", "</html>"):
        assert part in html
    assert "http://" not in html
    assert "https://" not in html


@pytest.mark.parametrize(("width", "scheme"), [(1100, "light"), (1100, "dark"), (390, "light")])
def test_the_page_in_a_browser(
    compared: tuple[Path, LadderReport], browser: Browser, tmp_path: Path, width: int, scheme: str
) -> None:
    file = tmp_path / "run.html"
    file.write_text(page(compared[1]), encoding="utf-8")
    with opened(browser, file.as_uri(), width=width, scheme=scheme) as shown_page:
        assert shown_page.evaluate("document.documentElement.scrollWidth") <= width
        assert shown_page.locator("details[open] svg.row").count() > 3  # no shares: to be seen
        heights = "[...document.querySelectorAll('svg.row')].map(e => e.clientHeight)"
        assert max(shown_page.evaluate(heights)) < 80  # one line each, however empty it is


def test_the_verbs(
    compared: tuple[Path, LadderReport], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out, _ = compared
    assert main(["ladder", "report", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "slotwise.ladder-report/v1"
    assert document["arms"][0]["rows"][0]["first_token"]["n"] == 6
    html = tmp_path / "run.html"
    assert main(["ladder", "report", str(out), "--html", str(html)]) == 0
    assert main(["ladder", "report", str(out), "--html", str(html)]) == 2
    assert main(["ladder", "report", str(out), "--html", str(out), "--force"]) == 2
    assert main(["explain", "compare", f"{out}:off", f"{out}:on"]) == 0
    assert "prompt 60 tokens" in capsys.readouterr().out
    other = tmp_path / "other.json"
    other.write_text("{}")
    assert main(["ladder", "report", str(other)]) == 4


def test_usage_of_the_verb(
    server: SmallServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.json"
    call = ["ladder", "--url", server.url, "--sizes", "50", "--samples", "1", "--out", str(out)]
    assert main(call) == 0
    assert main(call) == 2  # it is there already
    assert "exists already" in capsys.readouterr().err
    assert main([*call, "--force"]) == 0
    assert main([*call, "--force", "--sizes", "50,50"]) == 2
    assert main([*call, "--force", "--arm", "x"]) == 2
    assert main(["ladder", "--out", str(tmp_path / "no" / "run.json"), "--url", server.url]) == 2
    assert main(["ladder", "--out", str(tmp_path / "n.json")]) == 2
    assert "has no url" in capsys.readouterr().err
    assert main(["ladder", "--out", str(tmp_path / "n.json"), "--url", "http://127.0.0.1:9"]) == 3


def test_the_story_s_findings_name_where_each_number_is() -> None:
    """A report as `slotwise ladder report --json` writes it, cut down to what is cited."""

    def change(value: float) -> dict:
        return {"estimate": {"value": value, "low": value - 1, "high": value + 1}, "p": 0.01}

    share = {
        "names": ["blocking", "deferred"], "label": "prompt 75 tokens, new",
        "first_token": change(-71.62), "read": change(0.04), "refill": change(-71.7),
        "conversation": change(0.0), "rest": change(0.04),
    }  # fmt: skip
    arm = {"name": "blocking", "statuses": {"ok": 21, "error": 1},
           "refill": {"rate": {"terms": [{"value": 0.3191}]}}}  # fmt: skip
    report = {"run": "r", "status": "done", "service": {"restored": True}, "warnings": [],
              "arms": [arm], "shares": [share]}  # fmt: skip
    record = findings(report, b"x")
    first, second = record["claims"]
    assert first["statement"].startswith("Waited for, the refill takes 0.319 ms per expert slot")
    assert second["id"] == "deferred-against-blocking"
    assert [n["value"] for n in second["numbers"]] == [-71.6, -71.7, 0.0, 0.0]
    assert second["numbers"][1]["pointer"] == "/shares/0/refill/estimate/value"


def test_our_validator_judges_as_jsonschema_does(compared: tuple[Path, LadderReport]) -> None:
    from jsonschema import Draft202012Validator

    _, report = compared
    theirs = Draft202012Validator(ladder_schema())
    for path, value in (
        (("samples", 0, "cold"), 1), (("pairing", "paired"), "x"), (("pairing",), 3),
        (("plan", "sizes"), []), (("arms", 0, "servers", 0, "local"), "yes"), (("status",), ""),
        (("service",), {"restored": True}), (("samples", 0, "edges_ms", "first_token"), True),
    ):  # fmt: skip
        data = json.loads(json.dumps(report.record))
        place = data
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        assert bool(list(violations(data, ladder_schema()))), path
        assert not theirs.is_valid(data), path
