"""What a loan costs and a refill brings back is its request's, also later; forecasts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engine.rig import GREEDY, Small, faulty_engine, generate, open_engine, record_of
from experts.fakes import wait_until
from reference.tiny import random_tokens

from slotwise.trace import Forecast, RefillTotal, read_trace


@pytest.fixture(scope="module")
def model(small: Callable[[str], Small]) -> Small:
    return small("gpt-oss")


def test_a_refill_after_its_request_has_ended_is_still_that_requests(
    model: Small, tmp_path: Path
) -> None:
    """The reads are held until the request is over; the next request's loan ends them."""
    path = tmp_path / "t.jsonl"
    prompt = random_tokens(100, seed=3)
    with faulty_engine(model, trace=path, slots=48, chunk=100) as (engine, store):
        experts = engine.loaded.experts
        assert experts is not None
        layout = model.layout
        everybody = {(i, e) for i in range(layout.n_moe_layers) for e in range(layout.n_experts)}
        steps = engine.generate(prompt, sampling=GREEDY, max_tokens=1)
        next(steps)
        store.held = everybody
        assert list(steps) == []
        first = record_of(engine)
        assert first.refill is not None
        assert (first.refill.slots, first.refill.end) == (0, "running")
        store.heal()
        books = experts.refill_books
        wait_until(lambda: books.end == "full")
        assert books.done > 0
        engine.forget()
        generate(engine, prompt, 2)
        second = record_of(engine)
        assert second.loan is not None
    totals = [event for event in read_trace(path).events if isinstance(event, RefillTotal)]
    assert [total.request for total in totals] == [first.request, second.request]
    assert (totals[0].slots, totals[0].bytes, totals[0].end) == (books.done, books.bytes, "full")
    assert totals[0].lane_ns > 0


def test_a_forecast_is_checked_against_what_happened(model: Small) -> None:
    with open_engine(model) as engine:
        generate(engine)
        assert record_of(engine).forecast == Forecast()
        engine.forget()
        generate(engine)
        record = record_of(engine)
        foretold, error = record.forecast.time_to_first_token_ns, record.forecast.error_ns
        assert foretold is not None
        assert error is not None
        assert foretold + error == record.ledger.wall_ns
        data = record.to_dict()
        assert data["how"]["forecast.time_to_first_token_ns"] == "derived"


def test_a_first_request_says_why_it_has_no_forecast(model: Small) -> None:
    with open_engine(model) as engine:
        generate(engine)
        data = record_of(engine).to_dict()
        assert data["how"]["forecast.time_to_first_token_ns"] == "missing"
        assert "no earlier request" in data["missing"]["forecast.time_to_first_token_ns"]


def test_a_longer_prompt_borrows_more(model: Small) -> None:
    lent = []
    with open_engine(model, slots=48, chunk=100) as engine:
        for n in (8, 30, 60, 100):
            engine.forget()
            generate(engine, random_tokens(n, seed=n), 1)
            loan = record_of(engine).loan
            assert loan is not None
            lent.append(loan.slots)
    assert lent == sorted(lent)
    assert lent[0] < lent[-1]
