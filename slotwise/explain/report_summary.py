"""The summary of one engine life on a terminal: medians by size, costs, what was left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from slotwise.explain import wording
from slotwise.explain.fit import Fit, RateCheck
from slotwise.explain.report_parts import bullets, heading, plain_table, sentence
from slotwise.explain.summary import OUTER, REMAINDER, Group, ReadCost, Summary, Typical


def summary(said: Summary) -> Iterator[RenderableType]:
    """Medians by size, the costs of read and refill with intervals, warnings, what is left out."""
    if said.groups:
        yield heading("Medians by size")
        for group in said.groups:
            yield _group(group)
        yield Text("")
    yield heading("What it costs")
    yield from read_cost(said.read)
    yield from _refill(said.refill, said.refill_why_not)
    if said.costs is not None:
        yield from _costs(said.costs)
    yield from bullets([f"warning: {text}" for text in said.warnings], style="yellow")
    yield from _left_out(said.left_out)


def read_cost(cost: ReadCost) -> Iterator[RenderableType]:
    """The fitted line, the floor form where the line is in doubt, and what they assume."""
    if cost.line is None:
        yield sentence(f"read: {cost.why_not} (n = {cost.n})")
        yield from bullets(cost.warnings)
        return
    yield sentence(f"{cost.what}: {wording.formula(cost.line)} (n = {cost.n})")
    yield from bullets([*terms(cost.line), *_tested(cost.line), *cost.line.warnings])
    if cost.floor is not None:
        floor = cost.floor
        yield sentence(
            f"{cost.what}, floor and line: {wording.number(floor.floor.value)} ms up to about "
            f"{floor.knee:,.0f} tokens, then {wording.formula(floor.line)} (n = {floor.line.n})"
        )
        yield from bullets([*terms(floor.line), *floor.warnings, *floor.line.warnings])


def terms(fit: Fit) -> list[str]:
    """Each term with its interval, or nothing where none has one (the warning says why)."""
    return [
        f"{name}: {wording.estimate_text(term)}, n = {term.n}"
        for name, term in zip(fit.names, fit.terms, strict=True)
        if term.has_interval
    ]


def _tested(fit: Fit) -> list[str]:
    if fit.lack_of_fit is None or fit.lack_of_fit.rejects:
        return []
    test = fit.lack_of_fit
    return [
        f"a straight line is consistent with {test.sizes} sizes and their repeats "
        f"(F = {test.f:.3g}, p = {test.p:.2g}; assumes the same scatter at every size)"
    ]


def _refill(rate: RateCheck | None, why_not: str) -> Iterator[RenderableType]:
    if rate is None:
        yield sentence(f"refill: {why_not}")
        return
    yield sentence(
        f"refill: {wording.estimate_text(rate.rate.terms[0])} through the origin "
        f"(n = {rate.rate.n})"
    )
    notes = [rate.words, *rate.rate.warnings]
    if rate.with_intercept is not None:
        notes.insert(1, f"with intercept: {wording.formula(rate.with_intercept)}")
        notes += [w for w in rate.with_intercept.warnings if "too small" not in w]
    yield from bullets(notes)


def _costs(fit: Fit) -> Iterator[RenderableType]:
    if fit.refused:
        yield sentence(f"{fit.name} per token and per lent slot: not split")
        yield from bullets([fit.refused])
        return
    yield sentence(f"{fit.name}: {wording.formula(fit)} (n = {fit.n})")
    inflation = fit.inflation or 0.0
    condition = fit.condition or 0.0
    yield from bullets(
        [
            *terms(fit),
            f"variance inflation {inflation:.3g}, condition number {condition:.3g}",
            *fit.warnings,
        ]
    )


def _group(group: Group) -> RenderableType:
    table = plain_table(group.label, "median ms", "mean ms, 95 % interval", "n")
    for column in table.columns[1:]:
        column.justify = "right"
    for lane, style in ((None, ""), (REMAINDER, "italic"), (OUTER, "bold")):
        _add_rows(table, [row for row in group.rows if _kind(row) == lane], style=style)
    lanes = dict.fromkeys(r.lane for r in group.rows if r.lane not in ("request", REMAINDER, OUTER))
    for lane in lanes:
        table.add_section()
        rows = [row for row in group.rows if row.lane == lane]
        _add_rows(table, rows, style="dim", prefix=f"{lane}: ")
    return table


def _kind(row: Typical) -> str | None:
    return None if row.lane == "request" else row.lane


def _add_rows(table: Table, rows: Sequence[Typical], *, style: str, prefix: str = "") -> None:
    for row in rows:
        mean = f"{wording.number(row.mean.value)} {wording.interval_text(row.mean)}"
        n = f"{row.mean.n}" if row.mean.n == row.of else f"{row.mean.n} of {row.of}"
        mark = wording.MARKS[row.how]
        name = Text(prefix + row.name, style)
        table.add_row(name, f"{wording.number(row.median)} {mark}", mean, n)


def _left_out(left_out: Sequence[tuple[int, str]]) -> Iterator[RenderableType]:
    reasons: dict[str, list[int]] = {}
    for index, why in left_out:
        reasons.setdefault(why, []).append(index + 1)
    for why, numbers in reasons.items():
        shown = ", ".join(map(str, numbers[:12])) + (" ..." if len(numbers) > 12 else "")
        yield sentence(f"not in the numbers: request {shown} ({why})", style="dim")
