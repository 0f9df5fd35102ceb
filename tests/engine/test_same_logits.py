"""The logits are the same bit for bit, whatever was resident, whatever the settings.

A grid of settings in which every pair of values occurs, and in each of its rows a sequence of
requests that find the pool in another state each time. Chunk size is the one setting that may
change rounding.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from engine.rig import (
    CHUNK,
    GREEDY,
    OTHER,
    PROMPT,
    Small,
    check_idle,
    faulty_engine,
    generate,
    open_engine,
    record_of,
    window_logits,
)

from slotwise.engine.engine import Engine
from slotwise.errors import Refused
from slotwise.experts.pool import experts_per_class

FACTORS: dict[str, tuple[Any, ...]] = {
    "slots": ("all", "half", "few"),
    "policy": ("two-rate", "lfu", "lru"),
    "profile": ("none", "skewed", "reversed"),
    "refill": ("deferred", "blocking", "lazy"),
    "lookahead": ("off", "on"),
    "io_lanes": (1, 4),
    "store": ("gguf", "pack"),
}
BASE = {name: values[0] for name, values in FACTORS.items()} | {"io_lanes": 4}
MODELS = ("qwen3moe", "qwen3moe-mixed", "qwen3moe-q4_1", "gpt-oss", "qwen2moe")


def pairs(row: dict[str, Any]) -> set[tuple[Any, ...]]:
    return set(combinations(row.items(), 2))


def covering_rows() -> list[dict[str, Any]]:
    """Few rows in which each pair of values of two factors occurs: the best next one, greedily."""
    every = [dict(zip(FACTORS, values, strict=True)) for values in product(*FACTORS.values())]
    missing = set().union(*(pairs(row) for row in every))
    rows = []
    while missing:
        rows.append(max(every, key=lambda row: len(pairs(row) & missing)))
        missing -= pairs(rows[-1])
    return rows


ROWS = covering_rows()


def open_row(small: Small, row: dict[str, Any], **chosen: Any) -> Engine:
    experts = max(experts_per_class(small.layout))
    return open_engine(
        small,
        slots={"all": 2 * experts, "half": experts // 2, "few": 1}[row["slots"]],
        policy=row["policy"],
        profile=small.profiles[row["profile"]],
        refill=row["refill"],
        lookahead=row["lookahead"],
        io_lanes=row["io_lanes"],
        pack=small.pack if row["store"] == "pack" else small.folder / "no-pack",
        **chosen,
    )


@dataclass(frozen=True)
class Answers:
    """What an engine says of PROMPT, read in three ways."""

    chunks: np.ndarray
    one_by_one: np.ndarray
    windows: np.ndarray
    tokens: list[int]


@pytest.fixture(scope="module")
def expected(small: Callable[[str], Small]) -> Callable[[str], Answers]:
    """By an engine with everything resident, each way from a fresh start."""
    known: dict[str, Answers] = {}

    def get(kind: str) -> Answers:
        if kind not in known:
            with open_row(small(kind), BASE) as engine:
                chunks = engine.logits(PROMPT)
            with open_row(small(kind), BASE) as engine:
                one_by_one = engine.logits(PROMPT, one_by_one=True)
            with open_row(small(kind), BASE) as engine:
                tokens, windows = window_logits(engine)
            known[kind] = Answers(chunks, one_by_one, windows, tokens)
        return known[kind]

    return get


def test_the_grid_has_every_pair() -> None:
    assert len(ROWS) <= 20
    for one, two in combinations(FACTORS, 2):
        seen = {(row[one], row[two]) for row in ROWS}
        assert seen == set(product(FACTORS[one], FACTORS[two]))


def check_answer(engine: Engine, expected: Answers) -> None:
    tokens, windows = window_logits(engine)
    np.testing.assert_array_equal(windows, expected.windows)
    assert tokens == expected.tokens
    check_idle(engine)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("row", ROWS, ids=["-".join(map(str, r.values())) for r in ROWS])
def test_logits_do_not_depend_on_settings_or_residency(
    kind: str,
    row: dict[str, Any],
    small: Callable[[str], Small],
    expected: Callable[[str], Answers],
) -> None:
    answers = expected(kind)
    with open_row(small(kind), row) as engine:
        np.testing.assert_array_equal(engine.logits(PROMPT), answers.chunks)  # fresh
        check_idle(engine)
        engine.read_only(OTHER)  # another prompt, whose loan has just ended
        one_by_one = engine.logits(PROMPT, one_by_one=True)
        np.testing.assert_array_equal(one_by_one, answers.one_by_one)
        check_answer(engine, answers)  # after it, a deferred refill is under way
        np.testing.assert_array_equal(engine.logits(PROMPT), answers.chunks)
        check_idle(engine)


@pytest.mark.parametrize("kind", MODELS)
def test_nor_do_they_when_long_products_go_to_the_blas(
    kind: str, small: Callable[[str], Small]
) -> None:
    """One chunk with experts of one row (ggml's product) and of many."""
    with open_row(small(kind), BASE, gemm_rows=2, chunk=len(PROMPT)) as engine:
        expected = engine.logits(PROMPT)
    with open_row(small(kind), BASE, exact=True, chunk=len(PROMPT)) as engine:
        assert not np.array_equal(engine.logits(PROMPT), expected), "the BLAS was not used"
    for row in ROWS[1::3]:
        with open_row(small(kind), row, gemm_rows=2, chunk=len(PROMPT)) as engine:
            np.testing.assert_array_equal(engine.logits(PROMPT), expected)
            engine.read_only(OTHER)
            np.testing.assert_array_equal(engine.logits(PROMPT), expected)
            check_idle(engine)


@pytest.mark.parametrize("kind", MODELS)
def test_the_smallest_budget_that_is_not_refused(
    kind: str, small: Callable[[str], Small], expected: Callable[[str], Answers]
) -> None:
    with open_engine(small(kind)) as engine:
        least = engine.loaded.plan.minimum
    with pytest.raises(Refused, match="memory budget"):
        open_engine(small(kind), memory=least - 1)
    with open_engine(small(kind), memory=least) as engine:
        assert engine.loaded.plan.total <= least
        np.testing.assert_array_equal(engine.logits(PROMPT), expected(kind).chunks)
        check_answer(engine, expected(kind))


def test_while_a_refill_is_stuck_in_the_middle(
    small: Callable[[str], Small], expected: Callable[[str], Answers]
) -> None:
    """A refill read is held until the next request, which wants a loan, is under way."""
    model = small("gpt-oss")
    total = model.layout.n_total
    with faulty_engine(model, slots=total) as (engine, store):
        engine.read_only(OTHER)
        experts = engine.loaded.experts
        assert experts is not None
        gone = np.argwhere(experts.pool.table < 0)
        assert len(gone), "the loan cost nothing, so there is nothing to refill"
        store.held = {(int(layer), int(expert)) for layer, expert in gone}
        experts.refill()
        store.waiting.acquire()
        assert experts.refill_state().active
        timer = threading.Timer(0.05, store.release)
        timer.start()
        np.testing.assert_array_equal(engine.logits(PROMPT), expected("gpt-oss").chunks)
        timer.join()
        check_answer(engine, expected("gpt-oss"))


def test_while_a_loan_of_nearly_everything_has_just_ended(
    small: Callable[[str], Small], expected: Callable[[str], Answers]
) -> None:
    with open_engine(small("qwen2moe")) as engine:
        experts = engine.loaded.experts
        assert experts is not None
        loan = experts.lend(experts.lendable_bytes())
        assert engine.loaded.arena is not None
        for offset, nbytes in loan.extents:
            engine.loaded.arena.view(offset, nbytes)[:] = b"\xff" * nbytes  # NaN everywhere
        experts.give_back(loan)
        np.testing.assert_array_equal(
            engine.logits(PROMPT, one_by_one=True), expected("qwen2moe").one_by_one
        )
        np.testing.assert_array_equal(engine.logits(PROMPT), expected("qwen2moe").chunks)


def test_the_rows_of_the_grid_really_differ(small: Callable[[str], Small]) -> None:
    """Few slots must cost reads, and all of them none, or the grid would prove nothing."""
    with open_row(small("gpt-oss"), {**BASE, "slots": "few"}) as engine:
        generate(engine)
        record = record_of(engine)
        assert record.prefill_experts.misses
        assert record.decode_experts.misses
    with open_row(small("gpt-oss"), BASE) as engine:
        generate(engine)
        record = record_of(engine)
        assert record.loan is not None
        assert (record.prefill_experts.misses, record.decode_experts.misses) == (0, 0)
    with open_row(small("qwen3moe-mixed"), BASE) as engine:
        assert len(engine.loaded.blueprint.layout.classes) == 3  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["qwen3moe", "gpt-oss", "qwen2moe", "mixtral", "llama"])
@pytest.mark.parametrize("kv_type", ["f32", "f16"])
def test_chunk_size_changes_rounding_only(
    kind: str, kv_type: str, small: Callable[[str], Small]
) -> None:
    with open_engine(small(kind), kv_type=kv_type, chunk=len(PROMPT)) as engine:
        whole = engine.logits(PROMPT)
        for chunk in (1, 2, 5, 13):
            found = engine.logits(PROMPT, chunk=chunk)
            np.testing.assert_allclose(found, whole, rtol=0, atol=1e-4)
        found = engine.logits(PROMPT, one_by_one=True)
        np.testing.assert_allclose(found, whole, rtol=0, atol=1e-4)
        assert found.dtype == np.float32
        assert found.shape == (len(PROMPT), engine.loaded.blueprint.architecture.hyper.n_vocab)
        assert np.ptp(whole) > 1, "logits that hardly differ prove nothing"


def test_reading_alone_or_with_another_chunk_size_leaves_the_same_state(
    small: Callable[[str], Small], expected: Callable[[str], Answers]
) -> None:
    """The chunk of the settings, not of an earlier call, is what a request reads with."""
    with open_engine(small("qwen3moe")) as engine:
        engine.logits(PROMPT, chunk=CHUNK - 1)
        check_answer(engine, expected("qwen3moe"))


def test_seeded_sampling_is_the_same_answer(small: Callable[[str], Small]) -> None:
    sampling = type(GREEDY)(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=7)
    answers = []
    for slots in ("all", "few"):
        with open_row(small("gpt-oss"), {**BASE, "slots": slots}) as engine:
            answers.append(generate(engine, n=20, sampling=sampling))
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 3
