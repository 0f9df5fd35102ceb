"""Everything that was read and concluded as one JSON document, schema ``slotwise.explain/v1``.

Absent is null with a reason beside it; NaN and infinities never occur (a number that is not finite
becomes null). Nothing is computed here.
"""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Any

from slotwise.explain.compare import Comparison
from slotwise.explain.levers import LeverReport
from slotwise.explain.record import SCHEMA
from slotwise.explain.summary import Explained

MOST_INDENTED = 5_000
UNITS = {"_ms": "milliseconds", "tokens": "count", "bytes": "bytes", "slots": "expert slots"}


def explained_document(result: Explained) -> dict[str, Any]:
    """The reading with each life's summary inside it."""
    document = result.reading.to_dict()
    document |= {"schema": SCHEMA, "kind": "reading", "units": UNITS}
    for life, said in zip(document["lives"], result.summaries, strict=True):
        life["summary"] = plain(said)
    if result.joined is not None:
        document["joined"] = result.joined.to_dict()
    return document


def comparison_document(result: Comparison) -> dict[str, Any]:
    return {"schema": SCHEMA, "kind": "comparison", "units": UNITS, **plain(result)}


def levers_document(report: LeverReport) -> dict[str, Any]:
    return {"schema": SCHEMA, "kind": "levers", "units": UNITS, **plain(report)}


def dumps(document: dict[str, Any]) -> str:
    """The document as text; indented unless it is so long that nobody reads it."""
    requests = sum(len(life["requests"]) for life in document.get("lives", ()))
    indent = 1 if requests <= MOST_INDENTED else None
    return json.dumps(plain(document), indent=indent, allow_nan=False, ensure_ascii=False) + "\n"


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
