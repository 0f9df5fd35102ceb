"""A read of the slow tier that fails ends one request with an error that names file and offset;
the next request is served as if nothing had been."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from engine.rig import (
    GREEDY,
    OTHER,
    PROMPT,
    Small,
    check_idle,
    faulty_engine,
    generate,
    open_engine,
    record_of,
)
from experts.faulty_store import Expert, FaultyStore
from reference.tiny import random_tokens

from slotwise.engine.engine import Engine
from slotwise.errors import Refused, StoreError
from slotwise.trace import LaneWork, read_trace
from slotwise.weights.pack_index import EXPERTS

N = 4


@pytest.fixture(scope="module")
def model(small: Callable[[str], Small]) -> Small:
    return small("gpt-oss")


@pytest.fixture(scope="module")
def answer(model: Small) -> list[int]:
    with open_engine(model) as engine:
        return generate(engine, n=N)


@pytest.fixture(scope="module")
def logits(model: Small) -> np.ndarray:
    with open_engine(model) as engine:
        return engine.logits(PROMPT)


def every_expert(model: Small) -> set[Expert]:
    layout = model.layout
    return {(i, e) for i in range(layout.n_moe_layers) for e in range(layout.n_experts)}


class FailsAt(set[Expert]):
    """Contains everybody from the n-th question on, for `times` questions."""

    def __init__(self, n: int, times: int = 1) -> None:
        super().__init__()
        self.left, self.times = n, times

    def __contains__(self, _: object) -> bool:
        self.left -= 1
        return -self.times <= self.left < 0

    def clear(self) -> None:
        self.times = 0


def check_failed(engine: Engine, error: StoreError, words: str) -> None:
    assert (error.path, error.offset % 4096) == ("faulty.bin", 0)
    assert str(error) == f"faulty.bin at byte {error.offset:,}: {error.cause}"
    assert words in error.cause
    record = record_of(engine)
    assert record.status == "failed"
    assert record.ledger.status == ("done" if record.tokens.generated else "failed")
    check_idle(engine)


def check_serves(engine: Engine, answer: list[int], logits: np.ndarray) -> None:
    assert generate(engine, n=N) == answer
    assert record_of(engine).status == "done"
    np.testing.assert_array_equal(engine.logits(PROMPT), logits)
    check_idle(engine)


@pytest.mark.parametrize(
    ("kind", "words", "io_lanes"), [("io_error", "EIO", 4), ("short", "half of the bytes", 1)]
)
def test_any_read_of_a_request_may_fail(
    model: Small, answer: list[int], logits: np.ndarray, kind: str, words: str, io_lanes: int
) -> None:
    """The n-th read of a request fails, for one n after the other until none is left. What was
    read of the prompt until then is kept."""
    stages = set()
    with faulty_engine(model, slots=1, refill="lazy", io_lanes=io_lanes) as (engine, store):
        for n in range(0, 400, 2):
            engine.read_only(OTHER)
            engine.loaded.state.reuse([-1])
            fails = FailsAt(n)
            setattr(store, kind, fails)
            try:
                assert generate(engine, n=N) == answer
                if fails.left >= 0:
                    break
                continue  # a read ahead failed, which nobody waited for
            except StoreError as error:
                check_failed(engine, error, words)
            tokens = record_of(engine).tokens
            stages.add("decode" if tokens.generated else "window" if tokens.read > 8 else "read")
            kept = len(engine.loaded.state.tokens)
            assert kept == tokens.read + tokens.generated
            if n % 5 == 0:
                assert generate(engine, n=N) == answer
                assert record_of(engine).tokens.reused == min(kept, len(PROMPT) - 1)
        else:
            pytest.fail("the request never got through")
        assert stages == {"read", "window", "decode"}
        store.heal()
        check_serves(engine, answer, logits)


def test_in_the_first_window(model: Small, answer: list[int], logits: np.ndarray) -> None:
    with faulty_engine(model, slots=1) as (engine, store):
        engine.read_only(OTHER)
        store.io_error = every_expert(model)
        with pytest.raises(StoreError) as caught:
            generate(engine, PROMPT[:1])
        check_failed(engine, caught.value, "EIO")
        assert record_of(engine).tokens.read == 0
        assert "first_window" in record_of(engine).ledger.phases
        store.heal()
        check_serves(engine, answer, logits)


@pytest.mark.parametrize("refill", ["deferred", "blocking"])
def test_a_refill_that_fails_harms_no_request(model: Small, refill: str, tmp_path: Path) -> None:
    prompt = random_tokens(100)
    with open_engine(model, chunk=100, slots=48) as engine:
        expected = generate(engine, prompt, 3)
    path = tmp_path / "t.jsonl"
    with faulty_engine(model, chunk=100, slots=48, refill=refill, lookahead="off", trace=path) as (
        engine,
        store,
    ):
        experts = engine.loaded.experts
        assert experts is not None
        if refill == "deferred":
            store.io_error = BrokenRefill(engine)
            steps = engine.generate(prompt, sampling=GREEDY, max_tokens=3)
            tokens = [next(steps).token, next(steps).token]
            with experts._lanes.lock:
                while experts._refill.active:
                    experts._lanes.wait()
            tokens += [step.token for step in steps]
        else:
            store.io_error = BrokenRefill(engine)
            tokens = generate(engine, prompt, 3)
        assert tokens == expected
        record = record_of(engine)
        assert record.status == "done"
        assert record.refill is not None
        assert record.refill.slots == 0
        assert experts.refill_state().failed > 0
        assert experts.snapshot().failed_reads == experts.refill_state().failed
        check_idle(engine)
        store.heal()
        assert generate(engine, prompt, 3) == expected
        assert record_of(engine).status == "done"
    lanes = {event.name for event in read_trace(path).events if isinstance(event, LaneWork)}
    assert "refill failed" in lanes


class BrokenRefill(set[Expert]):
    """Contains the experts that the refill is reading."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        assert engine.loaded.experts is not None
        self.experts = engine.loaded.experts

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, tuple)
        read = self.experts._lanes._reads.get(self.experts.pool.flat(*key))
        return read is not None and read.purpose == "refill"


def test_slots_that_could_not_be_filled_at_the_start_are_filled_on_demand(
    model: Small, answer: list[int], logits: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Sick(FaultyStore):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, io_error=every_expert(model))  # type: ignore[arg-type]

    monkeypatch.setattr("engine.rig.FaultyStore", Sick)
    with faulty_engine(model) as (engine, store):
        assert engine.loaded.experts is not None
        assert (engine.loaded.experts.pool.table == -1).all()
        with pytest.raises(StoreError):
            generate(engine)
        store.heal()
        check_serves(engine, answer, logits)


# -- real files


@pytest.fixture
def copy(model: Small, tmp_path: Path) -> Small:
    """A copy of the model and its pack, to be damaged."""
    shutil.copy(model.path, tmp_path)
    shutil.copytree(model.pack, tmp_path / "pack")
    tiny = type(model.tiny)(tmp_path / model.path.name, model.tiny.architecture, model.tiny.weights)
    return Small(tiny, tmp_path)


def test_a_pack_that_is_cut_while_it_is_open(
    copy: Small, answer: list[int], logits: np.ndarray
) -> None:
    file = copy.folder / "pack" / EXPERTS
    whole = file.read_bytes()
    with open_engine(copy, slots=1, pack=copy.folder / "pack") as engine:
        engine.read_only(OTHER)
        os.truncate(file, len(whole) // 2)
        with pytest.raises(StoreError, match="the file ends after") as caught:
            generate(engine)
        assert caught.value.path == str(file)
        assert caught.value.offset >= len(whole) // 2
        assert record_of(engine).status == "failed"
        check_idle(engine)
        file.write_bytes(whole)  # the same file, whole again
        check_serves(engine, answer, logits)


def test_a_model_that_is_cut_while_it_is_open(copy: Small) -> None:
    """Without a pack the experts come out of the model's own file."""
    with open_engine(copy, slots=1, pack=copy.folder / "none") as engine:
        assert engine.loaded.store is not None
        assert "three reads an expert" in engine.loaded.store.note
        engine.read_only(OTHER)
        os.truncate(copy.path, 100_000)
        with pytest.raises(StoreError, match=r"the file ends after|was changed") as caught:
            generate(engine)
        assert caught.value.path == str(copy.path)
        check_idle(engine)


def test_a_model_that_is_cut_between_its_header_and_its_weights(copy: Small) -> None:
    """Seen by the header's sizes before anything is read."""
    os.truncate(copy.path, copy.path.stat().st_size - 100)
    with pytest.raises(Refused, match="truncated"):
        open_engine(copy)
