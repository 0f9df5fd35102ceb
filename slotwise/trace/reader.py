"""Reads a trace written by `sinks.py`, plain or gzip.

Tolerates what a killed process leaves (one cut last line, a missing end mark) and event types
of a newer minor version, and says so in `Trace.warnings`. Anything else that does not fit is an
error that names file and line.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slotwise.errors import SlotwiseError
from slotwise.trace.codec import check_schema, decode
from slotwise.trace.events import (
    EVENT_TYPES,
    TRACE_SCHEMA,
    Event,
    Header,
    RequestEnd,
    TraceEnd,
)
from slotwise.trace.record import RequestRecord

_BY_NAME = {event.type: event for event in EVENT_TYPES}


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A trace in memory."""

    header: Header
    events: tuple[Event, ...]
    warnings: tuple[str, ...]
    """What the file lacks or holds beyond this version, one sentence each."""

    @property
    def records(self) -> tuple[RequestRecord, ...]:
        """The records of all requests that ended, in order."""
        ends = (event for event in self.events if isinstance(event, RequestEnd))
        return tuple(end.record for end in ends if end.record is not None)


def read_trace(path: Path) -> Trace:
    """Read a trace file. Raises SlotwiseError (file, line, what was expected)."""
    lines, warnings = _lines(path)
    if not lines:
        raise SlotwiseError(
            f"{path} has no whole line, expected a trace header of {TRACE_SCHEMA}",
            next_step="Give a file written by `--trace`.",
        )
    header = _header(path, lines[0])
    events: list[Event] = []
    unknown: Counter[str] = Counter()
    for number, line in enumerate(lines[1:], start=2):
        event = _event(path, number, line, unknown)
        if event is not None:
            events.append(event)
    warnings += [f"{n} events of unknown type {name!r} skipped" for name, n in unknown.items()]
    if not events or not isinstance(events[-1], TraceEnd):
        warnings.append("no end mark: the trace is still being written, or its process was killed")
    return Trace(header=header, events=tuple(events), warnings=tuple(warnings))


def _lines(path: Path) -> tuple[list[bytes], list[str]]:
    """The whole lines of a file; a cut last one is left out and reported."""
    data, warnings = _content(path)
    *lines, rest = data.split(b"\n")
    if rest:
        warnings.append(f"the last line is cut after {len(rest)} bytes and was left out")
    return lines, warnings


def _content(path: Path) -> tuple[bytes, list[str]]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SlotwiseError(f"{path}: cannot be read: {error.strerror}") from error
    return _unpacked(path, data) if data[:2] == b"\x1f\x8b" else (data, [])


def _unpacked(path: Path, data: bytes) -> tuple[bytes, list[str]]:
    plain = b""
    while data:
        unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        try:
            plain += unpacker.decompress(data)
        except zlib.error as error:
            raise SlotwiseError(f"{path}: damaged gzip data: {error}") from error
        if not unpacker.eof:
            return plain, ["the compressed file is cut"]
        data = unpacker.unused_data
    return plain, []


def _header(path: Path, line: bytes) -> Header:
    data = _json(path, 1, line)
    if data.get("type") != Header.type:
        raise SlotwiseError(
            f"{path} line 1: found type {data.get('type')!r:.40}, expected a trace header",
            next_step="Give a file written by `--trace`.",
        )
    try:
        check_schema(data.get("schema"), TRACE_SCHEMA)
        return decode(Header, data)
    except SlotwiseError as error:
        raise SlotwiseError(f"{path} line 1: {error}", next_step=error.next_step) from error
    except ValueError as error:
        raise SlotwiseError(f"{path} line 1: {error}") from error


def _event(path: Path, number: int, line: bytes, unknown: Counter[str]) -> Event | None:
    data = _json(path, number, line)
    name = data.get("type")
    if not isinstance(name, str) or name not in _BY_NAME:
        unknown[str(name)] += 1
        return None
    try:
        return decode(_BY_NAME[name], data)
    except (ValueError, SlotwiseError) as error:
        raise SlotwiseError(f"{path} line {number} ({name}): {error}") from error


def _json(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SlotwiseError(f"{path} line {number}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise SlotwiseError(f"{path} line {number}: found {line[:40]!r}, expected a JSON object")
    return data
