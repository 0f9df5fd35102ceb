"""An engine with a mirror answers as one without, and its record says where experts came from."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engine.rig import OTHER, Small, check_idle, generate, open_engine, record_of

from slotwise.experts.mirror import MirrorStore


@pytest.fixture(scope="module")
def model(small: Callable[[str], Small]) -> Small:
    return small("qwen3moe-mixed")


@pytest.mark.parametrize("share", [0.4, 1.0])
def test_a_mirror_changes_no_answer(model: Small, share: float) -> None:
    with open_engine(model, slots=1) as engine:
        engine.read_only(OTHER)
        engine.forget()
        answer = generate(engine)
        assert record_of(engine).prefill_experts.mirror_hits == 0
        assert record_of(engine).settings.mirror_bytes is None
    nbytes = int(model.layout.total_bytes * share)
    with open_engine(model, slots=1, mirror=nbytes) as engine:
        store = engine.loaded.store
        assert isinstance(store, MirrorStore)
        store.wait()
        engine.read_only(OTHER)
        engine.forget()
        assert generate(engine) == answer
        record = record_of(engine)
        check_idle(engine)
    experts = record.prefill_experts
    assert record.settings.mirror_bytes is not None
    assert nbytes <= record.settings.mirror_bytes < nbytes + 4096
    assert experts.misses
    assert experts.mirror_hits
    ahead = record.read_ahead
    assert ahead is not None
    reads = experts.misses + ahead.used - ahead.late + ahead.wasted
    if share == 1.0:
        assert (experts.mirror_hits, experts.bytes) == (reads, 0)
    else:
        assert experts.mirror_hits < reads
        assert experts.bytes
