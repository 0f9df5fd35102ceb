"""Builds slot images out of a GGUF: one expert's gate | up | down as its expert slot holds them.

Three reads an expert, because a GGUF keeps each projection of all experts together. Q2_0 is widened
to Q4_0 on the way. Bytes that belong to no projection are zero, so an image depends on nothing but
the source. It knows nothing of packs, pools or what is resident.
"""

from __future__ import annotations

import contextlib

import numpy as np

from slotwise.errors import StoreError
from slotwise.weights.direct_io import DirectFile
from slotwise.weights.layout import ExpertLayout, Projection, SourceRange, source_ranges
from slotwise.weights.shards import ModelFile
from slotwise.weights.widen import widen_q2_0


class SlotImages:
    """The experts of an open model as slot images. `read` may be called from several threads."""

    def __init__(self, model: ModelFile, layout: ExpertLayout) -> None:
        """Open the shards that hold experts; StoreError if one cannot be opened."""
        self.model, self.layout = model, layout
        paths = {
            source.path
            for moe_index in range(layout.n_moe_layers)
            for source in source_ranges(model, layout, moe_index, 0)
        }
        with contextlib.ExitStack() as opened:
            self._files = {path: opened.enter_context(DirectFile(path)) for path in sorted(paths)}
            self._stamps = {file: file.stamp() for file in self._files.values()}
            for shard in model.shards:
                if shard.path in self._files:
                    self._check_unchanged(self._files[shard.path], size=shard.size)
            self._opened = opened.pop_all()

    @property
    def direct(self) -> bool:
        """True while no shard is read through the page cache."""
        return all(file.direct for file in self._files.values())

    @property
    def note(self) -> str:
        """Why reads go through the page cache; empty if they do not."""
        return next((file.note for file in self._files.values() if file.note), "")

    def read(self, moe_index: int, expert: int, target: memoryview) -> int:
        """Fill `target` (slot_bytes of the expert's class); returns the bytes read from disk."""
        slot = self.layout.slot_class(moe_index)
        sources = source_ranges(self.model, self.layout, moe_index, expert)
        end = read = 0
        for projection, source in zip(slot.projections, sources, strict=True):
            _zero(target[end : projection.offset])
            end = projection.offset + projection.nbytes
            read += self._read_projection(projection, source, target[projection.offset : end])
        _zero(target[end : slot.slot_bytes])
        for path in {source.path for source in sources}:
            self._check_unchanged(self._files[path])
        return read

    def _read_projection(
        self, projection: Projection, source: SourceRange, target: memoryview
    ) -> int:
        file = self._files[source.path]
        if source.type == projection.type:
            return file.read_into(source.offset, target)
        narrow = np.empty(source.nbytes, np.uint8)
        read = file.read_into(source.offset, narrow.data)
        widen_q2_0(narrow, out=np.frombuffer(target, np.uint8))
        return read

    def where(self, moe_index: int, expert: int) -> tuple[str, int]:
        """Path and byte offset of an expert's first projection."""
        first = source_ranges(self.model, self.layout, moe_index, expert)[0]
        return str(first.path), first.offset

    def _check_unchanged(self, file: DirectFile, *, size: int | None = None) -> None:
        """A GGUF has no checksums: once somebody wrote to it, nothing in it can be trusted."""
        found = file.stamp()
        if found != self._stamps[file] or size not in (None, found[0]):
            raise StoreError(
                str(file.path),
                0,
                "the model file was changed while it was in use",
                next_step="Start again, with a file that nobody writes to.",
            )

    def close(self) -> None:
        """Close the shards. No read may be under way."""
        self._opened.close()


def _zero(gap: memoryview) -> None:
    if gap.nbytes:
        gap[:] = bytes(gap.nbytes)
