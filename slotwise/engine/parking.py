"""Where the rows of conversations that are not being answered wait: in RAM, then in a file.

A parked conversation is a chain of blocks of up to `BLOCK` tokens, and conversations that begin
alike share the beginning of their chains. Blocks are forgotten the least recently used first; a
block is never forgotten before those that continue it.

Knows bytes and tokens, nothing of layers. For one thread, the engine's.
"""

from __future__ import annotations

import os
import tempfile
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

BLOCK = 64
Key = bytes
"""Token ids of 4 bytes each, most significant first: they sort as the lists of ids do."""
ID = 4
Rows = np.ndarray
"""uint8 [tokens * bytes of a position]"""


class Block:
    """Some tokens that follow those of `before`, and the rows they left."""

    __slots__ = ("after", "before", "key", "nbytes", "place", "rows")

    def __init__(self, key: Key, before: Block | None, rows: Rows | None) -> None:
        self.key, self.before, self.rows = key, before, rows
        self.nbytes = 0 if rows is None else rows.nbytes
        self.place: int | None = None
        """In the file; `rows` is None then."""
        self.after: list[Block] = []
        """Sorted by their keys, none of which begins with another's."""

    def neighbours(self, key: Key) -> tuple[int, list[Block]]:
        """Where `key` stands, or would stand, in `after`; and who is there and before it. Of all
        that are sorted these share the longest beginnings with it."""
        at = bisect_left(self.after, key, key=_key)
        return at, self.after[max(0, at - 1) : at + 1]

    def longest(self, key: Key) -> tuple[Block | None, int]:
        """The block after this one that begins most like `key`, and for how many tokens."""
        best, most = None, 0
        for block in self.neighbours(key)[1]:
            n = _common(block.key, key)
            if n > most:
                best, most = block, n
        return best, most


def _key(block: Block) -> Key:
    return block.key


def _packed(tokens: Sequence[int]) -> Key:
    return np.asarray(tokens, ">u4").tobytes()


def _common(a: Key, b: Key) -> int:
    """How many tokens both begin with."""
    n = min(len(a), len(b))
    differ = int.from_bytes(a[:n]) ^ int.from_bytes(b[:n])
    return (n - (differ.bit_length() + 7) // 8) // ID


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with."""
    limit = min(len(a), len(b))
    return next((i for i in range(limit) if a[i] != b[i]), limit)


class Parking:
    """Blocks of rows, up to a budget of RAM and another of disk. Beside its rows, wherever these
    are, a block takes less than 1 KiB of RAM, which is in no budget."""

    def __init__(self, *, memory: int, disk: int, folder: Path | None, block_bytes: int) -> None:
        self.memory_limit = memory
        self.memory_used = self.disk_used = 0
        self.forgotten_blocks = 0
        self._root = Block(b"", None, None)
        self._recent: OrderedDict[Block, None] = OrderedDict()
        """Least recently used first; a block always comes before the one it follows."""
        self._in_memory: OrderedDict[Block, None] = OrderedDict()
        """Those of them whose rows are in RAM, in the same order."""
        places = disk // block_bytes
        self._file = ParkFile(folder, block_bytes, places) if places else None

    def find(self, tokens: Sequence[int]) -> tuple[list[tuple[Block, int]], int]:
        """The chain of (block, tokens of it) that `tokens` begin with, and their number."""
        chain: list[tuple[Block, int]] = []
        at, block, key = 0, self._root, _packed(tokens)
        while at < len(tokens):
            found, n = block.longest(_part(key, at))
            if found is None:
                break
            chain.append((found, n))
            at, block = at + n, found
            if n < BLOCK:
                break
        return chain, at

    def missing(self, tokens: Sequence[int]) -> range:
        """Starts of the blocks that `add` would still have to be given for `tokens`."""
        at, block, key = 0, self._root, _packed(tokens)
        while at < len(tokens):
            part = _part(key, at)
            found, n = block.longest(part)
            if found is None or n * ID < len(part):
                break
            at, block = at + BLOCK, found
        return range(at, len(tokens), BLOCK)

    def add(self, tokens: Sequence[int], start: int, rows: Rows) -> None:
        """Parks the rows of tokens[start : start + BLOCK], whose predecessors are parked."""
        chain, at = self.find(tokens[:start])
        if at != start:
            return  # a predecessor was forgotten meanwhile
        before = chain[-1][0] if chain else self._root
        key = _packed(tokens[start : start + BLOCK])
        for block in before.neighbours(key)[1]:
            if key.startswith(block.key):  # it knows no more than the new one
                self._drop(block)
        at, _ = before.neighbours(key)
        block = Block(key, before, rows)
        before.after.insert(at, block)
        self.memory_used += block.nbytes
        self._recent[block] = self._in_memory[block] = None
        self.touch([*(b for b, _ in chain), block])

    def touch(self, chain: Sequence[Block]) -> None:
        """The blocks of a chain have been used just now."""
        for block in reversed(chain):
            self._recent.move_to_end(block)
            if block.rows is not None:
                self._in_memory.move_to_end(block)

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
        block = next(iter(self._in_memory))
        while self._file is not None and self._file.full:
            oldest = next((b for b in self._recent if b.place is not None), None)
            if oldest is None:
                break
            self._forget(oldest)
        if block not in self._in_memory:
            return  # it followed one that was forgotten
        if not self._move(block):
            self._forget(block)

    def _move(self, block: Block) -> bool:
        file, rows = self._file, block.rows
        if file is None or file.full or rows is None:
            return False
        try:
            block.place = file.write(rows)
        except OSError:  # a full disk is a smaller budget
            file.shrink()
            return False
        self.disk_used += block.nbytes
        self.memory_used -= block.nbytes
        block.rows = None
        del self._in_memory[block]
        return True

    def _forget(self, block: Block) -> None:
        """With all that follows it."""
        going = [block]
        for each in going:
            going.extend(each.after)
        for each in reversed(going):
            self._drop(each)
        self.forgotten_blocks += len(going)

    def _drop(self, block: Block) -> None:
        if block.place is not None and self._file is not None:
            self._file.free(block.place)
            self.disk_used -= block.nbytes
        else:
            self.memory_used -= block.nbytes
            self._in_memory.pop(block, None)
        if block.before is not None:
            at, _ = block.before.neighbours(block.key)
            del block.before.after[at]
        self._recent.pop(block, None)

    @property
    def blocks(self) -> int:
        return len(self._recent)

    @property
    def file_bytes(self) -> int:
        """Size of the file, places that are free now included."""
        return self._file.nbytes if self._file is not None else 0

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _part(key: Key, at: int) -> Key:
    """The key of the block that begins at token `at`."""
    return key[ID * at : ID * (at + BLOCK)]


class ParkFile:
    """A file of equal places, without a name: it is gone when the process is, however that ends."""

    def __init__(self, folder: Path | None, block_bytes: int, places: int) -> None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder, prefix="slotwise-parked-", buffering=0)  # noqa: SIM115
        self._size, self._end, self._places = block_bytes, 0, places
        self._free: list[int] = []

    @property
    def full(self) -> bool:
        return not self._free and self._end >= self._places

    @property
    def nbytes(self) -> int:
        return self._end * self._size

    def shrink(self) -> None:
        """Takes no more places than are in use or were."""
        self._places = self._end

    def write(self, rows: Rows) -> int:
        """The place of `rows`, which are no longer than one. OSError on a full disk."""
        place = self._free.pop() if self._free else self._end
        view, offset = rows.data.cast("B"), place * self._size
        try:
            while view:
                done = os.pwrite(self._file.fileno(), view, offset)
                view, offset = view[done:], offset + done
        except OSError:
            if place < self._end:
                self._free.append(place)
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
