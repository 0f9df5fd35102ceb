"""The order of a ladder's samples: sizes at random, arms interleaved so that drift hits all alike.

Arms that are switched on by the request alternate within every size: A B, then B A. Arms that are
processes of their own alternate in blocks: all of A, all of B, all of B, all of A. Each start
begins with a round of its own, the cold one, in which every size comes once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, kw_only=True)
class Step:
    """One sample to take. `arm` is an index; round 0 is cold."""

    arm: int
    start: int
    round: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Block:
    """Steps between two starts. `arm` is None where all arms share what is running."""

    arm: int | None
    steps: tuple[Step, ...]


def schedule(
    *, arms: int, sizes: Sequence[int], samples: int, seed: int, starts: int, processes: bool
) -> list[Block]:
    """All blocks in order. With `processes` each block is one start of one arm."""
    order = Random(seed)
    if not processes:
        rounds = range(samples + 1)
        steps = [s for r in rounds for s in _interleaved(arms, sizes, r, order)]
        return [Block(arm=None, steps=tuple(steps))]
    blocks = []
    for start, rounds in enumerate(_shares(samples, starts)):
        names = range(arms) if start % 2 == 0 else reversed(range(arms))
        ladder = [(r, size) for r in (0, *rounds) for size in _shuffled(sizes, order)]
        for arm in names:
            steps = [Step(arm=arm, start=start, round=r, size=size) for r, size in ladder]
            blocks.append(Block(arm=arm, steps=tuple(steps)))
    return blocks


def _interleaved(arms: int, sizes: Sequence[int], number: int, order: Random) -> Iterator[Step]:
    for size in _shuffled(sizes, order):
        names = range(arms) if number % 2 == 0 else reversed(range(arms))
        for arm in names:
            yield Step(arm=arm, start=0, round=number, size=size)


def _shares(samples: int, starts: int) -> Iterator[range]:
    """Rounds 1 to `samples` in `starts` shares that differ by at most one."""
    begin = 1
    for k in range(min(starts, samples)):
        end = 1 + (k + 1) * samples // min(starts, samples)
        yield range(begin, end)
        begin = end


def _shuffled(sizes: Sequence[int], order: Random) -> list[int]:
    shuffled = list(sizes)
    order.shuffle(shuffled)
    return shuffled
