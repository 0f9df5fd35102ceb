"""Comparisons of two arms and lever predictions on a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from slotwise.explain import wording
from slotwise.explain.compare import Change, Comparison, SizeComparison
from slotwise.explain.levers import LeverReport, Prediction
from slotwise.explain.report_parts import bullets, heading, plain_table, sentence


def comparison(result: Comparison) -> RenderableType:
    """Per prompt size: every phase in both arms, what it explains, what stays unexplained."""
    parts: list[RenderableType] = [heading(f"A = {result.names[0]}, B = {result.names[1]}")]
    parts += bullets([w for w in result.warnings if w.startswith("FORCED")], style="bold red")
    parts.append(sentence(f"{wording.MARGIN} {result.margin} (--margin)"))
    for size in result.sizes:
        parts += [Text(""), *_size(size)]
    parts += [Text(""), heading("What else differs between the arms")]
    parts += bullets(result.hidden or ("nothing that the logs show",))
    parts += bullets([f"not compared: {text}" for text in result.unmatched])
    warnings = [w for size in result.sizes for w in size.warnings] + [*result.warnings]
    parts += bullets([f"warning: {w}" for w in warnings if not w.startswith("FORCED")])
    return Group(*parts)


def levers(report: LeverReport) -> RenderableType:
    """Each lever: the prediction per size, its assumption, and measured where an arm was given."""
    parts: list[RenderableType] = []
    seen: dict[str, list[Prediction]] = {}
    for prediction in report.predictions:
        seen.setdefault(prediction.lever.key, []).append(prediction)
    for predictions in seen.values():
        parts += [*_lever(predictions), Text("")]
    parts += bullets([f"not predicted: {title}: {why}" for title, why in report.not_predicted])
    parts += bullets([f"warning: {text}" for text in report.warnings], style="yellow")
    return Group(*parts)


def _size(size: SizeComparison) -> Iterator[RenderableType]:
    paired = f"{size.outer.by.n_a} pairs" if size.outer.by.paired else "unpaired"
    yield heading(f"{size.label} (A {size.n_a}, B {size.n_b} requests, {paired})")
    table = plain_table("mean ms", "A", "B", "B - A, 95 % interval", "")
    for column in table.columns[1:4]:
        column.justify = "right"
    for change in size.phases:
        table.add_row(*_row(change))
    table.add_row(*_row(size.unexplained, style="italic"))
    table.add_section()
    table.add_row(*_row(size.outer, style="bold"))
    if size.overlapped:
        table.add_section()
    for change in size.overlapped:
        table.add_row(*_row(change, style="dim", prefix=f"{change.lane}: "))
    yield table
    yield sentence(wording.explained_text(size))
    yield from bullets(wording.still_texts(size))


def _row(change: Change, *, style: str = "", prefix: str = "") -> tuple[Text, str, str, str, Text]:
    marked = "bold" if change.verdict.startswith("moved") else "dim"
    return (
        Text(prefix + change.name, style),
        wording.number(change.a.value),
        wording.number(change.b.value),
        wording.change_text(change.by),
        Text(change.verdict, marked),
    )


def _lever(predictions: list[Prediction]) -> Iterator[RenderableType]:
    lever = predictions[0].lever
    yield heading(lever.title)
    yield sentence(f"assumes: {lever.assumption}")
    measured = any(p.measured for p in predictions)
    table = plain_table("mean ms", "n", "now", "saved", "predicted")
    if measured:
        table.add_column("expected of the arm")
        table.add_column("measured")
        table.add_column("")
    for p in predictions:
        saved = "bounds only" if p.saved is None else _estimate(p.saved)
        row = [Text(p.label), str(p.n), wording.number(p.now.value), saved, _predicted(p)]
        table.add_row(*row, *(_measured(p) if measured else ()))
    yield table
    notes = dict.fromkeys(p.basis for p in predictions)
    yield from bullets([f"from {basis}" for basis in notes])
    yield from bullets([f"warning: {w}" for p in predictions for w in p.warnings], style="yellow")


def _predicted(p: Prediction) -> str:
    if p.saved is None and p.predicted.low is not None and p.predicted.high is not None:
        return f"{wording.number(p.predicted.low)}..{wording.number(p.predicted.high)} b"
    return _estimate(p.predicted)


def _estimate(estimate: wording.Estimate) -> str:
    return f"{wording.number(estimate.value)} {wording.interval_text(estimate)}"


def _measured(p: Prediction) -> tuple[str, str, str]:
    if p.measured is None:
        return "", "", ""
    expected = "no interval"
    if p.expected is not None:
        expected = f"[{wording.number(p.expected[0])}, {wording.number(p.expected[1])}]"
    verdict = {True: "as predicted", False: "MISSED", None: "cannot say"}[p.holds]
    return expected, _estimate(p.measured), verdict
