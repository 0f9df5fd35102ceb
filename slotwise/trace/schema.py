"""The published JSON Schema of a trace line, made from the event classes.

`python -m slotwise.trace.schema > docs/schemas/trace-v1.json` writes it; a test compares the two.
Every object lists all its fields and allows no others.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from typing import Any

from slotwise.trace.codec import Record, field_types
from slotwise.trace.events import EVENT_TYPES, TRACE_SCHEMA, Header
from slotwise.trace.ledger import PHASES, LedgerRecord

_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean"}
_HOW = {"enum": ["measured", "derived", "bounded", "missing"]}


def trace_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) that one line of a trace, parsed, must satisfy."""
    definitions: dict[str, Any] = {}
    lines = [_object(event, definitions, type=event.type) for event in (Header, *EVENT_TYPES)]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"One line of a {TRACE_SCHEMA} file",
        "description": "The first line is a header. Times are in ns on the clock it names.",
        "oneOf": lines,
        "$defs": dict(sorted(definitions.items())),
    }


def _object(cls: type, definitions: dict[str, Any], *, type: str = "") -> dict[str, Any]:
    properties = {name: _schema(hint, definitions) for name, hint in field_types(cls).items()}
    if type:
        properties = {"type": {"const": type}, **properties}
    if cls is Header:
        properties["schema"] = {"const": TRACE_SCHEMA}
    if cls is LedgerRecord:
        properties["phases"]["propertyNames"] = {"enum": list(PHASES)}
    if issubclass(cls, Record):
        table = {"type": "object", "additionalProperties": _HOW}
        reasons = {"type": "object", "additionalProperties": {"type": "string", "minLength": 1}}
        properties = {
            "schema": {"const": cls.SCHEMA},
            **properties,
            "how": table,
            "missing": reasons,
        }
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _schema(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is types.NoneType:
        return {"type": "null"}
    if dataclasses.is_dataclass(hint):
        cls = typing.cast(type, hint)
        if cls.__name__ not in definitions:
            definitions[cls.__name__] = _object(cls, definitions)
        return {"$ref": f"#/$defs/{cls.__name__}"}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin is types.UnionType:
        return {"anyOf": [_schema(a, definitions) for a in arguments]}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": _schema(arguments[1], definitions)}
    if origin is tuple:
        return {"type": "array", "items": _schema(arguments[0], definitions)}
    return {"type": _PLAIN[hint]}


if __name__ == "__main__":
    print(json.dumps(trace_schema(), indent=1))
