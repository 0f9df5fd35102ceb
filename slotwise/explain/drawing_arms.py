"""Where dots and whiskers lie on the pages of `compare` and `levers`: geometry only, no markup.

Everything is in percent of the width of the picture, so that text keeps its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slotwise.explain import wording
from slotwise.explain.compare import Change, SizeComparison
from slotwise.explain.drawing import Tick, nice_ticks
from slotwise.explain.levers import Prediction
from slotwise.explain.stats import Estimate

EDGE = 2.0
"""Percent left free on both sides."""


@dataclass(frozen=True)
class Whisker:
    """One row: a dot at `at` with an interval from `low` to `high`; either may be absent."""

    name: str
    at: float | None
    low: float | None
    high: float | None
    kind: str
    """A class of the page: moved, still, unsure, other; bounds, now, predicted, measured."""
    text: str
    note: str = ""
    lane: str = ""
    """Title above the first row of each lane that is not in the sum."""


@dataclass(frozen=True)
class Forest:
    """Rows on one scale. `zero` and `band` (left, width) only where they mean something."""

    rows: tuple[Whisker, ...]
    ticks: tuple[Tick, ...]
    zero: float | None = None
    band: tuple[float, float] | None = None


class _Axis:
    def __init__(self, numbers: Sequence[float]) -> None:
        low, high = min(numbers), max(numbers)
        pad = (high - low) * 0.04 or max(abs(high) * 0.1, 1.0)
        self.low, self.high = low - pad, high + pad

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(EDGE + (100 - 2 * EDGE) * min(1.0, max(0.0, share)), 3)

    def ticks(self, *, signed: bool) -> tuple[Tick, ...]:
        form = "{:+,g}" if signed else "{:,g}"
        values = nice_ticks(self.low, self.high, count=5)
        return tuple(Tick(self(v), "0" if v == 0 else form.format(round(v, 9))) for v in values)


def changes(size: SizeComparison) -> Forest:
    """B minus A of every phase, what is unexplained, the outer clock, then overlapped lanes."""
    rows = [*size.phases, size.unexplained, size.outer, *size.overlapped]
    axis = _Axis([0.0, *(v for c in rows for v in _span(c.by.estimate))])
    whiskers, lanes = [], {"request", "remainder", "outer"}
    for c in rows:
        title = "" if c.lane in lanes else f"{c.lane} (overlapped, not in the sum)"
        lanes.add(c.lane)
        whiskers.append(_change(c, axis, title))
    left, right = axis(-size.margin_ms), axis(size.margin_ms)
    return Forest(
        rows=tuple(whiskers), ticks=axis.ticks(signed=True), zero=axis(0.0),
        band=(left, round(right - left, 3)),
    )  # fmt: skip


def prediction(p: Prediction) -> Forest:
    """Now, predicted, where the arm's mean should lie, and what was measured."""
    found: list[tuple[str, Estimate, str, str]] = [("now", p.now, "now", "")]
    bounds = p.saved is None
    kind = "bounds" if bounds else "predicted"
    found.append(("predicted", p.predicted, kind, "bounds" if bounds else ""))
    if p.measured is not None:
        verdict = {True: "as predicted", False: "missed", None: "cannot say"}[p.holds]
        found.append(("measured", p.measured, "measured", verdict))
    spans = [v for _, e, _, _ in found for v in _span(e)]
    axis = _Axis([*spans, *(p.expected or ())])
    rows = []
    for name, estimate, of_kind, note in found:
        if name == "measured" and p.expected is not None:
            low, high = p.expected
            text = f"[{wording.number(low)}, {wording.number(high)}] ms"
            rows.append(Whisker("expected of the arm", None, axis(low), axis(high), "expected",
                                text, "with the noise of new samples"))  # fmt: skip
        rows.append(_estimate(name, estimate, of_kind, note, axis))
    return Forest(rows=tuple(rows), ticks=axis.ticks(signed=False))


def _change(c: Change, axis: _Axis, lane: str) -> Whisker:
    e = c.by.estimate
    kind = "moved" if c.verdict.startswith("moved") else "still"
    if c.verdict not in ("did not move", "moved", "moved, within the margin"):
        kind = "unsure"
    means = f"A {wording.number(c.a.value)}, B {wording.number(c.b.value)} ms"
    return Whisker(
        c.name, axis(e.value), _placed(axis, e.low), _placed(axis, e.high), kind,
        f"{wording.change_text(c.by)} ms", f"{c.verdict}; {means}", lane,
    )  # fmt: skip


def _estimate(name: str, e: Estimate, kind: str, note: str, axis: _Axis) -> Whisker:
    text = f"{wording.number(e.value)} {wording.interval_text(e)} ms"
    at: float | None = axis(e.value)
    if kind == "bounds":
        at, text = None, f"{wording.interval_text(e)} ms"
    return Whisker(name, at, _placed(axis, e.low), _placed(axis, e.high), kind, text, note)


def _placed(axis: _Axis, value: float | None) -> float | None:
    return None if value is None else axis(value)


def _span(e: Estimate) -> list[float]:
    return [v for v in (e.value, e.low, e.high) if v is not None]
