"""Pair requests of a log with the rows of a benchmark that sent them.

By token counts and by order, with a check, never by position alone: the rows and the
requests are aligned as two sequences in which equal token counts may be matched, skipping
what has no partner on either side. What could not be paired is listed. The only text kept
from a results file is the name of the field a number came from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slotwise.errors import SlotwiseError
from slotwise.explain.record import Request, Value

PROMPT = ("prompt_tokens", "n_prompt", "input_tokens", "prompt_n_total", "prompt_len", "prompt")
CACHED = ("cached_tokens", "cached_prompt_tokens", "reused_tokens", "cache_n", "cached", "reused")
READ = ("read_tokens", "fresh_tokens", "uncached_tokens", "prompt_n", "fresh", "read")
OUTPUT = ("completion_tokens", "output_tokens", "generated_tokens", "predicted_n", "generated")
PROMPT_MS = ("server_prompt_ms", "prompt_ms", "prefill_ms")
TTFT_MS = ("ttft_ms", "client_ttft_ms", "time_to_first_token_ms", "first_token_ms")
TTFT_S = ("ttft_s", "ttft_seconds", "client_ttft_s", "time_to_first_token_s")
NESTED = ("timings", "usage", "client", "server", "tokens", "metrics", "prompt_tokens_details")

SIZE_LIMIT = 64 << 20
ROWS_LIMIT = 200_000
PAIRS_LIMIT = 4_000_000
DEPTH_LIMIT = 12


@dataclass(frozen=True, slots=True)
class Row:
    """One benchmark row. Tokens are counts, times are ms; None where it has none."""

    index: int
    prompt: int | None
    cached: int | None
    read: int | None
    output: int | None
    prompt_ms: float | None
    ttft_ms: float | None


@dataclass(frozen=True, slots=True)
class Joined:
    """The requests with what their row said, and everything that stayed alone."""

    requests: tuple[Request, ...]
    pairs: tuple[tuple[int, int], ...]
    """(position in the requests, row index)."""
    unpaired_requests: tuple[int, ...]
    unpaired_rows: tuple[int, ...]
    method: str
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "pairs": [list(pair) for pair in self.pairs],
            "unpaired_requests": list(self.unpaired_requests),
            "unpaired_rows": list(self.unpaired_rows),
            "method": self.method,
            "warnings": list(self.warnings),
        }


def read_rows(path: Path) -> list[Row]:
    """The rows of a results file: JSON (rows at any depth) or JSON lines.

    Raises SlotwiseError when it cannot be read or has no row with token counts or times.
    """
    try:
        if path.stat().st_size > SIZE_LIMIT:
            raise SlotwiseError(
                f"{path.name} is larger than {SIZE_LIMIT >> 20} MiB",
                next_step="Give the rows of the requests in this log only.",
            )
        text = path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise SlotwiseError(
            f"{path.name} cannot be read: {error.strerror}", next_step="Check the path."
        ) from error
    rows = [row_of(found, i) for i, found in enumerate(_rows(_parse(text, path.name), 0))]
    if not rows:
        raise SlotwiseError(
            f"{path.name} has no row with prompt tokens or read tokens and a time",
            next_step=f"Name the fields {PROMPT[0]}, {CACHED[0]} and {TTFT_MS[0]}.",
        )
    return rows[:ROWS_LIMIT]


def _parse(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise SlotwiseError(f"{name} is nested too deeply", next_step="Flatten it.") from error
    except ValueError:
        pass
    out: list[Any] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            out.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise SlotwiseError(
                f"{name}, line {number}: neither a JSON document nor JSON lines",
                next_step="Give the benchmark's results as JSON.",
            ) from error
    return out


def _rows(node: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    """Objects that have token counts and a time, in document order; lists before scalars."""
    if depth > DEPTH_LIMIT:
        return
    if isinstance(node, dict):
        row = row_of(node, 0)
        tokens = row.prompt is not None or row.read is not None
        if tokens and (row.prompt_ms is not None or row.ttft_ms is not None):
            yield node
            return
        for value in node.values():
            yield from _rows(value, depth + 1)
    elif isinstance(node, list):
        for value in node:
            yield from _rows(value, depth + 1)


def row_of(fields: Mapping[str, Any], index: int) -> Row:
    """The numbers of one row under any of their common names, also one level down."""
    cached, read, prompt = _count(fields, CACHED), _count(fields, READ), _count(fields, PROMPT)
    if prompt is None and cached is not None and read is not None:
        prompt = cached + read
    if read is None and prompt is not None and cached is not None:
        read = prompt - cached
    prompt_ms = _number(fields, PROMPT_MS)
    ttft = _first_token_ms(fields, prompt_ms)
    return Row(index, prompt, cached, read, _count(fields, OUTPUT), prompt_ms, ttft)


def _first_token_ms(fields: Mapping[str, Any], prompt_ms: float | None) -> float | None:
    """A field called only ``ttft`` is taken as ms when seconds cannot be meant."""
    if (ms := _number(fields, TTFT_MS)) is not None:
        return ms
    if (seconds := _number(fields, TTFT_S)) is not None:
        return seconds * 1e3
    bare = _number(fields, ("ttft",))
    if bare is None:
        return None
    limit = 1000.0 if prompt_ms is None else max(1.0, 0.99 * prompt_ms)
    return bare if bare >= limit else bare * 1e3


def _number(fields: Mapping[str, Any], names: Sequence[str]) -> float | None:
    places = [fields, *(v for k in NESTED if isinstance(v := fields.get(k), dict))]
    for name in names:
        for place in places:
            value = place.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e15:
                return float(value)
    return None


def _count(fields: Mapping[str, Any], names: Sequence[str]) -> int | None:
    value = _number(fields, names)
    return int(value) if value is not None and value == int(value) else None


def fits(request: Request, row: Row) -> bool:
    """Whether every token count that both sides have agrees, and at least one is there."""
    checks = [
        request.prompt.value == row.prompt if _both(request.prompt, row.prompt) else None,
        request.reused.value == row.cached if _both(request.reused, row.cached) else None,
        request.generated.value == row.output if _both(request.generated, row.output) else None,
    ]
    if row.prompt is None and row.read is not None and request.read_planned.known:
        checks.append(request.read_planned.value == row.read - 1)
    if not request.prompt.known and row.read is not None and request.read.known:
        # an engine that logs what it read only; some count the last token to the read
        checks.append(request.read.value in (row.read, row.read - 1))
    return any(c is True for c in checks[:1] + checks[3:]) and False not in checks


def _both(value: Value, other: int | None) -> bool:
    return value.known and other is not None


def join(requests: Sequence[Request], rows: Sequence[Row]) -> Joined:
    """Pair in order, with the most pairs there can be; check each pair's prompt times."""
    pairs = _align(requests, rows)
    with_rows = dict(pairs)
    out = tuple(
        _with_row(request, rows[with_rows[i]]) if i in with_rows else request
        for i, request in enumerate(requests)
    )
    taken = set(with_rows.values())
    warnings = tuple(w for i, j in pairs if (w := _check(requests[i], rows[j], i)))
    return Joined(
        requests=out,
        pairs=tuple((i, rows[j].index) for i, j in pairs),
        unpaired_requests=tuple(i for i in range(len(requests)) if i not in with_rows),
        unpaired_rows=tuple(row.index for j, row in enumerate(rows) if j not in taken),
        method="same token counts, in the same order, skipping what has no partner; "
        "engine prompt times compared where both sides have one",
        warnings=warnings,
    )


def _align(requests: Sequence[Request], rows: Sequence[Row]) -> list[tuple[int, int]]:
    """The longest common subsequence; plain order first when the tables would be too large."""
    start = 0
    while start < min(len(requests), len(rows)) and fits(requests[start], rows[start]):
        start += 1
    head = [(i, i) for i in range(start)]
    left, right = requests[start:], rows[start:]
    if len(left) * len(right) > PAIRS_LIMIT:
        return head + [(i + start, j + start) for i, j in _greedy(left, right)]
    best = [[0] * (len(right) + 1) for _ in range(len(left) + 1)]
    for i in range(len(left) - 1, -1, -1):
        for j in range(len(right) - 1, -1, -1):
            best[i][j] = max(best[i + 1][j], best[i][j + 1])
            if fits(left[i], right[j]):
                best[i][j] = max(best[i][j], best[i + 1][j + 1] + 1)
    return head + _walk(best, left, right, start)


def _walk(
    best: list[list[int]], left: Sequence[Request], right: Sequence[Row], start: int
) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    i = j = 0
    while i < len(left) and j < len(right):
        if fits(left[i], right[j]) and best[i][j] == best[i + 1][j + 1] + 1:
            out.append((i + start, j + start))
            i, j = i + 1, j + 1
        elif best[i + 1][j] >= best[i][j + 1]:
            i += 1
        else:
            j += 1
    return out


def _greedy(left: Sequence[Request], right: Sequence[Row]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    i = 0
    for j, row in enumerate(right):
        ahead = range(i, min(len(left), i + 50))
        found = next((k for k in ahead if fits(left[k], row)), None)
        if found is not None:
            out.append((found, j))
            i = found + 1
    return out


def _check(request: Request, row: Row, position: int) -> str:
    """A warning when the two sides' prompt times contradict each other."""
    engine = request.prompt_ms.value
    if engine is None:
        return ""
    if row.prompt_ms is not None and abs(row.prompt_ms - engine) > max(1.0, 0.002 * engine):
        return (
            f"request {position}, row {row.index}: prompt_ms {engine:g} in the log, "
            f"{row.prompt_ms:g} in the row; the pair may be wrong"
        )
    if row.ttft_ms is not None and row.ttft_ms < engine - 1:
        return (
            f"request {position}, row {row.index}: the client's first token at {row.ttft_ms:g} ms "
            f"is before the end of the read at {engine:g} ms; the pair may be wrong"
        )
    return ""


def _with_row(request: Request, row: Row) -> Request:
    """The request with the client's clock. The engine's own numbers stay as they were."""
    facts = dict(request.facts)
    if row.prompt_ms is not None:
        facts["joined prompt_ms"] = Value.measured(row.prompt_ms)
    if row.ttft_ms is None:
        return replace(request, facts=facts)
    if request.prompt_ms.value is not None:
        why = "client time to first token - prompt_ms: queue, template, first window, transport"
        outside = row.ttft_ms - (row.prompt_ms or request.prompt_ms.value)
        facts["outside prompt_ms"] = Value.derived(outside, why)
    return replace(request, ttft_ms=Value.measured(row.ttft_ms), facts=facts)
