"""Conversations that come back: the same bits, by every way their rows can have taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine.rig import OTHER, PROMPT, Small, check_idle, generate, open_engine, record_of, settings
from engine.rig import window_logits as logits_of
from reference.tiny import random_tokens

from slotwise.engine.conversations import ParkSettings
from slotwise.engine.engine import Engine
from slotwise.engine.parking import BLOCK
from slotwise.engine.request import Extras
from slotwise.trace.record import Conversation

LONG = random_tokens(2 * BLOCK + 9, seed=5)
OTHERS = [random_tokens(BLOCK + 20 + n, seed=10 + n) for n in range(3)]
PLENTY = 1 << 24


def engine_with(small: Small, *, exact: bool = True, **park: Any) -> Engine:
    """One whose bits do not depend on how many tokens were read at once."""
    return open_engine(small, park=ParkSettings(**park), exact=exact, context=512)


def tidied(engine: Engine) -> None:
    while engine.conversations.tidy(lambda: False):
        pass


def found(engine: Engine) -> Conversation:
    conversation = record_of(engine).conversation
    assert conversation is not None
    return conversation


@pytest.mark.parametrize(
    ("memory", "disk"), [(PLENTY, 0), (0, PLENTY), (3 << 14, PLENTY)], ids=["ram", "disk", "both"]
)
@pytest.mark.parametrize("kind", ["qwen3moe-mixed", "gpt-oss", "llama"])
def test_an_answer_from_parked_rows_is_the_answer_read_from_nothing(
    kind: str, memory: int, disk: int, small: Callable[[str], Small]
) -> None:
    with engine_with(small(kind), memory=memory, disk=disk) as engine:
        first = generate(engine, LONG, 6)
        tidied(engine)
        for other in OTHERS:
            generate(engine, other, 2)
            tidied(engine)
        prompt = [*LONG, *first, *PROMPT]
        tokens, logits = logits_of(engine, prompt)
        conversation = found(engine)
        # The state holds no row for the answer's last token: it was never read.
        assert conversation.reused == conversation.parked == len(LONG) + len(first) - 1
        assert conversation.restored_bytes > 0
        assert bool(disk) == bool(conversation.restored_disk_bytes) or memory
        assert list(record_of(engine).ledger.phases)[:2] == ["lookup", "restore"]
        check_idle(engine)
    with engine_with(small(kind), mode="off") as fresh:
        expected, expected_logits = logits_of(fresh, prompt)
        assert found(fresh) == Conversation(mode="off")
    assert tokens == expected
    np.testing.assert_array_equal(logits, expected_logits)


def test_parked_rows_come_back_bit_for_bit_also_when_reading_is_not_exact(
    small: Callable[[str], Small],
) -> None:
    with engine_with(small("qwen3moe-mixed"), memory=0, disk=PLENTY, exact=False) as engine:
        generate(engine, LONG, 6)
        state = engine.loaded.state
        rows, n = state.copy_out(0, len(state.tokens)), len(state.tokens)
        tidied(engine)
        generate(engine, OTHERS[0], 2)
        tidied(engine)
        list(engine.generate([*LONG, 1], max_tokens=1))
        assert found(engine).restored_disk_bytes > 0
        kept = len(LONG) * state.row_bytes
        np.testing.assert_array_equal(state.copy_out(0, len(LONG)), rows[:kept])
        assert n > len(LONG)


def test_shadow_does_the_work_and_throws_it_away(small: Callable[[str], Small]) -> None:
    with engine_with(small("gpt-oss"), mode="shadow", memory=PLENTY) as engine:
        generate(engine, LONG, 4)
        tidied(engine)
        generate(engine, OTHERS[0], 2)
        generate(engine, LONG, 4)
        shadow = found(engine)
    assert shadow.mode == "shadow"
    assert shadow.engaged == 1
    assert shadow.matched == len(LONG) - 1
    assert (shadow.reused, shadow.restored_bytes) == (0, 0)
    assert shadow.checkpoint_tokens == len(OTHERS[0]) + 1  # nobody had tidied up after it
    with engine_with(small("gpt-oss"), mode="off", memory=PLENTY) as engine:
        generate(engine, LONG, 4)
        generate(engine, LONG, 4)
        assert found(engine) == Conversation(mode="off")
        assert engine.conversations.parking.blocks == 0


def test_what_would_be_written_over_is_parked_first_and_named(
    small: Callable[[str], Small],
) -> None:
    with engine_with(small("gpt-oss"), memory=PLENTY) as engine:
        generate(engine, LONG, 1)
        generate(engine, OTHERS[0], 1)
        displaced = found(engine)
        assert displaced.checkpoint_tokens == len(LONG)
        assert displaced.checkpoint_bytes == len(LONG) * engine.loaded.state.row_bytes
        assert "checkpoint" in record_of(engine).ledger.phases
        tidied(engine)
        generate(engine, OTHERS[1], 1)
        idle = found(engine)
        assert (idle.checkpoint_tokens, idle.idle_checkpoint_tokens) == (0, len(OTHERS[0]))
        assert idle.idle_ns > 0
        assert "checkpoint" not in record_of(engine).ledger.phases


def test_tidying_stops_when_somebody_comes(small: Callable[[str], Small]) -> None:
    with engine_with(small("gpt-oss"), memory=PLENTY) as engine:
        generate(engine, LONG, 1)
        answers = iter([False, True])
        assert engine.conversations.tidy(lambda: next(answers))
        assert engine.conversations.parking.blocks == 1
        assert not engine.conversations.tidy(lambda: False)
        assert engine.conversations.parking.blocks == 3


def test_conversations_that_begin_alike_share_their_beginning(
    small: Callable[[str], Small],
) -> None:
    with engine_with(small("gpt-oss"), memory=PLENTY) as engine:
        row, parking = engine.loaded.state.row_bytes, engine.conversations.parking
        for tail in ([1, 2, 3], [4, 5, 6, 7]):
            generate(engine, [*LONG[: 2 * BLOCK], *tail], 1)
            tidied(engine)
        assert parking.memory_used == (2 * BLOCK + 3 + 4) * row
        generate(engine, [*LONG[: 2 * BLOCK], 4, 5, 9], 1)
        assert found(engine).matched == 2 * BLOCK + 2
        generate(engine, [*LONG[: BLOCK + 10], 9, 9], 1)
        assert found(engine).matched == BLOCK + 10


def test_budgets_are_kept_and_the_oldest_are_forgotten(small: Callable[[str], Small]) -> None:
    with engine_with(small("gpt-oss")) as probe:
        block = BLOCK * probe.loaded.state.row_bytes
    with engine_with(small("gpt-oss"), memory=2 * block, disk=2 * block) as engine:
        parking = engine.conversations.parking
        prompts = [random_tokens(BLOCK + 1, seed=40 + n) for n in range(6)]
        for prompt in prompts:
            generate(engine, prompt, 1)
            tidied(engine)
            assert parking.memory_used <= 2 * block
            assert parking.disk_used <= 2 * block
        assert parking.forgotten_blocks > 0
        _books_balance(engine)
        generate(engine, prompts[0], 1)
        assert found(engine).matched == 0
        generate(engine, prompts[4], 1)
        assert found(engine).matched >= BLOCK


def _books_balance(engine: Engine) -> None:
    parking = engine.conversations.parking
    blocks = list(parking._recent)
    assert parking.memory_used == sum(b.nbytes for b in blocks if b.rows is not None)
    assert parking.disk_used == sum(b.nbytes for b in blocks if b.place is not None)
    order = {block: n for n, block in enumerate(blocks)}
    for block in blocks:
        for after in block.after:
            assert order[after] < order[block]


def test_a_disk_that_fails_costs_a_read_and_nothing_else(small: Callable[[str], Small]) -> None:
    with engine_with(small("gpt-oss"), memory=0, disk=PLENTY) as engine:
        first = generate(engine, LONG, 4)
        tidied(engine)
        generate(engine, OTHERS[0], 2)
        tidied(engine)
        file = engine.conversations.parking._file
        assert file is not None
        file._file.truncate(0)
        assert generate(engine, LONG, 4) == first
        assert (found(engine).matched, found(engine).reused) == (len(LONG) - 1, 0)

        def full(_rows: Any) -> int:
            raise OSError(28, "No space left on device")

        file.write = full  # type: ignore[method-assign]
        tidied(engine)
        assert engine.conversations.parking.memory_used == 0
        assert generate(engine, LONG, 4) == first


def test_a_request_that_wants_nothing_reused(small: Callable[[str], Small]) -> None:
    with engine_with(small("gpt-oss"), memory=PLENTY) as engine:
        generate(engine, PROMPT, 2)
        generate(engine, PROMPT, 2, extras=Extras(reuse=False))
        assert record_of(engine).tokens.reused == 0
        assert found(engine).matched == len(PROMPT) - 1
        generate(engine, PROMPT, 2)
        assert record_of(engine).tokens.reused == len(PROMPT) - 1


def test_without_budgets_only_the_state_is_kept(small: Callable[[str], Small]) -> None:
    with engine_with(small("gpt-oss")) as engine:
        generate(engine, PROMPT, 2)
        assert not engine.conversations.tidy(lambda: False)
        generate(engine, OTHER, 2)
        generate(engine, PROMPT, 2)
        assert found(engine).matched == 0
        assert engine.conversations.parking.blocks == 0


def test_the_file_has_no_name(small: Callable[[str], Small], tmp_path: Path) -> None:
    folder = tmp_path / "parked"
    with engine_with(small("gpt-oss"), disk=PLENTY, folder=folder) as engine:
        generate(engine, LONG, 1)
        tidied(engine)
        assert engine.conversations.parking.disk_used > 0
        assert list(folder.iterdir()) == []


def test_settings_are_values() -> None:
    chosen = settings(park=ParkSettings(mode="shadow"))
    assert replace(chosen, chunk=9).park.mode == "shadow"
