"""A slow tier that hangs, lies or changes under an open engine: an error in time, or the right
answer; never a wait without end, never wrong numbers."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
from experts.fakes import wait_until
from experts.faulty_store import Expert

from slotwise.engine.engine import Engine
from slotwise.engine.prompt import Cancelled
from slotwise.errors import StoreError
from slotwise.weights.pack_index import EXPERTS

N = 4


@pytest.fixture(scope="module")
def model(small: Callable[[str], Small]) -> Small:
    return small("qwen3moe")


@pytest.fixture(scope="module")
def answer(model: Small) -> list[int]:
    with open_engine(model) as engine:
        return generate(engine, n=N)


@pytest.fixture
def copy(model: Small, tmp_path: Path) -> Small:
    """A copy of the model and its pack, to be damaged."""
    shutil.copy(model.path, tmp_path)
    shutil.copytree(model.pack, tmp_path / "pack")
    tiny = type(model.tiny)(tmp_path / model.path.name, model.tiny.architecture, model.tiny.weights)
    return Small(tiny, tmp_path)


def everybody(model: Small) -> set[Expert]:
    layout = model.layout
    return {(i, e) for i in range(layout.n_moe_layers) for e in range(layout.n_experts)}


def set_limit(engine: Engine, seconds: float) -> None:
    """Short only while reads are held: on a busy machine a good read may take long, too."""
    assert engine.loaded.experts is not None
    engine.loaded.experts._lanes._limit = seconds


def lanes_at_rest(engine: Engine) -> None:
    experts = engine.loaded.experts
    assert experts is not None
    lanes = experts._lanes
    wait_until(lambda: not lanes._reads)


@pytest.mark.parametrize("part", ["read", "window"])
def test_a_read_that_hangs_fails_the_request(model: Small, answer: list[int], part: str) -> None:
    prompt = PROMPT if part == "read" else PROMPT[:1]
    with faulty_engine(model, slots=1, refill="lazy") as (engine, store):
        engine.read_only(OTHER)
        engine.forget()
        store.held = everybody(model)
        set_limit(engine, 0.2)
        with pytest.raises(StoreError, match=r"has not returned for 0\.2 s"):
            generate(engine, prompt)
        record = record_of(engine)
        assert (record.status, record.tokens.generated) == ("failed", 0)
        assert ("first_window" in record.ledger.phases) == (part == "window")
        store.heal()
        lanes_at_rest(engine)
        set_limit(engine, 1000)
        assert generate(engine, n=N) == answer
        check_idle(engine)


@pytest.mark.parametrize("part", ["read", "window"])
def test_a_request_can_be_cancelled_while_a_read_hangs(
    model: Small, answer: list[int], part: str
) -> None:
    prompt = PROMPT if part == "read" else PROMPT[:1]
    with faulty_engine(model, slots=1, refill="lazy", read_limit=1000) as (engine, store):
        engine.read_only(OTHER)
        engine.forget()
        store.held = everybody(model)
        cancel = threading.Event()
        with ThreadPoolExecutor(1) as other:
            other.submit(lambda: (store.waiting.acquire(), cancel.set()))
            with pytest.raises(Cancelled):
                list(engine.generate(prompt, sampling=GREEDY, max_tokens=N, cancel=cancel))
        assert record_of(engine).status == "cancelled"
        store.heal()
        assert generate(engine, n=N) == answer
        check_idle(engine)


def test_an_engine_whose_disk_hangs_can_be_closed(model: Small) -> None:
    with faulty_engine(model, slots=1) as (engine, store):
        engine.read_only(OTHER)
        engine.forget()
        store.held = everybody(model)
        set_limit(engine, 0.2)
        with pytest.raises(StoreError):
            generate(engine)
        engine.close()
        store.heal()
        lanes_at_rest(engine)  # the lanes that came back late wrote into memory that is still there


def damage(file: Path) -> None:
    """Turns over one byte of every page, so that no expert is right; nothing else tells."""
    stamp = file.stat()
    content = bytearray(file.read_bytes())
    for at in range(5, len(content), 4096):
        content[at] ^= 0xFF
    with file.open("r+b") as opened:
        opened.write(content)
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))


def test_wrong_experts_are_never_computed_with(copy: Small) -> None:
    damage(copy.folder / "pack" / EXPERTS)
    with open_engine(copy, pack=copy.folder / "pack") as engine:
        experts = engine.loaded.experts
        assert experts is not None
        assert (experts.pool.table == -1).all()  # none of them got into a slot at the start
        with pytest.raises(StoreError, match="has CRC-32") as caught:
            generate(engine)
        assert "pack --force" in caught.value.next_step
        assert record_of(engine).tokens.generated == 0
        check_idle(engine)


def test_a_pack_damaged_while_it_is_open_is_noticed(copy: Small) -> None:
    """The experts in slots stay right; the next one from the file is compared again."""
    file = copy.folder / "pack" / EXPERTS
    with open_engine(copy, slots=1, pack=copy.folder / "pack") as engine:
        engine.read_only(OTHER)
        engine.logits(PROMPT)
        content = bytes(byte ^ 0xFF for byte in file.read_bytes())
        with file.open("r+b") as opened:
            opened.write(content)
        with pytest.raises(StoreError, match="has CRC-32"):
            generate(engine)
        check_idle(engine)


@pytest.mark.parametrize("how", ["replaced", "deleted"])
def test_a_pack_replaced_or_deleted_while_it_is_open(
    copy: Small, answer: list[int], how: str
) -> None:
    folder = copy.folder / "pack"
    with open_engine(copy, slots=1, pack=folder) as engine:
        if how == "replaced":
            size = (folder / EXPERTS).stat().st_size
            (folder / "other").write_bytes(bytes(size))
            (folder / "other").replace(folder / EXPERTS)
        else:
            shutil.rmtree(folder)
        engine.read_only(OTHER)
        engine.forget()
        assert generate(engine, n=N) == answer
        record = record_of(engine)
        assert (record.prefill_experts.bytes or 0) > 0


def test_a_model_replaced_while_it_is_open(copy: Small, answer: list[int]) -> None:
    with open_engine(copy, slots=1, pack=copy.folder / "none") as engine:
        (copy.folder / "other").write_bytes(b"GGUF, another one")
        (copy.folder / "other").replace(copy.path)
        engine.read_only(OTHER)
        engine.forget()
        assert generate(engine, n=N) == answer


def test_a_model_written_to_while_it_is_open(copy: Small) -> None:
    with open_engine(copy, slots=1, pack=copy.folder / "none") as engine:
        with copy.path.open("r+b") as file:
            file.seek(copy.path.stat().st_size - 1)
            file.write(b"\0")
        with pytest.raises(StoreError, match="was changed while it was in use"):
            engine.read_only(OTHER)
        check_idle(engine)


def test_two_engines_on_one_pack_at_once(copy: Small, answer: list[int]) -> None:
    def talk() -> list[list[int]]:
        with open_engine(copy, slots=1, pack=copy.folder / "pack") as engine:
            answers = []
            for _ in range(3):
                engine.read_only(OTHER)
                engine.forget()
                answers.append(generate(engine, n=N))
            return answers

    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(talk) for _ in range(2)]
        assert [engine.result() for engine in both] == [[answer] * 3] * 2
