"""The terminal reports: what is in them, narrow terminals, pipes, and the JSON document."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace

import pytest
from explain import made
from rich.console import Console, RenderableType

from slotwise.explain import json_out, report, wording
from slotwise.explain.compare import compare
from slotwise.explain.levers import predict_levers
from slotwise.explain.record import Life, Value
from slotwise.explain.stats import Estimate
from slotwise.explain.summary import explain


def shown(renderable: RenderableType, *, width: int = 150, **more: bool) -> str:
    console = Console(file=io.StringIO(), width=width, **more)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def table(*lives: Life, width: int = 150, per_request: bool = False) -> str:
    result = explain(made.reading(*lives))
    return shown(report.explained(result, per_request=per_request), width=width)


def test_every_number_of_the_refill_study_is_in_the_table() -> None:
    text = table(made.table_of_document_two())
    for number in ("252.0 m", "71.7 m", "56.0 d", "379.7 m", "0.319 ms/slot", "0.706 ms/token"):
        assert number in text
    assert "109.5 ms" in text
    assert "m measured" in text
    assert "n = 3 is too small" in text
    assert "fits by construction" in text


def test_the_order_is_requests_then_medians_then_costs() -> None:
    text = table(made.life(made.ladder()))
    places = [text.index(t) for t in ("first of life", "Medians by size", "What it costs")]
    assert places == sorted(places)
    assert "not split" in text
    assert "Crossing them would" in text
    assert "not in the numbers: request 1, 2, 3" in text


def test_bounds_gaps_and_what_is_not_known_are_said() -> None:
    text = table(made.awkward())
    assert "0.0..200.0 b" in text
    assert "2,048 of 3,000" in text
    assert "cancelled" in text
    assert "version not said" in text
    assert "cannot tell: queueing" in text
    assert "cannot tell: draft time: STRATA_X was off" in text
    assert "warning: the read prints its plan" in text
    detail = table(made.awkward(), per_request=True)
    assert "gpu timeline (overlapped); idle gaps" in detail
    assert "also contains" in detail
    assert "no line for it" in detail


def test_overlapped_lanes_are_no_columns_of_the_sum() -> None:
    head = table(made.awkward()).partition("m measured")[0]
    assert "qsa attn" not in head


def test_many_requests_are_cut_with_a_note() -> None:
    text = table(made.life(made.ladder(repeats=30)))
    assert "40 more requests are in the summary; --per-request shows all" in text


@pytest.mark.parametrize("width", [20, 40, 80, 300])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    for life in (made.awkward(), made.table_of_document_two(), made.life(made.ladder())):
        for per_request in (False, True):
            text = table(life, width=width, per_request=per_request)
            assert max(map(len, text.splitlines())) <= width


def test_a_narrow_terminal_shows_the_same_numbers() -> None:
    narrow = table(made.table_of_document_two(), width=50)
    for number in ("252.0 m", "71.7 m", "56.0 d", "379.7 m", "1,245.0 m"):
        assert number in narrow


def test_nothing_decorative_reaches_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b" not in table(made.life(made.ladder()))
    monkeypatch.setenv("NO_COLOR", "1")
    coloured = shown(report.explained(explain(made.reading(made.awkward()))), force_terminal=True)
    assert "\x1b[3" not in coloured.replace("\x1b[3m", "")  # italics stay, colours do not


def test_markup_in_a_name_is_text() -> None:
    life = made.life([made.request(0, prompt=5, phases=[made.measured("a [red]b", 1.0)])])
    assert "a [red]b" in table(life, per_request=True)


def test_a_comparison_and_levers_are_shown_with_their_assumptions() -> None:
    a, b = (made.reading(made.life(made.ladder(rest=r, noise=1 + r / 999))) for r in (56.0, 204.0))
    text = shown(report.comparison(compare(a, b, names=("a.log", "b.log"))))
    assert "moved" in text
    assert "did not move, by less than" in text
    assert "stays unexplained" in text
    assert "nothing that the logs show" in text
    levers = shown(report.levers(predict_levers(a, off=("lend",))))
    assert "assumes: nothing before the first token waits" in levers
    assert "not predicted: without lend" in levers


def test_the_document_is_json_without_nan() -> None:
    life = made.life(made.ladder())
    document = json.loads("".join(json_out.explained_pieces(explain(made.reading(life)))))
    assert document["schema"] == "slotwise.explain/v1"
    said = document["lives"][0]["summary"]
    assert said["refill"]["rate"]["terms"][0]["value"] == pytest.approx(0.32, abs=1e-3)
    assert said["costs"]["terms"] == []
    assert "Crossing" in said["costs"]["refused"]
    assert document["lives"][0]["requests"][0]["ttft_ms"] == {
        "value": None, "how": "missing", "why": "not printed",
    }  # fmt: skip
    assert json_out.plain({"x": math.nan, "y": (math.inf, 1)}) == {"x": None, "y": [None, 1]}


def test_arms_are_json_too() -> None:
    a = made.reading(made.life(made.ladder()))
    b = made.reading(made.life([replace(r) for r in made.ladder(noise=1.4)]))
    comparison = json_out.comparison_document(compare(a, b, names=("a", "b")))
    assert json.loads(json_out.dumps(comparison))["sizes"][0]["outer"]["name"] == "prompt clock"
    levers = json_out.levers_document(predict_levers(a))
    assert json.loads(json_out.dumps(levers))["predictions"][0]["lever"]["key"] == "deferred-refill"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.0"), (-0.0, "0.0"), (0.319, "0.319"), (9.5, "9.50"), (71.7, "71.7"),
     (5626.0, "5,626.0"), (72683.2, "72,683"), (-12.0, "-12.0")],
)  # fmt: skip
def test_numbers_keep_what_matters(value: float, text: str) -> None:
    assert wording.number(value) == text


def test_open_bounds_and_rates() -> None:
    assert wording.value_text(Value.bounded(9.0, None, "")) == ">=9.00 b"
    assert wording.value_text(Value.bounded(None, 9.0, "")) == "<=9.00 b"
    rate = Estimate(value=10.468, unit="ms/token", n=9, low=10.4, high=10.5)
    assert wording.estimate_text(rate) == "10.468 ms/token [10.400, 10.500]"
