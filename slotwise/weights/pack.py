"""Writes a pack: every expert of a model as a slot image, so that one aligned read fills a slot.

The images go to `experts.bin.partial`; `journal` beside it lists what is on disk, with checksums.
A run that is interrupted at any point, power cuts included, is continued by the next one: it reads
back what the journal claims and writes again whatever does not match. `experts.bin` gets its name
when it is complete, `index.json` is written last, and only a folder with an index is a pack.

The index and its checks are in pack_index.py. Nothing is quantised here: experts are written as the
source has them (Q2_0 widened, see widen.py).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from slotwise.errors import Finding, Interrupted, Refused, SlotwiseError, StoreError
from slotwise.weights.direct_io import DirectFile, aligned_buffer, describe, drop_cached
from slotwise.weights.layout import ExpertLayout
from slotwise.weights.pack_index import (
    EXPERTS,
    INDEX,
    PackIndex,
    check_pack,
    checksum,
    default_pack_path,
    inspect_index,
    layer_offsets,
    layout_record,
    read_index,
    source_files,
)
from slotwise.weights.pack_journal import (
    Journal,
    locked,
    read_journal,
    rename,
    replace_file,
    write_at,
)
from slotwise.weights.shards import ModelFile
from slotwise.weights.slot_images import SlotImages

__all__ = ["PackIndex", "check_pack", "default_pack_path", "read_index", "write_pack"]

PARTIAL = EXPERTS + ".partial"
JOURNAL = "journal"

SYNC_BYTES = 64 << 20
"""The journal is brought up to date whenever this much more has been written."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Progress = Callable[[int, int], None]


def write_pack(
    model: ModelFile,
    layout: ExpertLayout,
    path: Path,
    *,
    progress: Progress | None = None,
    lanes: int = 4,
    force: bool = False,
) -> PackIndex:
    """Write the pack of `model` into folder `path`, or go on with an interrupted one.

    `lanes` threads read the source, each holding one expert. `progress` gets bytes done and bytes
    in all. If the pack is there already nothing is written and `written` of the result is 0.
    Raises Refused for a pack of another source (unless `force`), Interrupted on Ctrl-C, StoreError
    if the source cannot be read, SlotwiseError on a full disk or while another process writes here.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with locked(path):
            _clear(path, model, layout, force=force)
            if (path / INDEX).exists():
                return read_index(path)
            return _write(model, layout, path, progress=progress, lanes=lanes)
    except KeyboardInterrupt as stop:
        kept = len(read_journal(path / JOURNAL)[1])
        raise Interrupted(
            f"{path}: stopped; {kept:,} of {layout.n_total:,} experts are written and kept",
            next_step="Run the same command again to go on.",
        ) from stop
    except OSError as error:
        raise SlotwiseError(
            f"{error.filename or path}: the pack cannot be written ({describe(error)})",
            next_step="Check the folder's permissions, or choose another folder for the pack.",
        ) from error


def _clear(folder: Path, model: ModelFile, layout: ExpertLayout, *, force: bool) -> None:
    """Remove what is in the way; what stays is a pack that is complete, or one to go on with."""
    findings = check_pack(folder, model, layout)
    if not (findings or force):
        (folder / JOURNAL).unlink(missing_ok=True)
        return
    if (folder / INDEX).exists():
        index, _ = inspect_index(folder)
        ours = index is not None and index.digest == model.digest
    else:
        digest, _ = read_journal(folder / JOURNAL)
        if digest == model.digest:
            return
        findings = [_not_ours(folder, digest)]
        ours = digest is None and not (folder / EXPERTS).exists()
    if not (ours or force):
        raise Refused(findings)
    for name in (INDEX, EXPERTS, PARTIAL, JOURNAL):
        (folder / name).unlink(missing_ok=True)


def _not_ours(folder: Path, digest: str | None) -> Finding:
    what = f"an unfinished pack of digest {digest[:12]}" if digest else f"{EXPERTS} without {INDEX}"
    return Finding(
        level="refusal",
        code="pack-of-another-source",
        where=str(folder),
        found=what,
        expected="an empty folder or a pack of this model",
        next_step="Choose another folder, or run `slotwise pack --force` to replace what is there.",
    )


def _write(
    model: ModelFile, layout: ExpertLayout, folder: Path, *, progress: Progress | None, lanes: int
) -> PackIndex:
    offsets = layer_offsets(layout)
    if (folder / EXPERTS).exists():  # stopped between the last image and the index
        rename(folder / EXPERTS, folder / PARTIAL)
    try:
        if _held(folder) + _free(folder) < _needed(layout):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        _reserve(folder / PARTIAL, offsets[-1])
        with _PackWriter(model, layout, folder, offsets=offsets) as writer:
            checksums, written = writer.run(lanes, progress=progress)
        index = PackIndex(
            path=folder,
            digest=model.digest,
            files=source_files(model),
            layout=layout_record(layout),
            nbytes=offsets[-1],
            checksums=tuple(
                tuple(checksums[start : start + layout.n_experts])
                for start in range(0, layout.n_total, layout.n_experts)
            ),
            written=written,
        )
        rename(folder / PARTIAL, folder / EXPERTS)
        replace_file(folder / INDEX, json.dumps(index.to_dict()))
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise _full(folder, layout, cause=describe(error)) from error
    (folder / JOURNAL).unlink()
    return index


def _reserve(partial: Path, nbytes: int) -> None:
    """Make the file its full size, with the disk room behind it where that can be had."""
    with partial.open("ab") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        except (AttributeError, OSError) as error:
            if getattr(error, "errno", None) in _NO_ROOM:
                raise
        os.ftruncate(file.fileno(), nbytes)


def _needed(layout: ExpertLayout) -> int:
    """Bytes of disk for the whole pack; the index and the journal are lines of text an expert."""
    return layout.total_bytes + 32 * layout.n_total + (64 << 10)


def _held(folder: Path) -> int:
    """Bytes of disk that the images have taken already."""
    files = [folder / name for name in (PARTIAL, EXPERTS)]
    return sum(file.stat().st_blocks * 512 for file in files if file.exists())


def _free(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _full(folder: Path, layout: ExpertLayout, *, cause: str) -> SlotwiseError:
    """The error for a full disk, quota or size limit; a start with nothing to keep is removed."""
    held, free = _held(folder), _free(folder)
    if kept := len(read_journal(folder / JOURNAL)[1]):
        left = f"{kept:,} of {layout.n_total:,} experts are written and kept"
    else:
        left = "nothing is left behind"
        held, free = 0, free + held
        for name in (PARTIAL, JOURNAL):
            (folder / name).unlink(missing_ok=True)
    needed = _needed(layout) - held
    if free < needed:
        room = f"it needs {needed:,} bytes, {free:,} are available, {needed - free:,} are missing"
    else:
        room = f"a quota or a size limit stops it, {needed:,} bytes are missing"
    return SlotwiseError(
        f"{folder}: no room for the pack ({cause}): {room}; {left}",
        next_step="Free that much, then run it again; or choose a folder on another disk.",
    )


class _PackWriter:
    """One run over all experts. The lanes write images; the calling thread keeps the journal."""

    def __init__(
        self, model: ModelFile, layout: ExpertLayout, folder: Path, *, offsets: list[int]
    ) -> None:
        self.layout, self.offsets = layout, offsets
        self.lane = threading.local()
        with contextlib.ExitStack() as opened:
            self.images = opened.enter_context(contextlib.closing(SlotImages(model, layout)))
            self.readback = opened.enter_context(DirectFile(folder / PARTIAL))
            self.fd = opened.enter_context((folder / PARTIAL).open("r+b")).fileno()
            self.journal = Journal(
                folder / JOURNAL, digest=model.digest, layout=layout_record(layout)
            )
            opened.callback(self.journal.close)
            self.opened = opened.pop_all()

    def __enter__(self) -> _PackWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.opened.close()

    def run(self, lanes: int, *, progress: Progress | None) -> tuple[list[int], int]:
        """Write what is not there yet; returns all checksums, and how many images were written."""
        checksums: list[int] = []
        new: list[tuple[int, int]] = []
        written = unsynced = 0
        with ThreadPoolExecutor(lanes) as threads:
            try:
                for position, (crc, nbytes) in enumerate(
                    threads.map(self._write_one, range(self.layout.n_total))
                ):
                    checksums.append(crc)
                    if nbytes:
                        new.append((position, crc))
                        written += 1
                        unsynced += nbytes
                    if unsynced >= SYNC_BYTES:
                        self._sync(new)
                        unsynced = 0
                    if progress:
                        offset, image_bytes = self._place(position)
                        progress(offset + image_bytes, self.offsets[-1])
            except BaseException:
                threads.shutdown(cancel_futures=True)
                with contextlib.suppress(OSError):
                    self._sync(new)
                raise
        self._sync(new)
        return checksums, written

    def _write_one(self, position: int) -> tuple[int, int]:
        """On a lane: the CRC-32 of one image, and the bytes written (0: it was there already)."""
        offset, nbytes = self._place(position)
        image = self._buffer()[:nbytes]
        claimed = self.journal.claims.get(position)
        if claimed is not None and self._holds(offset, image, claimed):
            return claimed, 0
        self.images.read(*divmod(position, self.layout.n_experts), image)
        write_at(self.fd, image, offset=offset)
        return checksum(image), nbytes

    def _holds(self, offset: int, image: memoryview, crc: int) -> bool:
        try:
            self.readback.read_into(offset, image)
        except StoreError:
            return False
        return checksum(image) == crc

    def _place(self, position: int) -> tuple[int, int]:
        moe_index, expert = divmod(position, self.layout.n_experts)
        nbytes = self.layout.slot_class(moe_index).slot_bytes
        return self.offsets[moe_index] + expert * nbytes, nbytes

    def _buffer(self) -> memoryview:
        if not hasattr(self.lane, "image"):
            self.lane.image = aligned_buffer(max(c.slot_bytes for c in self.layout.classes))
        return self.lane.image

    def _sync(self, new: list[tuple[int, int]]) -> None:
        os.fsync(self.fd)
        self.journal.add(new)
        new.clear()
        drop_cached(self.fd)
