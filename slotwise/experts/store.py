"""The slow tier: where an expert's bytes come from when it is not in an expert slot.

PackStore reads slot images from a pack, one aligned read each; GgufStore builds them from the GGUF
with three. Both give the same bytes. A store does not know which experts are resident and keeps
nothing in memory.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Protocol

import numpy as np

from slotwise.errors import StoreError
from slotwise.weights.direct_io import DirectFile
from slotwise.weights.layout import ExpertLayout
from slotwise.weights.pack import PackIndex, check_pack, default_pack_path, read_index
from slotwise.weights.pack_index import EXPERTS, checksum, layer_offsets
from slotwise.weights.shards import ModelFile
from slotwise.weights.slot_images import SlotImages


class ExpertStore(Protocol):
    """What the loader needs of a slow tier. An expert is addressed by (moe_index, expert)."""

    layout: ExpertLayout

    @property
    def direct(self) -> bool:
        """True while reads bypass the page cache."""
        ...

    @property
    def note(self) -> str:
        """Why this kind of store, and why not direct; empty if there is nothing to say."""
        ...

    def read(self, moe_index: int, expert: int, target: memoryview) -> int:
        """Fill `target` with the slot image; returns the bytes read from disk.

        `target` is writable, as long as the class's slot_bytes, and 4096-aligned to avoid a copy.
        Thread-safe. Raises StoreError (path, offset, cause); `target` then holds anything.
        """
        ...

    def where(self, moe_index: int, expert: int) -> tuple[str, int]:
        """Path and byte offset to name when an expert cannot be read."""
        ...

    def close(self) -> None:
        """Close the files. No read may be under way, but for one that hangs."""
        ...


class PackStore:
    """Slot images from a pack that `check_pack` found no fault with.

    An expert's checksum is compared the first time it is read, on the lane that reads it, and for
    every expert again once somebody has written to the file. A file that was replaced or deleted
    under its name is no concern: the open one is read until the store is closed.
    """

    def __init__(self, index: PackIndex, layout: ExpertLayout, *, verify: bool = True) -> None:
        """Without `verify` no checksum is compared (to measure what they cost)."""
        self.layout = layout
        self._index, self._verify = index, verify
        self._offsets = layer_offsets(layout)
        self._verified = np.zeros((layout.n_moe_layers, layout.n_experts), np.int64)
        self._file = DirectFile(index.path / EXPERTS)
        self._stamp, self._writes, self._lock = self._file.stamp(), 1, threading.Lock()
        """How the file looked last, and how often it has looked different, counted from 1. An
        expert in whose `_verified` that count stands has been compared since."""

    @property
    def direct(self) -> bool:
        return self._file.direct

    @property
    def note(self) -> str:
        return self._file.note

    def read(self, moe_index: int, expert: int, target: memoryview) -> int:
        _slot_bytes(self.layout, moe_index, expert, target)
        writes, (_, offset) = self._writes, self.where(moe_index, expert)
        read = self._file.read_into(offset, target)
        if self._verify:
            self._notice_writes()
            if self._verified[moe_index, expert] != self._writes:
                self._check(moe_index, expert, offset, checksum(target))
                self._verified[moe_index, expert] = writes
        return read

    def where(self, moe_index: int, expert: int) -> tuple[str, int]:
        slot_bytes = self.layout.slot_class(moe_index).slot_bytes
        return str(self._file.path), self._offsets[moe_index] + expert * slot_bytes

    def _notice_writes(self) -> None:
        stamp = self._file.stamp()
        with self._lock:
            if stamp != self._stamp:
                self._stamp, self._writes = stamp, self._writes + 1

    def _check(self, moe_index: int, expert: int, offset: int, found: int) -> None:
        expected = self._index.checksums[moe_index][expert]
        if found != expected:
            raise StoreError(
                str(self._file.path),
                offset,
                f"layer {self.layout.layers[moe_index]} expert {expert} has CRC-32 {found:08x}, "
                f"the index says {expected:08x}",
                next_step="Run `slotwise pack --force` on the model to write the pack again.",
            )

    def close(self) -> None:
        self._file.close()


class GgufStore:
    """Slot images built from the GGUF's own tensors."""

    def __init__(self, model: ModelFile, layout: ExpertLayout, *, why: str = "") -> None:
        """`why` says why there is no pack; it becomes part of `note`."""
        self.layout = layout
        self._why = why
        self._images = SlotImages(model, layout)

    @property
    def direct(self) -> bool:
        return self._images.direct

    @property
    def note(self) -> str:
        return "; ".join(filter(None, (self._why, self._images.note)))

    def read(self, moe_index: int, expert: int, target: memoryview) -> int:
        _slot_bytes(self.layout, moe_index, expert, target)
        return self._images.read(moe_index, expert, target)

    def where(self, moe_index: int, expert: int) -> tuple[str, int]:
        return self._images.where(moe_index, expert)

    def close(self) -> None:
        self._images.close()


def open_store(
    model: ModelFile, layout: ExpertLayout, *, pack: Path | None = None, verify: bool = True
) -> ExpertStore:
    """A PackStore on the pack in folder `pack` (default: beside the model), or else a GgufStore.

    Falling back is no error: the store's note says what was wrong with the pack. Raises StoreError
    if the model's files cannot be opened.
    """
    folder = pack or default_pack_path(model)
    findings = check_pack(folder, model, layout)
    if findings:
        return _without_pack(model, layout, f"{findings[0].found}. {findings[0].next_step}")
    try:
        return PackStore(read_index(folder), layout, verify=verify)
    except StoreError as error:
        return _without_pack(model, layout, error.cause)


def _without_pack(model: ModelFile, layout: ExpertLayout, why: str) -> GgufStore:
    return GgufStore(model, layout, why=f"three reads an expert, straight from the GGUF: {why}")


def _slot_bytes(layout: ExpertLayout, moe_index: int, expert: int, target: memoryview) -> int:
    """The class's slot_bytes; a wrong address must not read a neighbour's bytes."""
    if not (0 <= moe_index < layout.n_moe_layers and 0 <= expert < layout.n_experts):
        raise IndexError(
            f"no expert ({moe_index}, {expert}) in {layout.n_moe_layers} x {layout.n_experts}"
        )
    slot_bytes = layout.slot_class(moe_index).slot_bytes
    if target.nbytes != slot_bytes:
        raise ValueError(
            f"an expert slot of moe_index {moe_index} is {slot_bytes} bytes, not {target.nbytes}"
        )
    return slot_bytes
