"""`--routing`: what an engine chose, in a file that can be replayed."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine.rig import OTHER, PROMPT, generate, make, open_engine, record_of

from slotwise.engine.session import recorded_routing
from slotwise.errors import UsageError
from slotwise.experts import belady, load_routing, replay


def test_an_answer_is_recorded_and_replayed(tmp_path: Path) -> None:
    small = make("qwen3moe", tmp_path)
    out = tmp_path / "r.jsonl"
    with open_engine(small, slots=1, lookahead="off") as engine:
        generate(engine, OTHER)
        with recorded_routing(engine, out):
            generate(engine, PROMPT, 6)
        generate(engine, OTHER)
        record, slots = record_of(engine), engine.loaded.plan.slots
    routing = load_routing(out)
    layout = small.layout
    assert routing.model_digest == small.model.digest
    assert (routing.tokens("read"), routing.tokens("decode")) == (len(PROMPT) - 1, 6)
    assert {step.stage for step in routing.steps if step.resident is not None} == {"read", "decode"}
    assert all(len(step.calls) == layout.n_moe_layers for step in routing.steps)
    found = replay(routing, routing.layout, slots, from_snapshots=True)
    entries = 6 * layout.n_moe_layers * layout.n_used
    assert found.decode.hits + found.decode.misses == entries
    best = belady(routing, routing.layout, slots, from_snapshots=True)
    assert best.decode.misses <= found.decode.misses
    assert record.settings.lookahead == "off"
    assert record.lookahead is None


def test_a_record_says_that_it_looked_ahead(tmp_path: Path) -> None:
    with open_engine(make("qwen3moe", tmp_path), slots=1, lookahead="on") as engine:
        generate(engine, PROMPT, 6)
        ahead = record_of(engine).lookahead
    assert ahead is not None
    assert ahead.windows == 6
    assert ahead.predicted > 0
    assert ahead.used + ahead.wasted + ahead.called_off == ahead.predicted
    assert ahead.late <= ahead.used


def test_a_model_without_experts_has_no_routing(tmp_path: Path) -> None:
    with open_engine(make("llama", tmp_path)) as engine:
        with pytest.raises(UsageError, match="has no experts"), recorded_routing(engine, tmp_path):
            pass
        assert engine.loaded.experts is None
        generate(engine)
        assert record_of(engine).settings.lookahead == "none"
