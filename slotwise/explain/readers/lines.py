"""Bytes of a log file as complete lines: bounded, in one pass, whatever the file holds.

Plain or gzip, UTF-8 or the UTF-16 a Windows shell writes, LF or CRLF. A line is cut at
64 KiB (and counted), half a last line is kept until its end or the file's end, and no
more than one block and one cut line is ever in memory.
"""

from __future__ import annotations

import codecs
import gzip
import zlib
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import IO, Protocol, cast

BLOCK = 1 << 20
LINE_LIMIT = 64 << 10

last_byte = itemgetter(-1)
before_last_byte = itemgetter(-2)


class Sink(Protocol):
    """The part of a reader that takes lines."""

    def feed(self, line_no: int, line: str) -> None: ...


class BulkSink(Sink, Protocol):
    """A reader whose files are mostly one kind of line, taken many at a time."""

    bulk: bytes
    """How such a line begins."""

    def feed_bulk(self, line_no: int, tails: list[bytes]) -> None:
        """Consecutive lines that all begin with `bulk`: what follows it in each."""
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
        return head.replace(b"\r\n", b"\n") if b"\r" in head else head

    def rest(self) -> bytes:
        """The unfinished last line."""
        return self._rest


class LogFile:
    """An open log that can be read again when it has grown. Close it when done."""

    def __init__(self, path: Path) -> None:
        self.size = 0
        self.problem = ""
        self._raw: IO[bytes] = path.open("rb")
        magic = self._raw.read(2)
        self._raw.seek(0)
        self._file = self._raw
        if magic == b"\x1f\x8b":
            self._file = cast("IO[bytes]", gzip.GzipFile(fileobj=self._raw))
        wide = magic in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        self._wide = codecs.getincrementaldecoder("utf-16")("replace") if wide else None

    def read(self) -> bytes:
        """The next block, empty at the (present) end. A damaged gzip ends there, noted."""
        try:
            data = self._file.read(BLOCK)
        except (OSError, EOFError, zlib.error):
            self.problem = "damaged or cut short"
            return b""
        self.size += len(data)
        if self._wide is not None:
            return self._wide.decode(data).encode()
        return data

    def close(self) -> None:
        self._file.close()
        self._raw.close()


def as_text(line: bytes) -> str:
    return line[:LINE_LIMIT].decode("utf-8", "replace")


def feed_block(sink: Sink, block: bytes, first_line: int) -> int:
    """Give every line of `block` to the reader; return the number of the line after it."""
    bulk = getattr(sink, "bulk", b"")
    if not bulk or bulk not in block:
        return _feed_lines(sink, block.split(b"\n"), first_line)
    return _feed_runs(cast(BulkSink, sink), block, first_line)


def _feed_lines(sink: Sink, lines: list[bytes], line_no: int) -> int:
    for line in lines:
        sink.feed(line_no, as_text(line))
        line_no += 1
    return line_no


def _feed_runs(sink: BulkSink, block: bytes, line_no: int) -> int:
    """Split at the bulk lines, so that only the pieces with other lines cost Python time."""
    pieces = (b"\n" + block).split(b"\n" + sink.bulk)
    if pieces[0]:
        line_no = _feed_lines(sink, pieces[0][1:].split(b"\n"), line_no)
    start = 1
    mixed = [i for i, piece in enumerate(pieces) if b"\n" in piece]
    for i in [*mixed, len(pieces)]:
        if i < start:
            continue
        run = pieces[start:i]
        others: list[bytes] = []
        if i < len(pieces):
            head, *others = pieces[i].split(b"\n")
            run.append(head)
        if run:
            sink.feed_bulk(line_no, run)
            line_no += len(run)
        line_no = _feed_lines(sink, others, line_no)
        start = i + 1
    return line_no


def sample(block: bytes, limit: int = 400) -> list[str]:
    """The first lines of a block, for telling dialects apart."""
    return [as_text(line) for line in block.split(b"\n", limit)[:limit]]


def blocks(log: LogFile, splitter: Splitter) -> Iterator[bytes]:
    """Whole-line blocks up to the present end of the file."""
    while data := log.read():
        block = splitter.push(data)
        if block is not None:
            yield block
