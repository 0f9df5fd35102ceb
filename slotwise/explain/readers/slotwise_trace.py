"""slotwise's own traces (`slotwise.trace/v1`), read line by line.

The ledger's phases are the request's own and add up to its time to first token; lanes overlap.
Everything comes from the `request_end` records; spans of phases, lanes and windows repeat
what those say and are passed over. A newer version is read as far as it is understood, and said.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from slotwise.explain.readers.common import VERSION, Shapes, request
from slotwise.explain.record import Life, Phase, Request, Status, Value
from slotwise.trace.ledger import PHASES

SCHEMA = "slotwise.trace/v1"
OPEN_LIMIT = 10_000
_PASSED_OVER = ("phase", "lane", "window", "pool", "loan", "refill")
_REFILL_ENDS = ("full", "cut_short", "running")
_TYPE = re.compile(r'^\s*\{\s*"type"\s*:\s*"([a-z_]{1,32})"')
_VERSION = re.compile(VERSION)
_OUTSIDE_PROMPT = ("queue", "template", "tokenize", "first_window", "sample", "emit")
_LANE = re.compile(r"(?:(?:io|refill|lane|gpu|draft|device)[ .-]?\d{0,3})")
_CODES = ("lane-spans-lost", "store")
_EDGES = ("first_byte", "first_event", "first_token", "first_content")
_STATUS: dict[str, Status] = {"done": "done", "cancelled": "cancelled", "failed": "failed"}


class _LifeState:
    def __init__(self, line_no: int) -> None:
        self.first_line = line_no
        self.version = ""
        self.facts: dict[str, Value] = {}
        self.notes: list[str] = []
        self.requests: list[Request] = []
        self.started: dict[str, int] = {}
        self.ended_as: dict[str, int] = {}
        """Index of the latest requests by name, for what is said of them later."""
        self.skipped = 0
        self.ended = False


class SlotwiseTraceReader:
    """Reads one file; each header begins a life."""

    name = "slotwise"

    def __init__(self, file: str) -> None:
        self._file = file
        self._lives: list[_LifeState] = []
        self.unknown = Shapes("type header request phase lane note")

    def sniff(self, lines: Sequence[str]) -> float:
        for line in lines:
            if '"slotwise.trace/v' in line[:300] and '"header"' in line[:300]:
                return 1.0
            if '"slotwise.request/v' in line or '"slotwise.ledger/v' in line:
                return 0.9
        return 0.0

    def feed(self, line_no: int, line: str) -> None:
        kind = _TYPE.match(line)
        if kind is not None and kind[1] in _PASSED_OVER:
            return
        data = _object(line)
        if data is None:
            self.unknown.see(line)
            return
        if data.get("type") == "header" or not self._lives:
            self._lives.append(_LifeState(line_no))
        state = self._lives[-1]
        match data.get("type"):
            case "header":
                _header(state, data)
            case "request_start":
                if len(state.started) < OPEN_LIMIT:
                    state.started[str(data.get("request"))] = line_no
            case "request_end":
                start = state.started.pop(str(data.get("request")), line_no)
                _ended(state, (start, line_no), data)
                _remember(state, data)
            case "refill_done":
                _refill_done(state, data)
            case "trace_end":
                state.ended = True
            case "note":
                _note(state, data)
            case _:
                state.skipped += 1

    def finish(self) -> list[Life]:
        return [self._life(state) for state in self._lives]

    def _life(self, state: _LifeState) -> Life:
        requests = list(state.requests)
        for line in sorted(state.started.values()):
            requests.append(request(len(requests), (line, line), "incomplete"))
        notes = list(state.notes)
        if state.skipped:
            notes.append(f"{state.skipped} events of unknown type were skipped")
        if not state.ended:
            notes.append("no end mark: still being written, or the process was killed")
        return Life(
            dialect=self.name,
            version=state.version,
            file=self._file,
            first_line=state.first_line,
            capabilities={"phases": True, "lanes": True, "loan": True, "refill": True},
            facts=state.facts,
            requests=tuple(requests),
            notes=tuple(notes),
        )


def _object(line: str) -> dict[str, Any] | None:
    if not line.lstrip().startswith("{"):
        return None
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _map(data: Any, key: str) -> Mapping[str, Any]:
    inner = data.get(key) if isinstance(data, Mapping) else None
    return inner if isinstance(inner, Mapping) else {}


def _number(data: Mapping[str, Any], key: str) -> float | None:
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < 1e18 else None


def _count(data: Mapping[str, Any], key: str) -> int | None:
    value = _number(data, key)
    return None if value is None else int(value)


def _value(data: Mapping[str, Any], key: str, why: str) -> Value:
    value = _number(data, key)
    return Value.missing(why) if value is None else Value.measured(value)


def _ms(data: Mapping[str, Any], key: str, why: str) -> Value:
    value = _number(data, key)
    return Value.missing(why) if value is None else Value.measured(value / 1e6)


def _header(state: _LifeState, data: Mapping[str, Any]) -> None:
    if data.get("schema") != SCHEMA:
        state.notes.append("another schema than this reader knows: what it shares is read")
    version = data.get("engine_version")
    if isinstance(version, str) and _VERSION.fullmatch(version):
        state.version = version
    model, settings = _map(data, "model"), _map(data, "settings")
    for source, keys in (
        (model, ("layers", "moe_layers", "experts", "experts_used")),
        (settings, ("memory_bytes", "threads", "context_tokens", "chunk_tokens", "io_lanes")),
    ):
        for key in keys:
            if (value := _number(source, key)) is not None:
                state.facts[key] = Value.measured(value)
    for key in ("pool_slots", "slot_bytes"):
        values = model.get(key)
        if isinstance(values, list) and values and all(isinstance(v, int) for v in values):
            total = sum(values) if key == "pool_slots" else max(values)
            state.facts[key] = Value.measured(total)


def _note(state: _LifeState, data: Mapping[str, Any]) -> None:
    code = data.get("code")
    name = code if code in _CODES else "something"
    if len(state.notes) < 100:
        state.notes.append(f"the engine noted {name} ({_count(data, 'count') or 1} times)")


def _ended(state: _LifeState, lines: tuple[int, int], data: Mapping[str, Any]) -> None:
    record = _map(data, "record")
    status = _STATUS.get(str(data.get("status")), "failed")
    index = len(state.requests)
    if not record:
        state.requests.append(
            request(index, lines, status, cannot_tell=("it ended before it had a record",))
        )
        return
    tokens, ledger, decode = _map(record, "tokens"), _map(record, "ledger"), _map(record, "decode")
    loan, refill = _map(record, "loan"), _map(record, "refill")
    phases = _ledger_phases(ledger)
    twice = _number(ledger, "counted_twice_ns") or 0
    none = Value.measured(0)
    reached = ledger.get("status") == "done"
    state.requests.append(
        request(
            index,
            lines,
            status,
            prompt=_value(tokens, "prompt", "not in the record"),
            reused=_value(tokens, "reused", "not in the record"),
            read_planned=_value(tokens, "read_planned", "not in the record"),
            read=_value(tokens, "read", "not in the record"),
            generated=_value(tokens, "generated", "not in the record"),
            prompt_ms=_prompt_ms(phases),
            ttft_ms=_ttft(ledger, reached),
            decode_ms=_ms(decode, "wall_ns", "nothing was decoded after the first token"),
            phases=(*phases, *_lanes(record, refill)),
            slots_lent=_value(loan, "slots", "not in the record") if loan else none,
            slots_refilled=_value(refill, "slots", "not in the record") if refill else none,
            warnings=("the ledger counted time twice",) if twice else (),
            facts=_facts(record, refill, decode) | _price(record, loan, refill),
        )
    )


def _remember(state: _LifeState, data: Mapping[str, Any]) -> None:
    state.ended_as.pop(str(data.get("request")), None)
    state.ended_as[str(data.get("request"))] = len(state.requests) - 1
    if len(state.ended_as) > OPEN_LIMIT:
        del state.ended_as[next(iter(state.ended_as))]


def _refill_done(state: _LifeState, data: Mapping[str, Any]) -> None:
    """What a request's refill did in all, also after the request had ended."""
    index = state.ended_as.get(str(data.get("request")))
    if index is None:
        return
    facts = dict(state.requests[index].facts)
    for key, name, scale in (
        ("saved_misses", "refill_saved_misses", 1),
        ("failed", "refill_failed", 1),
        ("bytes", "refill_bytes", 1),
        ("lane_ns", "refill_lane_ms", 1e6),
    ):
        if (n := _number(data, key)) is not None:
            facts[name] = Value.measured(n / scale)
    if (end := data.get("end")) in _REFILL_ENDS:
        facts["refill_complete"] = Value.measured(int(end == "full"))
    state.requests[index] = replace(
        state.requests[index],
        slots_refilled=_value(data, "slots", "not in the event"),
        facts=facts,
    )


def _ttft(ledger: Mapping[str, Any], reached: bool) -> Value:
    wall = _ms(ledger, "wall_ns", "no ledger in the record")
    if reached or wall.value is None:
        return wall
    return Value.bounded(wall.value, None, "it ended before its first token")


def _ledger_phases(ledger: Mapping[str, Any]) -> list[Phase]:
    out: list[Phase] = []
    for key in _map(ledger, "phases"):
        name, entry = key if key in PHASES else "a newer phase", _map(_map(ledger, "phases"), key)
        ns = _number(entry, "ns")
        if ns is None:
            continue
        out.append(
            Phase(
                name,
                Value.measured(ns / 1e6),
                bytes=_count(entry, "bytes"),
                slots=_count(entry, "slots"),
            )
        )
    return out


def _prompt_ms(phases: Sequence[Phase]) -> Value:
    if not phases:
        return Value.missing("no ledger in the record")
    inside = sum(p.ms.value or 0.0 for p in phases if p.name not in _OUTSIDE_PROMPT)
    return Value.derived(inside, "the ledger without " + ", ".join(_OUTSIDE_PROMPT))


def _lanes(record: Mapping[str, Any], refill: Mapping[str, Any]) -> list[Phase]:
    out: list[Phase] = []
    complete = record.get("lanes_complete") is not False
    for key in _map(record, "lanes"):
        name, entry = _LANE.fullmatch(key), _map(_map(record, "lanes"), key)
        ns = _number(entry, "busy_ns")
        if ns is None:
            continue
        ms = Value.measured(ns / 1e6)
        if not complete:
            ms = Value.bounded(ns / 1e6, None, "older spans of the lane had made room")
        lane = f"lane {name[0]}" if name else "lane"
        out.append(
            Phase("busy", ms, lane=lane, bytes=_count(entry, "bytes"), slots=_count(entry, "slots"))
        )
    lane_ns = _number(refill, "lane_ns")
    if lane_ns is not None:
        out.append(
            Phase(
                "refill",
                Value.measured(lane_ns / 1e6),
                lane="refill lane",
                bytes=_count(refill, "bytes"),
                slots=_count(refill, "slots"),
            )
        )
    return out


def _price(
    record: Mapping[str, Any], loan: Mapping[str, Any], refill: Mapping[str, Any]
) -> dict[str, Value]:
    """What the loan cost and the refill saved, and the forecast beside what happened."""
    facts: dict[str, Value] = {}
    forecast = _map(record, "forecast")
    for source, key, name in (
        (loan, "read_misses", "loan_read_misses"),
        (loan, "decode_misses", "loan_decode_misses"),
        (loan, "bytes", "loan_bytes"),
        (refill, "bytes", "refill_bytes"),
        (refill, "saved_misses", "refill_saved_misses"),
    ):
        if (n := _number(source, key)) is not None:
            facts[name] = Value.measured(n)
    for key, name in (("time_to_first_token_ns", "forecast_ms"), ("error_ns", "forecast_error_ms")):
        if (ns := _number(forecast, key)) is not None:
            facts[name] = Value.derived(ns / 1e6, "by the engine, from earlier requests' rates")
    return facts


def _facts(
    record: Mapping[str, Any], refill: Mapping[str, Any], decode: Mapping[str, Any]
) -> dict[str, Value]:
    facts: dict[str, Value] = {}
    edges = _map(record, "edges")
    for edge in _EDGES:
        if (ns := _number(edges, f"{edge}_ns")) is not None:
            facts[f"{edge}_ms"] = Value.measured(ns / 1e6)
    for stage in ("prefill_experts", "decode_experts"):
        for key in ("hits", "misses", "bytes"):
            if (n := _number(_map(record, stage), key)) is not None:
                facts[f"{stage}_{key}"] = Value.measured(n)
        if (ns := _number(_map(record, stage), "wait_ns")) is not None:
            facts[f"{stage}_wait_ms"] = Value.measured(ns / 1e6)
    if (ns := _number(refill, "waited_ns")) is not None:
        facts["refill_waited_ms"] = Value.measured(ns / 1e6)
    if (windows := _number(decode, "windows")) is not None:
        facts["windows"] = Value.measured(windows)
    return facts
