"""The slow tier: where an expert's bytes come from when it is not in an expert slot.

PackStore reads slot images from a pack, one aligned read each; GgufStore builds them from the GGUF
with three. Both give the same bytes. A store does not know which experts are resident and keeps
nothing in memory.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Protocol

import numpy as np

from slotwise.errors import StoreError
from slotwise.weights.direct_io import DirectFile
from slotwise.weights.layout import ExpertLayout
from slotwise.weights.pack import PackIndex, check_pack, default_pack_path, read_index
from slotwise.weights.pack_index import EXPERTS, layer_offsets
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

    def close(self) -> None:
        """Close the files. No read may be under way."""
        ...


class PackStore:
    """Slot images from a pack that `check_pack` found no fault with."""

    def __init__(self, index: PackIndex, layout: ExpertLayout, *, verify: bool = False) -> None:
        """`verify` compares each expert's checksum the first time it is read."""
        self.layout = layout
        self._index, self._verify = index, verify
        self._offsets = layer_offsets(layout)
        self._verified = np.zeros((layout.n_moe_layers, layout.n_experts), bool)
        self._file = DirectFile(index.path / EXPERTS)

    @property
    def direct(self) -> bool:
        return self._file.direct

    @property
    def note(self) -> str:
        return self._file.note

    def read(self, moe_index: int, expert: int, target: memoryview) -> int:
        slot_bytes = _slot_bytes(self.layout, moe_index, expert, target)
        offset = self._offsets[moe_index] + expert * slot_bytes
        read = self._file.read_into(offset, target)
        if self._verify and not self._verified[moe_index, expert]:
            self._check(moe_index, expert, offset, zlib.crc32(target))
        return read

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
        self._verified[moe_index, expert] = True

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

    def close(self) -> None:
        self._images.close()


def open_store(
    model: ModelFile, layout: ExpertLayout, *, pack: Path | None = None, verify: bool = False
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
