"""Renders what was explained on a terminal with rich: tables per life, summaries, comparisons.

Nothing is computed here. What is too wide for the terminal is shown request by request instead of
being cut. Colour, width and pipes are rich's business (NO_COLOR and FORCE_COLOR are honoured).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from slotwise.explain import wording
from slotwise.explain.join import Joined
from slotwise.explain.record import Life, Phase, Reading, Request, Value
from slotwise.explain.report_arms import comparison, levers
from slotwise.explain.report_parts import bullets, heading, plain_table, sentence
from slotwise.explain.report_summary import summary
from slotwise.explain.summary import Explained, drawn, phase_names

__all__ = ["comparison", "explained", "levers", "request_detail", "unknown_lines"]

MOST_ROWS = 50
_NUMBERS = re.compile(r"[0-9][0-9,.]*")
STATUS = {"done": "", "cancelled": "cancelled", "incomplete": "INCOMPLETE", "failed": "FAILED"}


def explained(result: Explained, *, per_request: bool = False) -> RenderableType:
    """One table and one summary per engine life."""
    parts: list[RenderableType] = []
    for life, said in zip(result.reading.lives, result.summaries, strict=True):
        parts += [heading(_life_title(life)), *_notes(life)]
        if life.requests:
            parts += [_requests(life, per_request=per_request), Text(wording.LEGEND, style="dim")]
            if not per_request:
                parts += _request_remarks(life)
        else:
            parts.append(Text("no request in this life"))
        parts += [Text(""), *summary(said), Text("")]
    if result.joined is not None:
        parts += [*_joined(result.joined), Text("")]
    parts += _reading_notes(result.reading)
    return Group(*parts)


def unknown_lines(reading: Reading) -> RenderableType:
    """The shapes of the lines no reader understood, most frequent first."""
    table = plain_table("lines", "shape (digits are N, words that are not Strata's or llama's …)")
    for shape, count in sorted(reading.unknown.items(), key=lambda item: -item[1]):
        table.add_row(f"{count:,}", Text(shape))
    return Group(heading(f"{sum(reading.unknown.values()):,} lines were not understood"), table)


def request_detail(request: Request) -> RenderableType:
    """Every phase of one request with how it is known, its remainders, and what is not known."""
    table = plain_table("phase", "ms", "tokens", "slots", "lane, and what it also contains")
    for column in table.columns[1:4]:
        column.justify = "right"
    for phase in request.phases:
        table.add_row(*_phase_cells(phase))
    table.add_section()
    for phase in request.remainders:
        table.add_row(*_phase_cells(phase, style="italic"))
    for name, value in (("prompt clock", request.prompt_ms), ("first token", request.ttft_ms)):
        table.add_row(
            Text(name, style="bold"), wording.value_text(value), "", "", Text(value.why, "dim")
        )
    title = f"request {request.index + 1} {STATUS[request.status]}".rstrip()
    where = f"lines {request.lines[0]:,} to {request.lines[1]:,}"
    parts: list[RenderableType] = [
        Text(f"{title}: {_tokens(request)}", style="bold"), Text(where, "dim"), table,
    ]  # fmt: skip
    facts = "; ".join(f"{n} {wording.value_text(v)}" for n, v in request.facts.items())
    if facts:
        parts.append(Text(f"also printed: {facts}", style="dim"))
    parts += bullets([f"cannot tell: {text}" for text in request.cannot_tell])
    parts += bullets([f"warning: {text}" for text in request.warnings], style="yellow")
    return Group(*parts)


class _Fitting:
    """The wide renderable where it fits, the narrow one where it does not."""

    def __init__(self, wide: RenderableType, narrow: RenderableType) -> None:
        self.wide, self.narrow = wide, narrow

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        needed = Measurement.get(console, options.update(max_width=10_000), self.wide).maximum
        yield self.wide if needed <= options.max_width else self.narrow


class _Each:
    """Every request in full, made one after the other while they are printed."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for request in self.requests:
            yield Padding(request_detail(request), (0, 0, 1, 0))


def _requests(life: Life, *, per_request: bool) -> RenderableType:
    if per_request:
        return _Each(life.requests)
    shown = life.requests[:MOST_ROWS]
    left = len(life.requests) - len(shown)
    note = f"{left:,} more requests are in the summary; --per-request shows all"
    rest = [Text(note, style="dim")] if left else []
    narrow = Group(*(_short(r) for r in shown))
    return Group(_Fitting(_wide(life, shown), narrow), *rest)


def _wide(life: Life, requests: Sequence[Request]) -> Table:
    """One row per request: tokens, each phase of the sum, what is left over, clocks, slots."""
    columns: list[tuple[str, Callable[[Request], str]]] = [
        ("prompt", lambda r: _count(r.prompt)),
        ("reused", lambda r: _count(r.reused)),
        ("read", _read),
    ]
    for name in phase_names(requests):
        columns.append((name, lambda r, n=name: _by_name(r.phases, n)))
    for name in phase_names(requests, remainders=True):
        columns.append((_rest_title(name), lambda r, n=name: _by_name(r.remainders, n)))
    if any(r.prompt_ms.how != "missing" for r in requests):
        columns.append(("prompt ms", lambda r: wording.value_text(r.prompt_ms)))
    if any(r.ttft_ms.known for r in requests):
        columns.append(("first token", lambda r: wording.value_text(r.ttft_ms)))
    if any(r.slots_lent.value or r.slots_refilled.value for r in requests):
        columns.append(("lent", lambda r: _count(r.slots_lent)))
        columns.append(("refilled", lambda r: _count(r.slots_refilled)))
    columns.append(("", lambda r: STATUS[r.status] or ("first of life" * r.first_of_life)))
    table = plain_table("#")
    # phases of the same place that never come together (rests of new and reused) share a column
    merged: dict[str, list[Callable[[Request], str]]] = {}
    for name, cell in columns:
        merged.setdefault(name, []).append(cell)
    for name in merged:
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for r in requests:
        cells = [" ".join(filter(None, (c(r) for c in of))) for of in merged.values()]
        table.add_row(str(r.index + 1), *cells)
    return table


def _short(r: Request) -> RenderableType:
    """A request in a few short lines, for terminals the table does not fit on."""
    rows = [(p.name, p.ms) for p in r.phases if p.lane == "request"]
    rows += [(p.name, p.ms) for p in r.remainders if p.lane == "request"]
    rows += [("prompt clock", r.prompt_ms), ("first token", r.ttft_ms)]
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column("", overflow="fold", ratio=2)
    table.add_column("", justify="right", no_wrap=True)
    for name, value in rows:
        table.add_row(Text(name), wording.value_text(value))
    slots = f"slots lent {_count(r.slots_lent)}, refilled {_count(r.slots_refilled)}"
    title = f"request {r.index + 1} {STATUS[r.status]}".rstrip()
    return Group(Text(f"{title}: {_tokens(r)}", style="bold"), Text(slots), Padding(table, (0, 2)))


def _phase_cells(phase: Phase, *, style: str = "") -> tuple[Text, str, str, str, Text]:
    lane = "" if phase.lane == "request" else f"{phase.lane} (overlapped)"
    also = "; ".join(t for t in (lane, phase.contains, phase.ms.why) if t)
    return (
        Text(phase.name, style),
        wording.value_text(phase.ms),
        "" if phase.tokens is None else f"{phase.tokens:,}",
        "" if phase.slots is None else f"{phase.slots:,}",
        Text(also, "dim"),
    )


def _by_name(phases: Sequence[Phase], name: str) -> str:
    """The cell of one phase of the sum; several of one name as a sum of what is printed."""
    found = [p.ms for p in phases if p.name == name and p.lane == "request"]
    if not found:
        return ""
    texts = [wording.value_text(v) for v in found]
    return texts[0] if len(texts) == 1 else " + ".join(texts)


def _rest_title(name: str) -> str:
    return "rest" if name.startswith("prompt_ms") else name


def _count(value: Value) -> str:
    return wording.value_text(value, whole=True, mark=value.how != "measured")


def _read(r: Request) -> str:
    """Tokens read; `A of B` where fewer were read than planned."""
    planned, real = _count(r.read_planned), _count(r.read)
    same = r.read_planned.value == r.read.value or not r.read_planned.known
    return real if same else f"{real} of {planned}"


def _tokens(r: Request) -> str:
    return f"prompt {_count(r.prompt)} = {_count(r.reused)} reused + {_read(r)} read"


def _life_title(life: Life) -> str:
    version = f" {life.version}" if life.version else ", version not said"
    return f"{life.dialect}{version}: {life.file} from line {life.first_line:,}"


def _notes(life: Life) -> Iterator[RenderableType]:
    yield from bullets([*life.notes, *(f"cannot tell: {text}" for text in life.cannot_tell)])


def _request_remarks(life: Life) -> list[RenderableType]:
    """What several requests say alike (but for its numbers) is said once, with who says it."""
    alike: dict[str, dict[int, str]] = {}
    requests = drawn(life.requests)
    for r in requests:
        for text in _remarks(r, known=life.cannot_tell):
            alike.setdefault(_NUMBERS.sub("N", text), {}).setdefault(r.index + 1, text)
    lines = []
    if len(requests) < len(life.requests):
        lines.append(f"what follows is of {len(requests):,} requests, drawn at random")
    for said in alike.values():
        numbers, texts = list(said), list(dict.fromkeys(said.values()))
        more = "" if len(texts) == 1 else ", with its own numbers"
        lines.append(f"{texts[0]} ({_which(numbers, len(requests))}{more})")
    return bullets(lines)


def _remarks(r: Request, *, known: Sequence[str]) -> Iterator[str]:
    yield from (f"cannot tell: {text}" for text in r.cannot_tell if text not in known)
    yield from (f"warning: {text}" for text in r.warnings)
    for p in r.remainders:
        if p.lane == "request" and p.ms.why:
            title = _rest_title(p.name)
            yield f"{title} = {p.ms.why}" if title != p.name else f"{title}: {p.ms.why}"
            if p.contains:
                yield f"{title} also contains {p.contains}"
    if not r.ttft_ms.known:
        bound = f" {wording.value_text(r.ttft_ms)}" if r.ttft_ms.how == "bounded" else ""
        yield f"first token{bound}: {r.ttft_ms.why}"


def _which(numbers: Sequence[int], of: int) -> str:
    if len(numbers) == of:
        return "every request"
    shown = ", ".join(map(str, numbers[:6]))
    more = f" and {len(numbers) - 6} more" if len(numbers) > 6 else ""
    return f"request{'s' if len(numbers) > 1 else ''} {shown}{more}"


def _joined(joined: Joined) -> Iterator[RenderableType]:
    yield heading("Pairs with the benchmark's rows")
    yield sentence(f"{len(joined.pairs):,} paired: {joined.method}")
    for what, alone in (
        ("requests", joined.unpaired_requests),
        ("benchmark rows", joined.unpaired_rows),
    ):
        if alone:
            shown = ", ".join(str(i + 1) for i in alone[:12]) + (" ..." if len(alone) > 12 else "")
            yield sentence(f"{len(alone):,} {what} without a partner: {shown}", style="yellow")
    yield from bullets([f"warning: {text}" for text in joined.warnings], style="yellow")


def _reading_notes(reading: Reading) -> list[RenderableType]:
    unknown = sum(reading.unknown.values())
    parts: list[RenderableType] = [
        sentence(f"read {reading.lines:,} lines of {len(reading.files)} file(s)")
    ]
    if unknown:
        parts.append(sentence(f"{unknown:,} lines were not understood; --unknown shows them"))
    parts += bullets([f"not readable: {name}" for name in reading.unreadable], style="red")
    return parts
