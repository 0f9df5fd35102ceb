"""Run records of a ladder (`slotwise.ladder/v1`): one life per arm, one request per sample.

A sample that was paired with the server's trace has that request's phases, with the client's clock
around them; the others have what the answer itself said. Each arm's first samples, in which the
server was cold, are a life of their own. A sample that was refused or failed is not a finished
request.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slotwise.explain.readers.base import Unknown
from slotwise.explain.readers.common import VERSION
from slotwise.explain.record import Life, Phase, Request, Status, Value, safe_name, shown_name
from slotwise.trace.ledger import PHASES

SCHEMA = "slotwise.ladder/v1"
LARGEST = 256 << 20
LONGEST_TEXT = 200
FIRST = "-first"
"""Ending of the name of a life of first samples."""
_NOT_SAID = "the server does not say"
_HOWS = ("measured", "derived", "bounded", "missing")
_STATUS: dict[str, Status] = {"done": "done", "cancelled": "cancelled", "incomplete": "incomplete"}
_VERSION = re.compile(VERSION)
_NO_SENTENCE = re.compile(
    r"[@\\$]|://|/\w+/|\b(?=[a-zA-Z_]*\d)(?=\d*[A-Za-z])\w{8,}|\w{21,}|[^\x20-\x7e]"
)
"""What our own remarks never hold, and paths, keys and addresses do."""
_META = ("n_params", "n_vocab", "n_ctx_train", "n_embd", "size")


class LadderRecordReader:
    """Reads one file, which is one JSON document."""

    name = "ladder"

    def __init__(self, file: str) -> None:
        self._file = file
        self._lines: list[str] = []
        self._size = 0
        self.unknown = Unknown(["schema", "run", "samples", "arms"])

    def sniff(self, lines: Sequence[str]) -> float:
        return 1.0 if any(f'"{SCHEMA}' in line[:200] for line in lines[:5]) else 0.0

    def feed(self, line_no: int, line: str) -> None:
        self._size += len(line)
        if self._size <= LARGEST:
            self._lines.append(line)

    def finish(self) -> list[Life]:
        try:
            data = json.loads("\n".join(self._lines))
        except (ValueError, RecursionError):
            note = "not a whole JSON document: the record is damaged or cut"
            return [Life(dialect=self.name, file=self._file, first_line=1, notes=(note,))]
        return lives_of(data, file=self._file) if isinstance(data, dict) else []


def lives_of(data: Mapping[str, Any], *, file: str) -> list[Life]:
    """Lives called ``FILE:ARM`` and ``FILE:ARM-first`` out of a run record."""
    lives = []
    for arm in _objects(data, "arms"):
        own = [s for s in _objects(data, "samples") if s.get("arm") == arm.get("name")]
        for cold in (False, True):
            samples = [s for s in own if bool(s.get("cold")) == cold]
            if samples:
                lives.append(_life(arm, samples, file=file, cold=cold, status=data.get("status")))
    return lives


def _life(
    arm: Mapping[str, Any], samples: Sequence[Mapping[str, Any]], *, file: str, cold: bool,
    status: Any,
) -> Life:  # fmt: skip
    server = next(iter(_objects(arm, "servers")), {})
    requests = tuple(_request(i, s, cold=cold) for i, s in enumerate(samples))
    notes = ["one request per sample of a ladder; a line number is that of a sample"]
    if status != "done":
        notes.append(f"the run is {status if status in ('running', 'interrupted') else 'failed'}")
    return Life(
        dialect="ladder",
        version=_version(server),
        file=f"{file}:{shown_name(str(arm.get('name'))[:LONGEST_TEXT])}{FIRST if cold else ''}",
        first_line=1,
        capabilities={"paired with a trace": any(s.get("trace") for s in samples)},
        facts=_facts(server),
        requests=requests,
        notes=tuple(notes),
    )


def _facts(server: Mapping[str, Any]) -> dict[str, Value]:
    facts = {}
    for model in _objects(server, "models")[:1]:
        meta = model.get("meta")
        for key in _META:
            if (value := _number(meta, key)) is not None:
                facts[f"model {key}"] = Value.measured(value)
    return facts


def _request(index: int, sample: Mapping[str, Any], *, cold: bool) -> Request:
    status: Status = "done" if sample.get("status") == "ok" else "failed"
    number = int(_number(sample, "index") or 0) + 1
    warnings = [] if status == "done" else [_why(sample)]
    common: dict[str, Any] = {
        "index": index, "lines": (number, number), "first_of_life": cold, "warmed": not cold,
        "ttft_ms": _edge(sample, "first_token"),
    }  # fmt: skip
    trace = sample.get("trace")
    if isinstance(trace, Mapping):
        return _traced(trace, sample, common, status, warnings)
    return _untraced(sample, common, status, warnings)


def _why(sample: Mapping[str, Any]) -> str:
    """Why it is no finished sample; the words of a failure may be what a server answered."""
    if sample.get("status") == "refused":
        return f"refused: {_text(sample.get('why'))}"
    return safe_name(str(sample.get("status"))) or "failed"


def _traced(
    trace: Mapping[str, Any], sample: Mapping[str, Any], common: dict[str, Any], status: Status,
    warnings: list[str],
) -> Request:  # fmt: skip
    values: dict[str, Any] = {
        key: _value(trace.get(key))
        for key in ("prompt", "reused", "read_planned", "read", "generated", "prompt_ms",
                    "decode_ms", "slots_lent", "slots_refilled")
    }  # fmt: skip
    for key, served in (("prompt", "prompt"), ("reused", "cached"), ("generated", "generated")):
        if not values[key].known:
            values[key] = _known(_number(sample.get("tokens"), served))
    engine = _STATUS.get(str(trace.get("status")), "failed")
    facts = trace.get("facts")
    return Request(
        **common,
        **values,
        status=status if engine == "done" else engine,
        phases=tuple(_phases(trace, "phases")),
        remainders=tuple(_phases(trace, "remainders")),
        cannot_tell=_texts(trace, "cannot_tell"),
        warnings=(*warnings, *_texts(trace, "warnings")),
        facts={n: _value(v) for k, v in facts.items() if (n := safe_name(str(k)))}
        if isinstance(facts, Mapping)
        else {},
    )


def _untraced(
    sample: Mapping[str, Any], common: dict[str, Any], status: Status, warnings: list[str]
) -> Request:
    tokens, timings = sample.get("tokens"), sample.get("timings")
    prompt, cached = _number(tokens, "prompt"), _number(tokens, "cached")
    read, prompt_ms = _number(timings, "prompt_n"), _known(_number(timings, "prompt_ms"))
    none = Value.missing("no trace was paired with this sample")
    planned = _known(read)
    if read is None and prompt is not None:
        planned = Value.derived(prompt - (cached or 0), "prompt tokens without cached ones")
    phases, remainders = [], []
    ttft = common["ttft_ms"].value
    if prompt_ms.value is not None:
        phases.append(Phase("prompt eval", prompt_ms, tokens=None if read is None else int(read)))
        if ttft is not None:
            rest = Value.derived(
                ttft - prompt_ms.value,
                "client's first token - prompt_ms: queue, template, tokenizing, sampling, network",
            )
            remainders.append(Phase("first token - prompt_ms", rest))
    return Request(
        **common,
        status=status,
        prompt=_known(prompt),
        reused=_known(cached),
        read_planned=planned,
        read=planned,
        generated=_known(_number(tokens, "generated")),
        prompt_ms=prompt_ms,
        decode_ms=_known(_number(timings, "predicted_ms")),
        phases=tuple(phases),
        remainders=tuple(remainders),
        slots_lent=none,
        slots_refilled=none,
        cannot_tell=("phases of the prompt: no trace was paired with this sample",),
        warnings=tuple(warnings),
    )


def _phases(trace: Mapping[str, Any], key: str) -> Iterator[Phase]:
    for entry in _objects(trace, key):
        name = str(entry.get("name"))
        name = name if name in PHASES else safe_name(name) or "a phase"
        counts = {k: int(n) for k in ("tokens", "slots", "bytes")
                  if (n := _number(entry, k)) is not None}  # fmt: skip
        lane, contains = _text(entry.get("lane")) or "request", _text(entry.get("contains")) or ""
        yield Phase(name, _value(entry.get("ms")), lane=lane, contains=contains, **counts)


def _value(entry: Any) -> Value:
    if not isinstance(entry, Mapping) or entry.get("how") not in _HOWS:
        return Value.missing("not in the record")
    how, why = entry["how"], _text(entry.get("why")) or ""
    value = _number(entry, "value")
    if how in ("measured", "derived") and value is None:
        return Value.missing("not in the record")
    return Value(
        value if how in ("measured", "derived") else None, how,
        _number(entry, "low"), _number(entry, "high"), why,
    )  # fmt: skip


def _edge(sample: Mapping[str, Any], name: str) -> Value:
    ms = _number(sample.get("edges_ms"), name)
    return Value.missing("no token came") if ms is None else Value.measured(ms)


def _known(value: float | None) -> Value:
    return Value.missing(_NOT_SAID) if value is None else Value.measured(value)


def _number(place: Any, key: str) -> float | None:
    value = place.get(key) if isinstance(place, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) and abs(value) < 1e18 else None


def _objects(place: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    items = place.get(key)
    return [i for i in items if isinstance(i, Mapping)] if isinstance(items, list) else []


def _texts(place: Mapping[str, Any], key: str) -> tuple[str, ...]:
    items = place.get(key)
    texts = (_text(i) for i in items) if isinstance(items, list) else ()
    return tuple(t for t in texts if t)


def _text(value: Any) -> str | None:
    """A remark as our readers make them; anything else is not shown."""
    if not isinstance(value, str):
        return None
    return "(not shown)" if _NO_SENTENCE.search(value) else value[:LONGEST_TEXT]


def _version(server: Mapping[str, Any]) -> str:
    version = server.get("version")
    return version if isinstance(version, str) and _VERSION.fullmatch(version) else ""
