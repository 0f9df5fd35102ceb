"""Reads byte ranges of a file straight into memory the caller owns, past the page cache.

With O_DIRECT the page cache does not become a second copy of weights that are already in the arena.
Where the file system refuses it, reads go through the cache, the pages are dropped again after each
read, and `note` says why. Interrupted system calls are retried by Python itself (PEP 475).

It does not know what the bytes mean, does no read-ahead and writes nothing.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
import threading
from pathlib import Path

from slotwise.errors import StoreError

ALIGNMENT = 4096
"""Offsets, lengths and addresses of a direct read are multiples of this many bytes."""

BOUNCE_BYTES = 4 << 20
"""Size of the aligned buffer (one a thread, made on first use) that unaligned reads go through."""

_threads = threading.local()


class DirectFile:
    """One open file. `read_into` may be called from any number of threads at once."""

    def __init__(self, path: Path, *, direct: bool = True) -> None:
        """Open `path`; StoreError if it cannot be opened or is not a regular file."""
        self.path = path
        self.note = ""
        """Why reads go through the page cache; empty while `direct` is true."""
        try:
            self._fd = self._open(direct)
            status = os.fstat(self._fd)
        except OSError as error:
            raise self._error(0, f"cannot be opened ({describe(error)})") from error
        self.size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise self._error(0, "is not a regular file")

    @property
    def direct(self) -> bool:
        """True while reads bypass the page cache."""
        return not self.note

    def stamp(self) -> tuple[int, int]:
        """Size, and time of the last change in ns: what differs once somebody wrote to the file.
        StoreError if the system cannot say."""
        try:
            status = os.fstat(self._fd)
        except OSError as error:
            raise self._error(0, f"cannot be looked at ({describe(error)})") from error
        return status.st_size, status.st_mtime_ns

    def _open(self, direct: bool) -> int:
        flag = getattr(os, "O_DIRECT", 0)
        if direct and flag:
            try:
                return os.open(self.path, os.O_RDONLY | flag)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                    raise
                self.note = f"the file system refuses O_DIRECT ({describe(error)})"
        else:
            self.note = "this system has no O_DIRECT" if direct else "O_DIRECT was not asked for"
        return os.open(self.path, os.O_RDONLY)

    def read_into(self, offset: int, target: memoryview) -> int:
        """Fill `target` with the file's bytes from `offset` on; returns the bytes read from disk.

        `target` is writable and contiguous. Nothing is copied when offset, length and address are
        multiples of ALIGNMENT; otherwise the read goes through an aligned buffer and the number
        returned includes the bytes around the range. Raises StoreError (path, offset, cause) on an
        I/O error and when the file ends early.
        """
        view = target.cast("B")
        if not view.nbytes:
            return 0
        if self.direct and (offset | view.nbytes | _address(view)) % ALIGNMENT:
            return self._read_bounced(offset, view)
        self._fill(offset, view, needed=view.nbytes)
        if not self.direct:
            drop_cached(self._fd, offset=offset, nbytes=view.nbytes)
        return view.nbytes

    def _read_bounced(self, offset: int, view: memoryview) -> int:
        bounce = _bounce_buffer()
        done = read = 0
        while done < view.nbytes:
            head = (offset + done) % ALIGNMENT
            part = min(view.nbytes - done, BOUNCE_BYTES - head)
            aligned = -(-(head + part) // ALIGNMENT) * ALIGNMENT
            self._fill(offset + done - head, bounce[:aligned], skip=head, needed=head + part)
            view[done : done + part] = bounce[head : head + part]
            done += part
            read += aligned
        return read

    def _fill(self, offset: int, view: memoryview, *, needed: int, skip: int = 0) -> None:
        """Read until `needed` bytes of `view` are there; the rest of it may lie past the end.

        The first `skip` bytes are there for alignment only: errors do not count them.
        """
        done = 0
        while done < needed:
            direct = self.direct  # another thread may turn it off in the middle
            try:
                end = done + os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL and direct:
                    self._leave_direct(error)
                    continue
                raise self._error(offset + done, describe(error)) from error
            # A direct read can only go on from a block boundary.
            resume = end - end % ALIGNMENT if direct and end < needed else end
            if resume <= done:
                there = max(end - skip, 0)
                raise self._error(
                    offset + skip,
                    f"the file ends after {there:,} of the {needed - skip:,} bytes expected here",
                    next_step="Check the file's size against its source; it may be truncated.",
                )
            done = resume

    def _leave_direct(self, error: OSError) -> None:
        """Some file systems accept O_DIRECT at open and refuse the reads."""
        self.note = f"the file system refuses direct reads ({describe(error)})"
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~getattr(os, "O_DIRECT", 0))

    def _error(self, offset: int, cause: str, *, next_step: str = "") -> StoreError:
        return StoreError(str(self.path), offset, cause, next_step=next_step)

    def close(self) -> None:
        """Close the file; closing twice is fine. No read may be under way."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def aligned_buffer(nbytes: int) -> memoryview:
    """Zeroed memory of its own whose address is a multiple of ALIGNMENT."""
    return memoryview(mmap.mmap(-1, max(nbytes, 1)))[:nbytes]


def drop_cached(fd: int, *, offset: int = 0, nbytes: int = 0) -> None:
    """Let the system forget its cached pages of a range (0 bytes: to the end of the file)."""
    if hasattr(os, "posix_fadvise"):
        start = offset - offset % ALIGNMENT
        length = -(-(offset + nbytes - start) // ALIGNMENT) * ALIGNMENT if nbytes else 0
        os.posix_fadvise(fd, start, length, os.POSIX_FADV_DONTNEED)


def describe(error: OSError) -> str:
    """The system's words and the short name, for example ``Input/output error, EIO``."""
    name = errno.errorcode.get(error.errno or 0, "")
    return ", ".join(filter(None, (error.strerror or str(error), name)))


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _bounce_buffer() -> memoryview:
    buffer = getattr(_threads, "bounce", None)
    if buffer is None:
        buffer = _threads.bounce = aligned_buffer(BOUNCE_BYTES)
    return buffer
