"""Writes a trace as JSON lines, without ever failing or delaying a first token.

Events are kept in memory and encoded when a request ends (or when very many have piled up).
Only whole lines are handed to the file, so a killed process leaves at most one cut line. A disk
that is full ends the trace with a note and lets the request live.

Several threads may use a sink. Reading and exporting are in `reader.py` and `perfetto.py`.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import BinaryIO, Self

from slotwise.errors import SlotwiseError, UsageError
from slotwise.trace.codec import encode_fields
from slotwise.trace.events import (
    Event,
    Header,
    LaneWork,
    Note,
    PhaseSpan,
    RequestEnd,
    TraceEnd,
)
from slotwise.trace.lanes import LaneLog
from slotwise.trace.ledger import CLOCK, SpanHook

MAX_PENDING = 20_000
"""Events kept in memory before they are written in the middle of a request (some 5 MB)."""


class TraceSink:
    """A trace file being written. `stopped` says why it no longer is, "" while it is."""

    def __init__(self, path: Path, header: Header, *, overwrite: bool = False) -> None:
        """Create the file and write the header.

        Raises UsageError if the file exists (unless `overwrite`) or is named .gz, SlotwiseError
        if it cannot be created.
        """
        if path.suffix == ".gz":
            raise UsageError(
                f"{path}: a trace is written uncompressed",
                next_step="Leave out .gz and compress it afterwards; reading takes both.",
            )
        self.path = path
        self.stopped = ""
        self.events_lost = 0
        self._written = 0
        self._size = 0
        self._pending: list[Event] = []
        self._lock = threading.RLock()
        self._file = _create(path, overwrite=overwrite)
        self._write(_line(header), events=0)

    def emit(self, event: Event) -> None:
        """Take one event; the end of a request also writes everything taken so far."""
        with self._lock:
            if self.stopped:
                self.events_lost += 1
                return
            self._pending.append(event)
            if isinstance(event, RequestEnd) or len(self._pending) >= MAX_PENDING:
                self.flush()

    def span_hook(self, request: str) -> SpanHook:
        """`on_span` for the Ledger of `request`: one `phase` event per entry and exit."""

        def on_span(name: str, start_ns: int, end_ns: int, depth: int) -> None:
            self.emit(PhaseSpan(request, name, start_ns, end_ns, depth))

        return on_span

    def take_lanes(self, lanes: LaneLog) -> None:
        """Move the lane spans recorded since the last call here, and note how many were lost."""
        spans, lost = lanes.take()
        for span in spans:
            self.emit(LaneWork(**encode_fields(span)))
        if lost:
            text = "lane spans were dropped for lack of room before the trace could take them"
            self.emit(Note(at_ns=CLOCK(), code="lane-spans-lost", text=text, count=lost))

    def flush(self) -> None:
        """Encode and write what was taken. A failing disk stops the trace instead of raising."""
        with self._lock:
            data = b"".join(_line(event) for event in self._pending)
            self._write(data, events=len(self._pending))
            self._pending.clear()

    def close(self) -> None:
        """Write the rest and the end mark. Further events are counted as lost."""
        with self._lock:
            self.flush()
            self._write(_line(TraceEnd(at_ns=CLOCK(), events=self._written)), events=0)
            self._stop("the trace was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, data: bytes, *, events: int) -> None:
        if self.stopped:
            self.events_lost += events
            return
        try:
            _write_all(self._file, data)
        except OSError as error:
            self.events_lost += events
            self._drop_cut_line()
            self._stop(f"{self.path.name}: tracing stopped, {error.strerror or error}")
        else:
            self._size += len(data)
            self._written += events

    def _drop_cut_line(self) -> None:
        try:
            self._file.truncate(self._size)
        except OSError:
            return  # a pipe or a dead disk; the reader reports the cut line

    def _stop(self, why: str) -> None:
        if not self.stopped:
            self.stopped = why
            try:
                self._file.close()
            except OSError:
                return  # nothing is buffered here, so nothing is lost by it


def _create(path: Path, *, overwrite: bool) -> BinaryIO:
    try:
        # Unbuffered, so that a line is either with the system or still here as an event.
        anew = not overwrite and not path.is_char_device()  # /dev/null is always there
        return path.open("xb" if anew else "wb", buffering=0)
    except FileExistsError as error:
        raise UsageError(
            f"{path} exists already", next_step="Name another file, or give --force."
        ) from error
    except OSError as error:
        raise SlotwiseError(
            f"{path}: the trace cannot be created: {error.strerror}",
            next_step="Name a file in a folder you can write to.",
        ) from error


def _write_all(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _line(event: Event | Header) -> bytes:
    data = {"type": event.type, **encode_fields(event)}
    return json.dumps(data, separators=(",", ":"), allow_nan=False).encode() + b"\n"
