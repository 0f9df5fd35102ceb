"""Bytes of a log file as complete lines: bounded, in one pass, whatever the file holds.

Plain or gzip, UTF-8 or the UTF-16 a Windows shell writes, LF or CRLF. A line is cut at
64 KiB (and counted), half a last line is kept until its end or the file's end, and no
more than one block and one cut line is ever in memory.
"""

from __future__ import annotations

import codecs
import gzip
import os
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import IO, Protocol, cast

BLOCK = 128 << 10
"""Small enough to stay in the processor's cache and to be allocated without page faults."""
LINE_LIMIT = 64 << 10
_HALF_MAGIC = (b"\x1f", b"\xff", b"\xfe")
STRETCH = 16 << 10
"""Bytes searched for the next run of bulk lines; in more, the search prepares too long."""


class Sink(Protocol):
    """The part of a reader that takes lines."""

    def feed(self, line_no: int, line: str) -> None: ...


class BulkSink(Sink, Protocol):
    """A reader whose files are mostly one kind of line, taken many at a time."""

    bulk: bytes
    """How such a line begins."""

    def feed_bulk(self, line_no: int, block: bytes, at: int) -> tuple[int, int]:
        """Take lines from `at` on, where one begins with `bulk`. How many, and what is next."""
        ...

    def feed_between(self, line_no: int, lines: bytes) -> None:
        """Take the lines between two runs of bulk lines."""
        ...


class Splitter:
    """Cuts a stream of bytes into blocks of whole lines."""

    def __init__(self) -> None:
        self.cut = 0
        self._rest = b""
        self._skipping = False

    def push(self, data: bytes) -> bytes | None:
        """Take more bytes; return the whole lines ready now, without the last line end."""
        if self._skipping:
            _, end, data = data.partition(b"\n")
            if not end:
                return None
            self._skipping = False
            data = self._rest + end + data
        else:
            data = self._rest + data
        head, end, self._rest = data.rpartition(b"\n")
        if len(self._rest) > LINE_LIMIT:
            self._rest = self._rest[:LINE_LIMIT]
            self._skipping = True
            self.cut += 1
        if not end:
            return None
        return head.replace(b"\r\n", b"\n").removesuffix(b"\r") if b"\r" in head else head

    def rest(self) -> bytes:
        """The unfinished last line."""
        return self._rest

    def restart(self) -> None:
        """Forget the unfinished line: other bytes come now."""
        self._rest, self._skipping = b"", False


class LogFile:
    """An open log that can be read again when it has grown. Close it when done."""

    def __init__(self, path: Path) -> None:
        self.size = 0
        self.problem = ""
        self._path = path
        self._open()

    def _open(self) -> None:
        self._raw: IO[bytes] = self._path.open("rb")
        self._file: IO[bytes] | None = None
        self._wide: codecs.IncrementalDecoder | None = None

    def _begin(self) -> bool:
        """Tell by its first two bytes what the file is; not before they are there."""
        if self._raw.seekable():
            magic = self._raw.read(2)
            self._raw.seek(0)
        else:
            magic = cast(BufferedReader, self._raw).peek(2)[:2]
        if not magic or magic in _HALF_MAGIC:
            return False
        self._file = self._raw
        if magic == b"\x1f\x8b":
            self._file = cast("IO[bytes]", gzip.GzipFile(fileobj=self._raw))
        if magic in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            self._wide = codecs.getincrementaldecoder("utf-16")("replace")
        return True

    def no_more(self) -> bool:
        """It will not grow: a single byte that could have begun another kind is just that byte."""
        undecided = self._file is None
        if undecided:
            self._file = self._raw
        return undecided

    def read(self) -> bytes:
        """The next block, empty at the (present) end. A damaged gzip ends there, noted."""
        if self._file is None and not self._begin():
            return b""
        try:
            data = cast("IO[bytes]", self._file).read(BLOCK)
        except (OSError, EOFError, zlib.error):
            self.problem = "damaged or cut short"
            return b""
        self.size += len(data)
        if self._wide is not None:
            return self._wide.decode(data).encode()
        return data

    def replaced(self) -> bool:
        """Whether another file lies at the path now (rotated), or this one was cut shorter."""
        try:
            there, here = self._path.stat(), os.fstat(self._raw.fileno())
        except OSError:
            return False
        if not self._raw.seekable():
            return False
        another = (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino)
        return another or here.st_size < self._raw.tell()

    def reopen(self) -> None:
        """Go on with what lies at the path now, from its beginning."""
        self.close()
        self._open()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._raw.close()


def as_text(line: bytes) -> str:
    return line[:LINE_LIMIT].decode("utf-8", "replace")


def feed_block(sink: Sink, block: bytes, first_line: int) -> int:
    """Give every line of `block` to the reader; return the number of the line after it."""
    if take_block := getattr(sink, "feed_block", None):
        return take_block(first_line, block)
    if bulk := getattr(sink, "bulk", b""):
        return _feed_runs(cast(BulkSink, sink), bulk, block, first_line)
    return feed_lines(sink, block, first_line)


def feed_lines(sink: Sink, lines: bytes, line_no: int) -> int:
    """Give the lines to the reader one by one; return the number of the line after them."""
    if len(lines) <= LINE_LIMIT:
        texts = lines.decode("utf-8", "replace").split("\n")
    else:
        texts = map(as_text, lines.split(b"\n"))
    feed = sink.feed
    for text in texts:
        feed(line_no, text)
        line_no += 1
    return line_no


def _feed_runs(sink: BulkSink, bulk: bytes, block: bytes, line_no: int) -> int:
    """Let the reader take runs of bulk lines in one piece, and what is between them in another."""
    at, size, start = 0, len(block), b"\n" + bulk
    block += b"\n"  # so that the last line is as long as the others of its run
    while at <= size:
        if block.startswith(bulk, at):
            count, at = sink.feed_bulk(line_no, block, at)
            line_no += count
            if count:
                continue
        end = block.find(start, at, at + STRETCH)
        if end < 0:
            end = block.find(b"\n", at + STRETCH)
        if end < 0:
            end = size
        lines = block[at:end]
        sink.feed_between(line_no, lines)
        line_no += lines.count(b"\n") + 1
        at = end + 1
    return line_no


def blocks(log: LogFile, splitter: Splitter) -> Iterator[bytes]:
    """Whole-line blocks up to the present end of the file."""
    while data := log.read():
        block = splitter.push(data)
        if block is not None:
            yield block
