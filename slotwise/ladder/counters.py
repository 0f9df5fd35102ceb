"""Reads the counters that prove that an arm was switched on.

`response:` is a path into the blocks of the answer (usage, timings, metrics, slotwise), `props:`
one into /props or else /health, `metrics:` a series of /metrics, as the difference over the sample
(`name{label="value"}`), `trace:` a number of the paired trace request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from slotwise.ladder.arms import Engaged
from slotwise.ladder.clean import clean
from slotwise.ladder.client import Answer, Client, NoAnswer

_SERIES = re.compile(r"([A-Za-z_:][\w:]*(?:\{[^}]*\})?)\s+(\S+)")


def before(client: Client, engaged: Engaged) -> float | None:
    """The series' value before a sample; None for other sources."""
    if engaged.source != "metrics":
        return None
    return series(client, engaged.name)


def after(client: Client, engaged: Engaged, answer: Answer, was: float | None) -> Any:
    """What the counter says of a sample; None where it is absent. `trace:` is not known yet."""
    if engaged.source == "trace":
        return None
    if engaged.source == "response":
        return _scalar(at(answer.blocks, engaged.name))
    if engaged.source == "props":
        pages = (_page(client, path) for path in ("/props", "/health"))
        return next((v for p in pages if (v := _scalar(at(p, engaged.name))) is not None), None)
    now = series(client, engaged.name)
    return None if now is None or was is None else now - was


def of_trace(request: Mapping[str, Any], name: str) -> Any:
    """A value of a trace's request, as slotwise.explain/v1 writes one: `slots_refilled`,
    `facts.windows`, `phase.refill` (ms) and the like."""
    head, _, rest = name.partition(".")
    if head == "phase":
        found = [p["ms"]["value"] for p in request["phases"] if p["name"] == rest]
        known = [ms for ms in found if ms is not None]
        return sum(known) if known else None
    value = at(request, name)
    return value.get("value") if isinstance(value, Mapping) else _scalar(value)


def verdict(engaged: Engaged, value: Any) -> str:
    """Why a sample proves nothing; empty when the counter says that its arm was on."""
    if engaged.holds(value):
        return ""
    if value is None:
        return f"the arm's counter {engaged.counter} is absent"
    return f"not switched on: {engaged.counter} is {value}, expected {engaged.expected}"


def at(tree: Any, path: str) -> Any:
    """The value at a dotted path; None where there is none. Keys may hold dots themselves."""
    if not path:
        return tree
    if not isinstance(tree, Mapping):
        return None
    for key, inner in tree.items():
        if path == key or path.startswith(f"{key}."):
            found = at(inner, path[len(key) + 1 :])
            if found is not None:
                return found
    return None


def series(client: Client, name: str) -> float | None:
    """The sum of a Prometheus series, with or without its labels."""
    try:
        status, _, text = client.get("/metrics")
    except NoAnswer:
        return None
    if status != 200 or not isinstance(text, str):
        return None
    values = []
    for line in text.splitlines():
        found = _SERIES.match(line)
        if found and (found[1] == name or found[1].partition("{")[0] == name):
            try:
                values.append(float(found[2]))
            except ValueError:
                continue
    return sum(values) if values else None


def _page(client: Client, path: str) -> Any:
    try:
        status, _, page = client.get(path)
    except NoAnswer:
        return None
    return page if status == 200 else None


def _scalar(value: Any) -> Any:
    value = clean(value)
    return value if isinstance(value, bool | int | float | str) else None
