"""What keeps a half-written pack safe: the lock, the journal, and replacing a file in one step.

The journal says which experts of `experts.bin.partial` have reached the disk. It only claims: the
writer reads back what is claimed before it trusts it. Nothing here knows what an expert is.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from slotwise.errors import SlotwiseError

LOCK = "lock"


class Journal:
    """A first line that says what is being written, then ``position crc32`` lines."""

    def __init__(self, file: Path, *, digest: str, layout: object) -> None:
        """Go on with `file` if it is about the same digest and layout, else start it anew."""
        head = _head(digest, layout)
        same = head == (_lines(file) or [""])[0]
        self.claims: dict[int, int] = read_journal(file)[1] if same else {}
        """CRC-32 by position in experts.bin."""
        # Written anew, because a line added behind a torn one would be lost.
        replace_file(file, head + "\n" + _text(self.claims.items()))
        self._file = file.open("a", encoding="utf-8")

    def add(self, claims: Iterable[tuple[int, int]]) -> None:
        """Claim (position, CRC-32) pairs; call it when they have reached the disk."""
        claims = tuple(claims)
        self._file.write(_text(claims))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.claims.update(claims)

    def close(self) -> None:
        self._file.close()


def read_journal(file: Path) -> tuple[str | None, dict[int, int]]:
    """The source's digest (None if that cannot be read) and what is claimed to be on disk."""
    head, *lines = _lines(file) or [""]
    try:
        digest = str(json.loads(head)["digest"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return None, {}
    claims: dict[int, int] = {}
    for line in lines:
        try:
            position, crc = line.split()
            claims[int(position)] = int(crc)
        except ValueError:  # torn when the last run was stopped
            break
    return digest, claims


def _head(digest: str, layout: object) -> str:
    return json.dumps({"digest": digest, "layout": layout}, sort_keys=True)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []


def _text(claims: Iterable[tuple[int, int]]) -> str:
    return "".join(f"{position} {crc}\n" for position, crc in claims)


def write_at(fd: int, data: memoryview, *, offset: int) -> None:
    """Write all of `data` at `offset`."""
    done = 0
    while done < data.nbytes:
        done += os.pwrite(fd, data[done:], offset + done)


def replace_file(file: Path, text: str) -> None:
    """Write `file` so that it holds what it held or all of `text`, even after a power cut."""
    partial = file.with_name(file.name + ".partial")
    try:
        with partial.open("w", encoding="utf-8") as output:
            output.write(text)
            output.flush()
            os.fsync(output.fileno())
        rename(partial, file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def rename(source: Path, target: Path) -> None:
    """Rename within a folder, over `target` if it is there, and wait until the disk has it."""
    source.replace(target)
    fd = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold `folder`'s lock, or SlotwiseError; the folder goes too if it is empty at the end."""
    file = folder / LOCK
    fd = _lock(file)
    while not _is_still(file, fd):
        os.close(fd)
        fd = _lock(file)
    try:
        yield
    finally:
        try:
            file.unlink(missing_ok=True)
        finally:
            os.close(fd)
        with contextlib.suppress(OSError):
            folder.rmdir()


def _lock(file: Path) -> int:
    fd = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if not isinstance(error, BlockingIOError):
            raise
        raise SlotwiseError(
            f"{file.parent}: another process is writing this pack and holds {file.name}",
            next_step="Wait until it is done, or stop it and run this again to go on.",
        ) from None
    return fd


def _is_still(file: Path, fd: int) -> bool:
    """False if the holder before us removed the file between our open and our lock."""
    try:
        return os.path.samestat(file.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False
