"""Parked blocks by themselves: found by their longest beginning, within their budgets, always."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from slotwise.engine.parking import BLOCK, Block, Parking, common

ROW = 8
BLOCK_BYTES = BLOCK * ROW


@contextmanager
def parking(tmp_path: Path, *, memory: int, disk: int) -> Iterator[Parking]:
    """Budgets are in blocks."""
    made = Parking(
        memory=memory * BLOCK_BYTES,
        disk=disk * BLOCK_BYTES,
        folder=tmp_path,
        block_bytes=BLOCK_BYTES,
    )
    with closing(made):
        yield made


def row_of(tokens: list[int]) -> np.ndarray:
    """The rows that `tokens` leave: each depends on all before it, as a real one does."""
    rows = [hash(tuple(tokens[: n + 1])) for n in range(len(tokens))]
    return np.array(rows, np.int64).view(np.uint8)


def park(places: Parking, tokens: list[int]) -> None:
    for start in places.missing(tokens):
        end = min(start + BLOCK, len(tokens))
        places.add(tokens, start, row_of(tokens[:end])[start * ROW :])
    while places.over:
        places.trim()


def check(places: Parking) -> None:
    blocks = list(places._recent)
    in_memory = [b for b in blocks if b.rows is not None]
    on_disk = [b for b in blocks if b.place is not None]
    assert len(in_memory) + len(on_disk) == len(blocks)
    assert in_memory == list(places._in_memory)
    assert places.memory_used == sum(b.nbytes for b in in_memory) <= places.memory_limit
    assert places.disk_used == sum(b.nbytes for b in on_disk) <= places.file_bytes
    assert len({b.place for b in on_disk}) == len(on_disk)
    reached, order = [places._root], {block: n for n, block in enumerate(blocks)}
    for block in reached:
        reached.extend(block.after)
        assert all(a.key < b.key and not b.key.startswith(a.key) for a, b in pairwise(block.after))
        assert all(after.before is block for after in block.after)
        assert block is places._root or all(order[after] < order[block] for after in block.after)
    assert set(reached[1:]) == set(blocks)


def held(places: Parking, tokens: list[int]) -> int:
    """How much is known of `tokens`; it comes back as it was parked."""
    chain, n = places.find(tokens)
    places.touch([block for block, _ in chain])
    parts = [places.rows(block)[0][: count * ROW] for block, count in chain]
    if parts:
        np.testing.assert_array_equal(np.concatenate(parts), row_of(tokens[:n]))
    return n


@pytest.mark.parametrize(("memory", "disk"), [(4, 0), (0, 5), (3, 4), (40, 40)])
def test_any_order_of_conversations_keeps_the_books_and_the_rows(
    memory: int, disk: int, tmp_path: Path
) -> None:
    dice = random.Random(memory * 100 + disk)
    with parking(tmp_path, memory=memory, disk=disk) as places:
        known: list[list[int]] = [[]]
        best = 0
        for _ in range(300):
            begun = dice.choice(known)
            begun = begun[: dice.choice([len(begun), dice.randrange(len(begun) + 1)])]
            more = [dice.choice([0, 1, 255, 256, 49_000]) for _ in range(dice.randrange(1, 150))]
            tokens = [*begun, *more][:400]
            known = [*known[-12:], tokens]
            park(places, tokens)
            check(places)
            best = max(best, held(places, tokens), held(places, dice.choice(known)))
            check(places)
            assert places.file_bytes <= disk * BLOCK_BYTES
        assert best > BLOCK
        assert places.forgotten_blocks > 0 or memory == 40


def test_the_longest_beginning_is_found_among_many(tmp_path: Path) -> None:
    dice = random.Random(3)
    with parking(tmp_path, memory=500, disk=0) as places:
        parked = [[dice.randrange(3) for _ in range(dice.randrange(3, 40))] for _ in range(300)]
        for tokens in parked:
            park(places, tokens)
        for _ in range(300):
            asked = [dice.randrange(3) for _ in range(20)]
            assert held(places, asked) == max(common(asked, tokens) for tokens in parked)


def test_finding_does_not_look_at_every_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with parking(tmp_path, memory=3000, disk=0) as places:
        for n in range(2000):
            park(places, [7, n, 7])
        asked: list[bytes] = []
        key = "slotwise.engine.parking._key"

        def counted(block: Block) -> bytes:
            asked.append(block.key)
            return block.key

        monkeypatch.setattr(key, counted)
        assert places.find([7, 1000, 8])[1] == 2
        assert 0 < len(asked) < 20


def test_short_blocks_do_not_make_the_file_larger_than_its_budget(tmp_path: Path) -> None:
    """Each takes a place for a whole one."""
    with parking(tmp_path, memory=0, disk=8) as places:
        for n in range(100):
            park(places, [n, n + 1])
        assert places.file_bytes == 8 * BLOCK_BYTES
        assert places.disk_used == 8 * 2 * ROW
        check(places)


def test_a_disk_that_is_full_before_its_budget_is_used(tmp_path: Path) -> None:
    with parking(tmp_path, memory=0, disk=50) as places:
        file, room = places._file, iter(range(3))
        assert file is not None
        write = file.write

        def filling(rows: np.ndarray) -> int:
            if next(room, None) is None:
                raise OSError(28, "No space left on device")
            return write(rows)

        file.write = filling  # type: ignore[method-assign]
        for n in range(4):
            park(places, [n] * BLOCK)
        file.write = write  # type: ignore[method-assign]
        for n in range(4, 20):
            park(places, [n] * BLOCK)
            check(places)
        assert places.file_bytes == 3 * BLOCK_BYTES
        assert places.blocks == 3


def test_a_conversation_of_many_blocks_is_forgotten_whole(tmp_path: Path) -> None:
    with parking(tmp_path, memory=5000, disk=0) as places:
        block = places._root
        for _ in range(3000):
            block.after.append(Block(b"\0\0\0\5" * BLOCK, block, np.zeros(BLOCK_BYTES, np.uint8)))
            block = block.after[0]
            places._recent[block] = places._in_memory[block] = None
            places._recent.move_to_end(block, last=False)
            places._in_memory.move_to_end(block, last=False)
            places.memory_used += block.nbytes
        check(places)
        places._forget(places._root.after[0])
        assert (places.blocks, places.memory_used, places.forgotten_blocks) == (0, 0, 3000)


@pytest.fixture
def traced() -> Iterator[Callable[[], int]]:
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_a_block_on_disk_takes_less_than_a_kib_of_memory(
    tmp_path: Path, traced: Callable[[], int]
) -> None:
    with parking(tmp_path, memory=0, disk=2000) as places:
        before = traced()
        for n in range(2000):
            park(places, [1_000_000 + n * BLOCK + i for i in range(BLOCK)])
        assert places.blocks == 2000
        assert 100 < (traced() - before) / places.blocks < 1024
