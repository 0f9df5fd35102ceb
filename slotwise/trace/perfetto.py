"""Exports a trace as Chrome trace-event JSON, which ui.perfetto.dev and chrome://tracing open.

One track per request (its phases as nested slices, then its decode windows), one per lane, and
counters for the pool. Time 0 is the header's clock reading. Nothing is computed here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slotwise.errors import SlotwiseError, UsageError
from slotwise.trace.codec import encode_fields
from slotwise.trace.events import (
    Event,
    LaneWork,
    LoanMade,
    Note,
    PhaseSpan,
    PoolFill,
    RefillDone,
    RefillTotal,
    RequestEnd,
    WindowDone,
)
from slotwise.trace.reader import Trace

Slice = dict[str, Any]
_PROCESS = 1
_NOTES = 1  # thread id of the track that holds notes; requests and lanes follow


def export_perfetto(trace: Trace, out_path: Path, *, overwrite: bool = False) -> None:
    """Write `trace` to `out_path`. UsageError if it exists, SlotwiseError if it cannot be."""
    text = json.dumps(chrome_trace(trace), allow_nan=False)
    try:
        with out_path.open("w" if overwrite else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UsageError(
            f"{out_path} exists already", next_step="Name another file, or give --force."
        ) from error
    except OSError as error:
        raise SlotwiseError(f"{out_path}: cannot be written: {error.strerror}") from error


def chrome_trace(trace: Trace) -> dict[str, Any]:
    """`trace` in the Chrome trace-event format, slices in order of start, parents first."""
    tracks = _Tracks(trace.header.clock_ns)
    slices = [made for event in trace.events for made in _slices(event, tracks)]
    slices.sort(key=lambda made: (made["ts"], -made.get("dur", 0), made["args"].get("depth", 0)))
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "engine_version": trace.header.engine_version,
            "model": encode_fields(trace.header.model),
            "unix_ns_at_0": trace.header.unix_ns,
            "warnings": list(trace.warnings),
        },
        "traceEvents": [*tracks.names(), *slices],
    }


class _Tracks:
    """Gives each request and lane a thread id, and turns clock readings into microseconds."""

    def __init__(self, zero_ns: int) -> None:
        self._zero_ns = zero_ns
        self._ids: dict[str, int] = {"notes": _NOTES}

    def slice(
        self, track: str, name: str, start_ns: int, end_ns: int, args: Slice | None = None
    ) -> Slice:
        return {
            "ph": "X",
            "pid": _PROCESS,
            "tid": self._ids.setdefault(track, len(self._ids) + _NOTES),
            "name": name,
            "ts": (start_ns - self._zero_ns) / 1000,
            "dur": (end_ns - start_ns) / 1000,
            "args": args or {},
        }

    def instant(self, track: str, name: str, at_ns: int, args: Slice) -> Slice:
        made = self.slice(track, name, at_ns, at_ns, args)
        del made["dur"]
        return {**made, "ph": "i", "s": "t"}

    def counter(self, name: str, at_ns: int, values: dict[str, int]) -> Slice:
        ts = (at_ns - self._zero_ns) / 1000
        return {"ph": "C", "pid": _PROCESS, "name": name, "ts": ts, "args": values}

    def names(self) -> list[Slice]:
        process = {"ph": "M", "pid": _PROCESS, "name": "process_name", "args": {"name": "slotwise"}}
        threads = [
            {"ph": "M", "pid": _PROCESS, "tid": tid, "name": "thread_name", "args": {"name": track}}
            for track, tid in self._ids.items()
        ]
        return [process, *threads]


def _slices(event: Event, tracks: _Tracks) -> list[Slice]:
    match event:
        case PhaseSpan():
            track = f"request {event.request}"
            args = {"depth": event.depth}
            return [tracks.slice(track, event.name, event.start_ns, event.end_ns, args)]
        case LaneWork():
            args = {"bytes": event.bytes, "slots": event.slots}
            span = (event.start_ns, event.end_ns)
            return [tracks.slice(f"lane {event.lane}", event.name, *span, args)]
        case WindowDone():
            args = {"tokens": event.tokens, "expert_wait_ns": event.expert_wait_ns}
            span = (event.start_ns, event.end_ns)
            return [tracks.slice(f"request {event.request}", "window", *span, args)]
        case RefillDone():
            args = encode_fields(event)
            return [tracks.slice("refill", event.policy, event.start_ns, event.end_ns, args)]
        case RefillTotal():
            return [tracks.instant("refill", event.end, event.at_ns, encode_fields(event))]
        case PoolFill():
            values = {k: v for k, v in encode_fields(event).items() if k != "at_ns"}
            return [tracks.counter("expert slots", event.at_ns, values)]
        case LoanMade():
            args = encode_fields(event)
            return [tracks.instant(f"request {event.request}", "loan", event.at_ns, args)]
        case Note():
            return [tracks.instant("notes", event.code, event.at_ns, {"text": event.text})]
        case RequestEnd() if event.record is not None:
            ledger = event.record.ledger
            span = (ledger.start_ns, ledger.end_ns)
            name = "to the first token" if ledger.status == "done" else f"{ledger.status} request"
            return [tracks.slice(f"request {event.request}", name, *span)]
        case _:
            return []
