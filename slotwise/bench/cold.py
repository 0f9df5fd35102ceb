"""Empties the page cache of files, and looks whether it is empty.

A memory limit does nothing to a file whose pages are in the cache already, charged to others.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DROP_CACHES = Path("/proc/sys/vm/drop_caches")
LITTLE = 0.01
"""A smaller share of the files may stay in the cache."""


@dataclass(frozen=True, kw_only=True)
class Cold:
    """What was done, and what is still in the page cache."""

    how: str
    cached_bytes: int | None
    """None where the kernel does not say."""


def drop(files: Sequence[Path], *, switch: Path = DROP_CACHES) -> Cold:
    """First by posix_fadvise for these files alone; if too much stays, by the kernel's switch for
    everything, where we may. Pages that another process has mapped stay in either case."""
    for path in files:
        _advise(path)
    total = sum(path.stat().st_size for path in files)
    left = _cached(files)
    if left is not None and left <= LITTLE * total:
        return Cold(how="posix_fadvise", cached_bytes=left)
    try:
        os.sync()
        switch.write_text("1")
    except OSError:
        return Cold(how="posix_fadvise", cached_bytes=left)
    return Cold(how="posix_fadvise and drop_caches", cached_bytes=_cached(files))


def _advise(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _cached(files: Sequence[Path]) -> int | None:
    counts = [cached_bytes(path) for path in files]
    return None if None in counts else sum(n for n in counts if n is not None)


def cached_bytes(path: Path) -> int | None:
    """Bytes of `path` in the page cache, by mincore; None where that does not work."""
    if not path.stat().st_size:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        pages = -(-len(mapped) // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * pages)()
        start = ctypes.c_char.from_buffer(mapped)
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(
            ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(mapped)), found
        )
        del start  # or the mapping could not be closed
    if failed:
        return None
    return sum(byte & 1 for byte in bytes(found)) * mmap.PAGESIZE
