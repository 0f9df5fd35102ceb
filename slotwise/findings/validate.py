"""A JSON document against our schema, with messages for people.

Knows the keywords that `schema.py` uses and no others. A test compares its verdicts with those of
jsonschema.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Any

_NAMES = {
    "object": "an object",
    "array": "a list",
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "null": "null",
}


def violations(
    value: Any, schema: dict[str, Any], *, newer: bool = False
) -> Iterator[tuple[str, str]]:
    """(place like `claims[0].status`, message) of everything wrong; `newer` allows unknown keys."""
    definitions = schema.get("$defs", {})

    def walk(value: Any, part: dict[str, Any], place: str) -> Iterator[tuple[str, str]]:
        if "$ref" in part:
            part = definitions[part["$ref"].rpartition("/")[2]]
        allowed = _listed(part.get("type", []))
        if allowed and not any(_is(value, name) for name in allowed):
            yield place, f"is {shown(value)}; expected {' or '.join(_NAMES[a] for a in allowed)}"
            return
        yield from ((place, message) for message in _scalar(value, part))
        if isinstance(value, list):
            if len(value) < part.get("minItems", 0):
                yield place, "is empty; at least one entry is needed"
            for index, item in enumerate(value):
                yield from walk(item, part.get("items", {}), f"{place}[{index}]")
        elif isinstance(value, dict):
            yield from inside(value, part, place)

    def inside(value: dict[str, Any], part: dict[str, Any], place: str) -> Iterator[Any]:
        known, others = part.get("properties", {}), part.get("additionalProperties", True)
        for key in part.get("required", []):
            if key not in value:
                yield _join(place, key), "is not there"
        for key, item in value.items():
            if key in known:
                yield from walk(item, known[key], _join(place, key))
            elif isinstance(others, dict):
                yield from walk(item, others, _join(place, key))
            elif not others and not newer:
                yield _join(place, key), f"unknown key{did_you_mean(key, known)}"

    yield from walk(value, schema, "")


def did_you_mean(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def shown(value: Any) -> str:
    """A value for a message: short, and whatever it is."""
    for name in ("object", "array"):
        if _is(value, name):
            return _NAMES[name]
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _scalar(value: Any, part: dict[str, Any]) -> Iterator[str]:
    if "const" in part and value != part["const"]:
        yield f"is {shown(value)}; expected '{part['const']}'"
    if "enum" in part and value not in part["enum"]:
        hint = did_you_mean(value, part["enum"]) if isinstance(value, str) else ""
        yield f"is {shown(value)}; expected one of {', '.join(part['enum'])}{hint}"
    if isinstance(value, str):
        if len(value) < part.get("minLength", 0):
            yield "is empty"
        elif "pattern" in part and not re.search(part["pattern"], value):
            yield f"is {shown(value)}; expected the form {part['pattern']}"
    if _is(value, "number") and value < part.get("minimum", value):
        yield f"is {value}; expected {part['minimum']} or more"


def _is(value: Any, name: str) -> bool:
    if name in ("integer", "number"):
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return name == "number" or isinstance(value, int) or value.is_integer()
    types: dict[str, Any] = {"object": dict, "array": list, "string": str, "boolean": bool,
                             "null": type(None)}  # fmt: skip
    return isinstance(value, types[name])


def _listed(types: str | list[str]) -> list[str]:
    return [types] if isinstance(types, str) else types


def _join(place: str, key: str) -> str:
    key = key if len(key) <= 60 else key[:57] + "..."
    return f"{place}.{key}" if place else key
