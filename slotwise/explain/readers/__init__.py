"""Log readers, one per dialect, and the registry that picks one for each file.

`read_files` reads each file once, front to back, and never raises on what a file holds.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from slotwise.explain.readers.base import Reader, Unknown
from slotwise.explain.readers.lines import (
    BLOCK,
    LogFile,
    Splitter,
    as_text,
    blocks,
    feed_block,
)
from slotwise.explain.record import Life, Reading, shown_name

READERS = (
    "ladder_record:LadderRecordReader",  # first: it holds blocks of the other dialects
    "strata:StrataReader",
    "strata_ladder:StrataLadderReader",
    "strata_turns:StrataTurnsReader",
    "llama_cpp:LlamaCppReader",
    "slotwise_trace:SlotwiseTraceReader",
    "vllm:VllmReader",
    "sglang:SglangReader",
    "ktransformers:KTransformersReader",
    "bigmoe:BigMoeReader",
)
"""Module and class of each reader. Ties go to the earlier one."""

SURE_ENOUGH = 0.15
SURE = 0.9
"""From here on it does not matter how few lines said so."""
DENSE = 0.17
"""Share of a small file's lines that must speak for the dialect, if it is not `SURE`."""
FEW = 10
SAMPLE = 400
"""Lines looked at together to tell dialects apart."""


def new_readers(file: str) -> list[Reader]:
    """One fresh reader of every dialect for the file of this base name."""
    out: list[Reader] = []
    for entry in READERS:
        module, _, name = entry.partition(":")
        try:
            found = import_module(f"slotwise.explain.readers.{module}")
        except ModuleNotFoundError as error:
            if error.name != f"slotwise.explain.readers.{module}":
                raise
            continue
        out.append(getattr(found, name)(file))
    return out


@contextmanager
def _no_collection() -> Iterator[None]:
    """Readers make no cycles, and the collector would walk every request kept so far."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class FileReading:
    """One file being read: `pump` takes what is there now, then look at the fields."""

    def __init__(self, path: Path) -> None:
        self.file = shown_name(path.name)
        self.unknown = Unknown(())
        self.reader: Reader | None = None
        self._passed = 0
        """Lines given to the reader, or given up before there was one."""
        self._waiting: list[bytes] = []
        """Lines too few to tell a dialect by; they are looked at again with what follows."""
        self._log = LogFile(path)
        self._splitter = Splitter()

    @property
    def size(self) -> int:
        return self._log.size

    @property
    def lines(self) -> int:
        return self._passed + len(self._waiting)

    def pump(self) -> bool:
        """Read to the present end of the file. Returns whether there was anything new.

        A file that was rotated or cut shorter is read to its end, then the new one from its
        beginning; line numbers go on.
        """
        before = self.size
        self._drain()
        if self._log.replaced():
            self._drain()
            if rest := self._splitter.rest():
                self._take(rest)
            self._splitter.restart()
            self._log.reopen()
            self._drain()
        return self.size > before

    def _drain(self) -> None:
        with _no_collection():
            for block in blocks(self._log, self._splitter):
                self._take(block)

    def _take(self, block: bytes) -> None:
        if self.reader is None:
            block = self._recognise(block.split(b"\n"))
        if self.reader is not None:
            self._passed = feed_block(self.reader, block, self._passed + 1) - 1

    def _recognise(self, lines: list[bytes]) -> bytes:
        """Look for a dialect; count the lines before it. Returns what is from there on."""
        lines, self._waiting = self._waiting + lines, []
        for start in range(0, len(lines), SAMPLE):
            some = lines[start : start + SAMPLE]
            texts = [as_text(line) for line in some]
            scored = [(r.sniff(texts), -i, r) for i, r in enumerate(new_readers(self.file))]
            score, _, best = max(scored, key=lambda entry: entry[:2])
            if score >= SURE or (score >= SURE_ENOUGH and _dense(best, texts)):
                self.reader = best
                return b"\n".join(lines[start:])
            if len(some) < SAMPLE and sum(map(len, some)) < BLOCK:
                self._waiting = some
                break
            for text in texts:
                self.unknown.add(text)
            self._passed += len(texts)
        return b""

    def end(self, *, half_line: bool = True) -> list[str]:
        """Take a last line without its end, close the file, say what went wrong."""
        problems: list[str] = []
        if half_line and self._log.no_more():
            self._drain()
        if half_line and (rest := self._splitter.rest()):
            self._take(rest)
            problems.append("the last line has no end")
        if self._splitter.cut:
            problems.append(f"{self._splitter.cut} lines over 64 KiB were cut")
        if self._log.problem:
            problems.append(self._log.problem)
        self._log.close()
        return problems

    def lives(self) -> list[Life]:
        return self.reader.finish() if self.reader is not None else []

    def unknown_counts(self) -> dict[str, int]:
        waiting = Unknown(())
        waiting.counts.update(self.unknown.counts)
        for line in self._waiting:
            waiting.add(as_text(line))
        counts = waiting.counts
        reader_unknown = getattr(self.reader, "unknown", None)
        if isinstance(reader_unknown, Unknown):
            for shape, count in reader_unknown.counts.items():
                counts[shape] = counts.get(shape, 0) + count
        return counts


def _dense(reader: Reader, texts: Sequence[str]) -> bool:
    """Whether this is more than a text that quotes a line or two of a log."""
    texts = [text for text in texts if text and not text.isspace()]
    if len(texts) < FEW or texts[0].lstrip("\ufeff \t")[:1] in ("{", "["):
        return True
    return sum(reader.sniff([text]) > 0 for text in texts) >= DENSE * len(texts)


def read_files(paths: Sequence[Path | str], *, follow: bool = False) -> Reading:
    """Read logs into one `Reading`. What cannot be read is listed in `unreadable`.

    With `follow` a half last line is left for later instead of being taken as it is.
    """
    readings: list[FileReading] = []
    unreadable: list[str] = []
    for path in map(Path, paths):
        try:
            reading = FileReading(path)
            reading.pump()
        except OSError as error:
            why = error.strerror or type(error).__name__
            unreadable.append(f"{shown_name(path.name)}: {why}")
            continue
        readings.append(reading)
        problems = reading.end(half_line=not follow)
        unreadable += [f"{reading.file}: {problem}" for problem in problems]
        if reading.reader is None:
            unreadable.append(f"{reading.file}: no known dialect")
    return combine(readings, unreadable)


def combine(readings: Sequence[FileReading], unreadable: Sequence[str]) -> Reading:
    unknown: dict[str, int] = {}
    for reading in readings:
        for shape, count in reading.unknown_counts().items():
            unknown[shape] = unknown.get(shape, 0) + count
    return Reading(
        lives=tuple(life for reading in readings for life in reading.lives()),
        unknown=unknown,
        lines=sum(reading.lines for reading in readings),
        bytes=sum(reading.size for reading in readings),
        files=tuple(reading.file for reading in readings),
        unreadable=tuple(unreadable),
    )


def follow_files(
    paths: Sequence[Path | str],
    *,
    interval_s: float = 0.5,
    keep_going: Callable[[], bool] = lambda: True,
) -> Iterator[Reading]:
    """Yield a `Reading` now and whenever a file has grown, until `keep_going` says no.

    Raises OSError when a file cannot be opened.
    """
    readings: list[FileReading] = []
    try:
        readings += (FileReading(Path(path)) for path in paths)
        first = True
        while True:
            grown = [reading.pump() for reading in readings]
            if first or any(grown):
                yield combine(readings, ())
            first = False
            if not keep_going():
                return
            time.sleep(interval_s)
    finally:
        for reading in readings:
            reading.end(half_line=False)
