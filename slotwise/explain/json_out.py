"""Everything that was read and concluded as one JSON document, schema ``slotwise.explain/v1``.

Absent is null with a reason beside it; NaN and infinities never occur (a number that is not finite
becomes null). Nothing is computed here. A reading is written piece by piece, however many requests
it has.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

from slotwise.explain.compare import Comparison
from slotwise.explain.levers import LeverReport
from slotwise.explain.record import SCHEMA, Life
from slotwise.explain.summary import Explained, Summary

MOST_INDENTED = 5_000
"""Requests; a document with more of them is not indented, since nobody reads it."""
_HOLE = "\0"
"""Where an array belongs that is written piece by piece. No name holds this."""
UNITS = {"_ms": "milliseconds", "tokens": "count", "bytes": "bytes", "slots": "expert slots"}


def explained_pieces(result: Explained) -> Iterator[str]:
    """The reading with each life's summary inside it, as pieces of one JSON text."""
    reading = result.reading
    indented = sum(len(life.requests) for life in reading.lives) <= MOST_INDENTED
    document = replace(reading, lives=()).to_dict() | {"lives": _HOLE}
    document |= {"schema": SCHEMA, "kind": "reading", "units": UNITS}
    if result.joined is not None:
        document["joined"] = result.joined.to_dict()
    both = zip(reading.lives, result.summaries, strict=True)
    lives = (_life_pieces(life, said, indented=indented) for life, said in both)
    before, after = _around_hole(document, depth=0, indented=indented)
    yield before
    yield from _array(lives, depth=1, indented=indented)
    yield after + "\n"


def _life_pieces(life: Life, said: Summary, *, indented: bool) -> Iterator[str]:
    document = replace(life, requests=()).to_dict() | {"requests": _HOLE, "summary": said}
    requests = ([_text(r.to_dict(), depth=4, indented=indented)] for r in life.requests)
    before, after = _around_hole(document, depth=2, indented=indented)
    yield before
    yield from _array(requests, depth=3, indented=indented)
    yield after


def _array(items: Iterable[Iterable[str]], *, depth: int, indented: bool) -> Iterator[str]:
    gap, end = ("\n" + " " * (depth + 1), "\n" + " " * depth) if indented else ("", "")
    between = "[" + gap
    for item in items:
        yield between
        yield from item
        between = "," + (gap or " ")
    yield "[]" if between.startswith("[") else end + "]"


def _around_hole(document: dict[str, Any], *, depth: int, indented: bool) -> list[str]:
    return _text(document, depth=depth, indented=indented).split(json.dumps(_HOLE))


def _text(value: Any, *, depth: int, indented: bool) -> str:
    """The JSON of something that lies `depth` levels inside the document."""
    indent = 1 if indented else None
    text = json.dumps(plain(value), indent=indent, allow_nan=False, ensure_ascii=False)
    return text.replace("\n", "\n" + " " * depth)


def comparison_document(result: Comparison) -> dict[str, Any]:
    return {"schema": SCHEMA, "kind": "comparison", "units": UNITS, **plain(result)}


def levers_document(report: LeverReport) -> dict[str, Any]:
    return {"schema": SCHEMA, "kind": "levers", "units": UNITS, **plain(report)}


def dumps(document: dict[str, Any]) -> str:
    return _text(document, depth=0, indented=True) + "\n"


def plain(value: Any) -> Any:
    """Dataclasses as objects, tuples as lists, numbers that are not finite as null."""
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        # twelve digits: what a clock told, without the dust of binary subtraction
        return float(f"{value:.12g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v) for v in value]
    return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
