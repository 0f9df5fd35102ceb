"""Look-ahead: experts that the next layer's router names before its turn has come.

While the experts of one layer compute, those that the next layer will probably want are read. The
guess (foresight.py) is the next layer's own router, applied to what this layer's router sees. A
wrong guess costs a read and never changes a result. In decode lanes take these reads only when no
demand is queued or in flight. A prompt read wants most experts of the next layer anyway, so every
lane that finds no demand queued goes on with them. A read that the layer then really wants is
adopted by its demand, one that no lane has begun by then is called off.

`LookAhead` keeps the books of such reads, for one layer at a time; `Switch` finds out whether they
pay in decode. All methods of `LookAhead` expect the lock of the I/O lanes to be held.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from slotwise.errors import UsageError
from slotwise.experts.iolanes import IoLanes, Read, ReadState
from slotwise.experts.stats import AheadStats

LookAheadMode = Literal["auto", "on", "off"]
LOOKAHEAD_MODES: tuple[str, ...] = get_args(LookAheadMode)

BEFORE_FIRST_TRIAL, BETWEEN_TRIALS = 64, 512
"""Windows without a trial: at first, and after each one."""
EPOCH = 12
TRIAL = (True, False, False, True)
"""Epochs of a trial, with and without, so that a steady drift favours neither."""
MARGIN = 0.02
"""By how much the other way must be faster before it is taken."""


class LookAhead:
    """Reads for the layer to come."""

    def __init__(self, lanes: IoLanes, stats: AheadStats) -> None:
        self._lanes, self._pool = lanes, lanes.pool
        self.stats = stats
        """Of the stage that the reads are made for."""
        self.reads: list[Read] = []

    def foresee(self, moe_index: int, experts: Iterable[int]) -> None:
        """Reads those of `experts`, the likeliest first, that are neither resident nor underway, in
        place of the coldest. Who must not be put out is pinned by the caller."""
        pool, region = self._pool, self._pool.region(moe_index)
        for expert in experts:
            if pool.table[moe_index, expert] >= 0 or self._lanes.underway(moe_index, expert):
                continue
            pool.make_room(region, 1)
            slot = pool.reserve(moe_index, expert)
            if slot is None:
                return
            self.stats.predicted += 1
            self.reads.append(self._lanes.look_ahead(moe_index, expert, slot))

    def arrive(self, moe_index: int, routed: list[int], *, purpose: str) -> None:
        """The router has chosen: what was guessed right is left to the demand, what nobody has
        begun and nobody wants is called off."""
        for read in self.reads:
            wanted = read.moe_index == moe_index and read.expert in routed
            if read.state is ReadState.QUEUED:
                self.stats.called_off += 1
                if wanted:
                    self._lanes.hurry(read, purpose=purpose)
                else:
                    self._lanes.cancel(read)
            elif wanted:
                self.stats.used += 1
                self.stats.late += read.state is not ReadState.DONE
            else:
                self.stats.wasted += 1
        self.reads.clear()

    def drop(self) -> None:
        """Nobody will ask for what was foreseen."""
        self.arrive(-1, [], purpose="decode")


class Switch:
    """Whether to look ahead in the next window. `auto` tries both ways now and then, by the
    windows' own time: what was read in vain, and what it took from computing, are in it."""

    def __init__(self, mode: str) -> None:
        if mode not in LOOKAHEAD_MODES:
            known = ", ".join(LOOKAHEAD_MODES)
            raise UsageError(f"there is no look-ahead {mode!r}", next_step=f"Use one of: {known}.")
        self.mode = mode
        self.on = mode != "off"
        self.trials = 0
        self._chosen = self.on
        self._left = BEFORE_FIRST_TRIAL
        self._trial: list[int] = []

    def window(self, ns: int) -> None:
        """One window took so long."""
        if self.mode != "auto":
            return
        if self._left:
            self._left -= 1
            if self._left:
                return
        else:
            self._trial.append(ns)
            if len(self._trial) == EPOCH * len(TRIAL):
                self._decide()
                return
        self.on = TRIAL[len(self._trial) // EPOCH]

    def _decide(self) -> None:
        took = {True: 0, False: 0}
        for i, on in enumerate(TRIAL):
            # The middle half of an epoch: one slow window says nothing.
            middle = sorted(self._trial[i * EPOCH : (i + 1) * EPOCH])[EPOCH // 4 : -EPOCH // 4]
            took[on] += sum(middle)
        if took[not self._chosen] < took[self._chosen] * (1 - MARGIN):
            self._chosen = not self._chosen
        self.on, self._left = self._chosen, BETWEEN_TRIALS
        self.trials += 1
        self._trial.clear()
