"""One engine through a long life: answers, cancels, failures, loans and refills in any order.

After each of them the books balance, and every answer is the one that an engine gives which has
all experts and has never done anything else.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress

import pytest
from engine.rig import (
    GREEDY,
    Small,
    check_idle,
    faulty_engine,
    generate,
    open_engine,
    record_of,
)
from engine.test_generate import SetAfter
from experts.faulty_store import FaultyStore
from reference.tiny import random_tokens

from slotwise.engine.engine import Engine
from slotwise.engine.prompt import Cancelled
from slotwise.errors import StoreError

N = 5
BEGINNINGS = [random_tokens(size, seed=seed) for seed, size in enumerate((1, 7, 12, 30))]


class Life:
    """Draws what happens next; knows what every prompt's answer must be."""

    def __init__(self, engine: Engine, store: FaultyStore, fresh: Engine, seed: int) -> None:
        self.engine, self.store, self.fresh = engine, store, fresh
        self.random = random.Random(seed)
        self.answers: dict[tuple[int, ...], list[int]] = {}
        self.conversations = [list(beginning) for beginning in BEGINNINGS]
        self.answered = 0

    def answer(self, prompt: list[int]) -> list[int]:
        key = tuple(prompt)
        if key not in self.answers:
            self.fresh.loaded.state.reuse([-1])
            self.answers[key] = generate(self.fresh, prompt, N)
        return self.answers[key]

    def step(self) -> None:
        chosen = self.random.choice(
            [self.talk, self.talk, self.talk, self.cancel, self.leave, self.fail, self.lend]
        )
        chosen()
        check_idle(self.engine)

    def prompt(self) -> list[int]:
        return self.random.choice(self.conversations)

    def talk(self) -> None:
        """Answers a conversation, which goes on from there or begins anew."""
        prompt = self.prompt()
        found = generate(self.engine, prompt, N)
        assert found == self.answer(prompt), record_of(self.engine).tokens
        assert record_of(self.engine).status == "done"
        self.answered += 1
        prompt += found[: self.random.randrange(N + 1)]
        prompt += random_tokens(self.random.randrange(1, 12), seed=self.random.randrange(9))
        if len(prompt) > 120:
            del prompt[self.random.randrange(1, 20) :]

    def cancel(self) -> None:
        with suppress(Cancelled):
            generate(self.engine, self.prompt(), N, cancel=SetAfter(self.random.randrange(30)))

    def leave(self) -> None:
        steps = self.engine.generate(self.prompt(), sampling=GREEDY, max_tokens=N)
        for _ in range(self.random.randrange(N)):
            next(steps)
        steps.close()  # type: ignore[attr-defined]

    def fail(self) -> None:
        layout = self.engine.loaded.blueprint.layout
        assert layout is not None
        layer = self.random.randrange(layout.n_moe_layers)
        self.store.io_error = {
            (layer, e) for e in range(layout.n_experts) if self.random.random() < 0.5
        }
        with suppress(StoreError):
            assert generate(self.engine, prompt := self.prompt(), N) == self.answer(prompt)
        self.store.heal()

    def lend(self) -> None:
        experts = self.engine.loaded.experts
        assert experts is not None
        experts.give_back(experts.lend(self.random.randrange(1, experts.lendable_bytes())))
        if self.random.random() < 0.5:
            experts.refill()


@pytest.mark.parametrize(
    ("kind", "slots", "refill", "policy"),
    [
        ("gpt-oss", 20, "deferred", "lfu"),
        ("qwen2moe", 1, "blocking", "lru"),
        ("qwen3moe-mixed", 7, "deferred", "lru"),
    ],
)
def test_a_long_life(
    small: Callable[[str], Small], kind: str, slots: int, refill: str, policy: str
) -> None:
    with (
        open_engine(small(kind)) as fresh,
        faulty_engine(small(kind), slots=slots, refill=refill, policy=policy) as (engine, store),
    ):
        life = Life(engine, store, fresh, seed=slots)
        for _ in range(20):
            life.step()
        assert life.answered > 3


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(10))
def test_many_long_lives(small: Callable[[str], Small], seed: int) -> None:
    draw = random.Random(seed)
    model = small(draw.choice(["gpt-oss", "qwen2moe", "qwen3moe", "qwen3moe-mixed"]))
    settings = {
        "slots": draw.choice([1, 10, 20, 60]),
        "refill": draw.choice(["deferred", "blocking", "lazy"]),
        "policy": draw.choice(["lfu", "lru"]),
        "io_lanes": draw.choice([1, 2, 8]),
        "chunk": draw.choice([1, 8, 50]),
    }
    with open_engine(model) as fresh, faulty_engine(model, **settings) as (engine, store):
        life = Life(engine, store, fresh, seed=seed)
        for _ in range(60):
            life.step()
