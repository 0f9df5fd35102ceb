"""Which conversation a prompt continues, and what the state already holds of it.

The state has room for one conversation. When another one comes, the rows it would write over are
parked first, and rows that were parked for it are put back. A parked row is the row's bytes, so
reuse changes nothing about an answer except who computed its beginning, and when.

`off` reuses nothing. `on` does what is said above. `shadow` does the lookup and parks like `on`,
then throws away what it found: its time differs from `off` by the price of keeping conversations.

A model whose past is keys and values can go on from any position, so a checkpoint is a position:
nothing is saved for its own sake at the turns of a conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from slotwise.engine.parking import BLOCK, Block, Parking, Rows, common
from slotwise.trace.ledger import CLOCK, Ledger
from slotwise.trace.record import Conversation

Mode = Literal["off", "shadow", "on"]


class State(Protocol):
    """What is asked of a conversation's state (`kv.KeyValueState`)."""

    tokens: list[int]

    @property
    def row_bytes(self) -> int: ...
    def copy_out(self, start: int, end: int) -> Rows: ...
    def copy_in(self, start: int, rows: Rows) -> None: ...
    def reuse(self, prompt: Sequence[int]) -> int: ...
    def clear(self) -> None: ...
    def advance(self, tokens: Sequence[int]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class ParkSettings:
    """Budgets in bytes. Without any, only the conversation in the state is kept."""

    mode: Mode = "on"
    memory: int = 0
    disk: int = 0
    folder: Path | None = None
    """Where the file of parked rows lies; None: the system's folder for such files."""


@dataclass
class _Idle:
    """What was parked since the latest request."""

    tokens: int = 0
    nbytes: int = 0
    ns: int = 0


class Conversations:
    """One engine's conversations: one in the state, others parked."""

    def __init__(self, state: State, settings: ParkSettings) -> None:
        self._state = state
        self.mode: Mode = settings.mode
        block_bytes = BLOCK * state.row_bytes
        self._keeps = settings.mode != "off" and settings.memory + settings.disk >= block_bytes
        self.parking = Parking(
            memory=settings.memory,
            disk=settings.disk if self._keeps else 0,
            folder=settings.folder,
            block_bytes=block_bytes,
        )
        self._idle = _Idle()

    def enter(self, prompt: Sequence[int], ledger: Ledger, *, reuse: bool = True) -> Conversation:
        """Makes the state hold what is known of `prompt`, in the phases `lookup`, `checkpoint`
        and `restore`. At least the last token is left to read: its logits are needed."""
        idle, self._idle = self._idle, _Idle()
        if self.mode == "off":
            with ledger.phase("lookup"):
                self._state.clear()
            return Conversation(mode=self.mode)
        with ledger.phase("lookup"):
            known = prompt[:-1]
            live = common(self._state.tokens, known)
            chain, parked = self.parking.find(known) if self._keeps else ([], 0)
            self.parking.touch([block for block, _ in chain])
        saved = self._save_displaced(live, ledger)
        if saved and self._keeps:
            with ledger.phase("lookup"):  # to make room, what was found may have been forgotten
                chain, parked = self.parking.find(known)
        kept = max(live, parked) if reuse and self.mode == "on" else 0
        restored, from_disk = 0, 0
        if kept > live:
            with ledger.phase("restore"):
                restored, from_disk = self._restore(prompt, live, chain)
                ledger.add("restore", bytes=from_disk)
        with ledger.phase("lookup"):
            reused = self._state.reuse(prompt) if kept else 0
            if not kept:
                self._state.clear()
        return Conversation(
            mode=self.mode,
            engaged=1,
            matched=max(live, parked),
            live=live,
            parked=parked,
            reused=reused,
            restored_bytes=restored,
            restored_disk_bytes=from_disk,
            checkpoint_tokens=saved,
            checkpoint_bytes=saved * self._state.row_bytes,
            idle_checkpoint_tokens=idle.tokens,
            idle_checkpoint_bytes=idle.nbytes,
            idle_ns=idle.ns,
        )

    def _save_displaced(self, live: int, ledger: Ledger) -> int:
        """Parks what the state holds beyond the `live` rows; returns how many tokens."""
        tokens = self._state.tokens
        if not self._keeps or live == len(tokens) or not self.parking.missing(tokens):
            return 0
        with ledger.phase("checkpoint"):
            count = self._park(never_hurried)
            while self.parking.over:
                self.parking.trim()
        return count

    def _park(self, hurried: Callable[[], bool]) -> int:
        """Parks the state's rows block by block until `hurried`; returns how many tokens."""
        tokens, count = self._state.tokens, 0
        for start in self.parking.missing(tokens):
            if hurried():
                break
            end = min(start + BLOCK, len(tokens))
            self.parking.add(tokens, start, self._state.copy_out(start, end))
            count += end - start
        return count

    def _restore(
        self, prompt: Sequence[int], live: int, chain: Sequence[tuple[Block, int]]
    ) -> tuple[int, int]:
        """Puts parked rows behind the `live` ones; returns (bytes, those from disk)."""
        state, row = self._state, self._state.row_bytes
        state.reuse([*prompt[:live], -1])
        at, total, from_disk = 0, 0, 0
        for block, n in chain:
            skip = max(0, live - at)
            if skip < n:
                try:
                    rows, disk = self.parking.rows(block)
                except OSError:  # the rest is read again
                    break
                part = rows[skip * row : n * row]
                state.copy_in(at + skip, part)
                state.advance(prompt[at + skip : at + n])
                total += part.nbytes
                from_disk += part.nbytes if disk else 0
            at += n
        return total, from_disk

    def tidy(self, hurried: Callable[[], bool]) -> bool:
        """Between requests: parks the state's new rows and keeps the budgets, until `hurried`.
        Returns whether something is left to do."""
        if not self._keeps:
            return False
        begun = CLOCK()
        count = self._park(hurried)
        while self.parking.over and not hurried():
            self.parking.trim()
        self._idle.tokens += count
        self._idle.nbytes += count * self._state.row_bytes
        self._idle.ns += CLOCK() - begun
        return self.parking.over or bool(self.parking.missing(self._state.tokens))

    def close(self) -> None:
        self.parking.close()


def never_hurried() -> bool:
    return False
