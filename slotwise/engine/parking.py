"""Where the rows of conversations that are not being answered wait: in RAM, then in a file.

A parked conversation is a chain of blocks of up to `BLOCK` tokens, and conversations that begin
alike share the beginning of their chains. Blocks are forgotten the least recently used first; a
block is never forgotten before those that continue it.

Knows bytes and tokens, nothing of layers. For one thread, the engine's.
"""

from __future__ import annotations

import os
import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

BLOCK = 64
Tokens = tuple[int, ...]
Rows = np.ndarray
"""uint8 [tokens * bytes of a position]"""


class Block:
    """Some tokens that follow those of `before`, and the rows they left."""

    __slots__ = ("after", "before", "nbytes", "place", "rows", "tokens")

    def __init__(self, tokens: Tokens, before: Block | None, rows: Rows | None) -> None:
        self.tokens, self.before, self.rows = tokens, before, rows
        self.nbytes = 0 if rows is None else rows.nbytes
        self.place: int | None = None
        """In the file; `rows` is None then."""
        self.after: dict[Tokens, Block] = {}

    def longest(self, tokens: Tokens) -> tuple[Block | None, int]:
        """The block after this one that begins most like `tokens`, and how far it does."""
        if (exact := self.after.get(tokens)) is not None:
            return exact, len(tokens)
        best, most = None, 0
        for block in self.after.values():
            n = common(block.tokens, tokens)
            if n > most:
                best, most = block, n
        return best, most


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with."""
    limit = min(len(a), len(b))
    return next((i for i in range(limit) if a[i] != b[i]), limit)


class Parking:
    """Blocks of rows, up to a budget of RAM and another of disk."""

    def __init__(self, *, memory: int, disk: int, folder: Path | None, block_bytes: int) -> None:
        self.memory_limit, self.disk_limit = memory, disk
        self.memory_used = self.disk_used = 0
        self.forgotten_blocks = 0
        self._root = Block((), None, None)
        self._recent: OrderedDict[Block, None] = OrderedDict()
        """Least recently used first; a block always comes before the one it follows."""
        self._file = ParkFile(folder, block_bytes) if disk >= block_bytes else None

    def find(self, tokens: Sequence[int]) -> tuple[list[tuple[Block, int]], int]:
        """The chain of (block, tokens of it) that `tokens` begin with, and their number."""
        chain: list[tuple[Block, int]] = []
        at, block = 0, self._root
        while at < len(tokens):
            found, n = block.longest(tuple(tokens[at : at + BLOCK]))
            if found is None:
                break
            chain.append((found, n))
            at, block = at + n, found
            if n < BLOCK:
                break
        return chain, at

    def missing(self, tokens: Sequence[int]) -> range:
        """Starts of the blocks that `add` would still have to be given for `tokens`."""
        held, at, block = 0, 0, self._root
        while at < len(tokens):
            part = tuple(tokens[at : at + BLOCK])
            found, n = block.longest(part)
            if found is None or n < len(part):
                break
            held, at, block = at + len(part), at + BLOCK, found
        return range(held - held % BLOCK if held < len(tokens) else len(tokens), len(tokens), BLOCK)

    def add(self, tokens: Sequence[int], start: int, rows: Rows) -> None:
        """Parks the rows of tokens[start : start + BLOCK], whose predecessors are parked."""
        chain, at = self.find(tokens[:start])
        if at != start:
            return  # a predecessor was forgotten meanwhile
        before = chain[-1][0] if chain else self._root
        part = tuple(tokens[start : start + BLOCK])
        replaced = [b for key, b in before.after.items() if part[: len(key)] == key]
        for block in replaced:
            self._drop(block)
        block = before.after[part] = Block(part, before, rows)
        self.memory_used += block.nbytes
        self._recent[block] = None
        self.touch([*(b for b, _ in chain), block])

    def touch(self, chain: Sequence[Block]) -> None:
        """The blocks of a chain have been used just now."""
        for block in reversed(chain):
            self._recent.move_to_end(block)

    def rows(self, block: Block) -> tuple[Rows, bool]:
        """A block's rows, and whether they came from disk. OSError if that failed."""
        if block.rows is not None:
            return block.rows, False
        if self._file is None or block.place is None:
            raise OSError("a parked block has no place")
        return self._file.read(block.place, block.nbytes), True

    @property
    def over(self) -> bool:
        """Whether `trim` has something to do."""
        return self.memory_used > self.memory_limit

    def trim(self) -> None:
        """Moves the least recently used block in RAM to the file, or forgets it."""
        block = next(b for b in self._recent if b.rows is not None)
        while self._file is not None and self.disk_used + block.nbytes > self.disk_limit:
            oldest = next((b for b in self._recent if b.place is not None), None)
            if oldest is None:
                break
            self._forget(oldest)
        if self._file is None or not self._move(block, self._file):
            self._forget(block)

    def _move(self, block: Block, file: ParkFile) -> bool:
        if block.rows is None or self.disk_used + block.nbytes > self.disk_limit:
            return False
        try:
            block.place = file.write(block.rows)
        except OSError:  # a full disk is a smaller budget
            self.disk_limit = self.disk_used
            return False
        self.disk_used += block.nbytes
        self.memory_used -= block.nbytes
        block.rows = None
        return True

    def _forget(self, block: Block) -> None:
        for after in list(block.after.values()):
            self._forget(after)
        self._drop(block)
        self.forgotten_blocks += 1

    def _drop(self, block: Block) -> None:
        if block.place is not None and self._file is not None:
            self._file.free(block.place)
            self.disk_used -= block.nbytes
        else:
            self.memory_used -= block.nbytes
        if block.before is not None:
            block.before.after.pop(block.tokens, None)
        self._recent.pop(block, None)

    @property
    def blocks(self) -> int:
        return len(self._recent)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class ParkFile:
    """A file of equal places, without a name: it is gone when the process is, however that ends."""

    def __init__(self, folder: Path | None, block_bytes: int) -> None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder, prefix="slotwise-parked-", buffering=0)  # noqa: SIM115
        self._size, self._end = block_bytes, 0
        self._free: list[int] = []

    def write(self, rows: Rows) -> int:
        place = self._free.pop() if self._free else self._end
        view, offset = rows.data.cast("B"), place * self._size
        try:
            while view:
                done = os.pwrite(self._file.fileno(), view, offset)
                view, offset = view[done:], offset + done
        except OSError:
            self._free.append(place)
            self._end = max(self._end, place + 1)
            raise
        self._end = max(self._end, place + 1)
        return place

    def read(self, place: int, nbytes: int) -> Rows:
        rows = np.empty(nbytes, np.uint8)
        view, offset = rows.data.cast("B"), place * self._size
        while view:
            done = os.preadv(self._file.fileno(), [view], offset)
            if not done:
                raise OSError("the parked rows end early")
            view, offset = view[done:], offset + done
        return rows

    def free(self, place: int) -> None:
        self._free.append(place)

    def close(self) -> None:
        self._file.close()
