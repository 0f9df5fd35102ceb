"""Where the bars, points and ticks of the HTML page lie: geometry only, no markup.

Waterfalls are in percent of the width, so that text keeps its size; plots are in the units of a
fixed view box. Times of overlapped lanes have a length but no place on the clock: they start at 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from slotwise.explain import wording
from slotwise.explain.fit import Fit, Floor
from slotwise.explain.record import Life, Phase, Request
from slotwise.explain.summary import OUTER, REMAINDER, Summary, Typical

HUES = 10
LABEL_PERCENT_PER_LETTER = 1.15
GAP_PERCENT = 1.5
PLOT_WIDTH, PLOT_HEIGHT, REST_HEIGHT = 460, 230, 110
LEFT, RIGHT, TOP, BOTTOM = 88, 12, 12, 34
MOST_POINTS = 500
LEAST_SHARE = 0.005
"""Overlapped rows shorter than this share of the scale are only in the tables."""


@dataclass(frozen=True)
class Bar:
    """A piece of a lane. `kind`: known, bounded (hatched from `left`), missing (a gap), rest."""

    left: float
    width: float
    kind: str
    hue: int
    label: str
    title: str
    said: str = ""
    """The same in a few words, for the list below the bars."""


@dataclass(frozen=True)
class Lane:
    name: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Strip:
    """The mean request of one size as one bar; all strips of a life share a scale."""

    label: str
    total: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Tick:
    at: float
    label: str


@dataclass(frozen=True)
class Waterfall:
    """Lanes of one request, the first the one that adds up. Markers are clocks."""

    request: Request
    lanes: tuple[Lane, ...]
    ticks: tuple[Tick, ...]
    markers: tuple[Tick, ...]
    words: str


@dataclass(frozen=True)
class Plot:
    """A fit: dots with lines above, its residuals below."""

    name: str
    words: str
    dots: tuple[tuple[float, float, str], ...]
    lines: tuple[tuple[tuple[float, float], ...], ...]
    rests: tuple[tuple[float, float, str], ...]
    zero: float
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    rest_ticks: tuple[Tick, ...]
    x_name: str


def hues(life: Life) -> dict[str, int]:
    """A colour number per phase name, in order of first use."""
    names = dict.fromkeys(p.name for r in life.requests for p in r.phases)
    return {name: i % HUES for i, name in enumerate(names)}


def scales(life: Life, said: Summary) -> dict[int, float]:
    """Full width in ms per request: requests of one size share a scale."""
    full = {r.index: max(extent(r), 1e-6) for r in life.requests}
    for group in said.groups:
        members = (*group.used, *group.cold)
        widest = max(full[i] for i in members)
        full |= dict.fromkeys(members, widest)
    return full


def overview(said: Summary, *, colours: Mapping[str, int]) -> list[Strip]:
    """Mean phases of each size end to end; a phase that some requests lack counts less."""
    parts = [_mean_parts(g.rows) for g in said.groups]
    full = max([sum(ms for _, _, ms in of) for of in parts], default=0.0) or 1.0
    strips = []
    for group, of in zip(said.groups, parts, strict=True):
        bars: list[Bar] = []
        at = 0.0
        for name, kind, ms in of:
            width = 100.0 * ms / full
            label = name if width >= LABEL_PERCENT_PER_LETTER * len(name) else ""
            title = f"{name} {wording.number(ms)} ms"
            bars.append(Bar(at, width, kind, colours.get(name, 0), label, title, title))
            at += width
        outer = [r for r in group.rows if r.lane == OUTER]
        total = "; ".join(f"{r.name} {wording.number(r.mean.value)} ms" for r in outer)
        strips.append(Strip(group.label, total, tuple(bars)))
    return strips


def _mean_parts(rows: Sequence[Typical]) -> list[tuple[str, str, float]]:
    """(name, kind of bar, mean ms); the whole clock as a gap where nothing splits it."""
    parts = [
        ("left over" if r.lane == REMAINDER else r.name,
         "rest" if r.lane == REMAINDER else "known",
         max(0.0, r.mean.value) * r.mean.n / r.of)
        for r in rows
        if r.lane in ("request", REMAINDER)
    ]  # fmt: skip
    if parts:
        return parts
    clocks = [r.mean.value for r in rows if r.lane == OUTER]
    return [("not split by the log", "missing", max(clocks))] if clocks else []


def extent(request: Request) -> float:
    """The longest thing there is to draw, in ms."""
    ends = [v.value or v.high or 0.0 for v in (request.prompt_ms, request.ttft_ms)]
    rows = [sum(_length(p) for p in phases) for _, phases, _ in _rows(request)]
    return max([*ends, *rows], default=0.0)


def waterfall(request: Request, *, full_ms: float, colours: Mapping[str, int]) -> Waterfall:
    """Lanes of one request on a scale of `full_ms`."""
    percent = 96.0 / full_ms
    lanes = []
    for name, phases, rests in _rows(request):
        length = sum(_length(p) for p in phases)
        if not lanes or length >= LEAST_SHARE * full_ms:
            lanes.append(Lane(name, _bars(phases, rests, percent=percent, colours=colours)))
    markers = [
        Tick((v.value or 0.0) * percent, f"{label} {wording.number(v.value or 0.0)} ms")
        for label, v in (("prompt clock", request.prompt_ms), ("first token", request.ttft_ms))
        if v.known
    ]
    ticks = tuple(Tick(v * percent, _tick(v)) for v in nice_ticks(0.0, full_ms, count=5))
    words = "; ".join(f"{p.name} {_said(p)}" for p in (*request.phases, *request.remainders))
    return Waterfall(request, tuple(lanes), ticks, tuple(markers), words)


def _rows(request: Request) -> list[tuple[str, list[Phase], list[Phase]]]:
    """(title, phases end to end, rests): the sum first, then what ran beside it.

    Only the buckets of a GPU timeline follow each other; other overlapped phases may overlap one
    another too, so each has a row.
    """
    rows = [_row(request, "request", lambda p: True)]
    for lane in dict.fromkeys(p.lane for p in request.phases if p.lane != "request"):
        alone = [p for p in request.phases if p.lane == lane and not _is_bucket(p)]
        rows += [(_titled(lane, p), [p], []) for p in alone]
        buckets = _row(request, lane, _is_bucket)[1]
        if buckets:
            rows.append((f"{lane}, its buckets", buckets, []))
    return rows


def _row(
    request: Request, lane: str, chosen: Callable[[Phase], bool]
) -> tuple[str, list[Phase], list[Phase]]:
    phases = [p for p in request.phases if p.lane == lane and chosen(p)]
    return lane, phases, [p for p in request.remainders if p.lane == lane]


def _titled(lane: str, phase: Phase) -> str:
    known = phase.name.casefold().startswith(lane.casefold())
    return phase.name if known else f"{lane}: {phase.name}"


def _is_bucket(phase: Phase) -> bool:
    return phase.name.startswith("gpu:")


def _length(phase: Phase) -> float:
    return max(0.0, phase.ms.value or phase.ms.high or 0.0)


def _bars(
    phases: Sequence[Phase], rests: Sequence[Phase], *, percent: float, colours: Mapping[str, int]
) -> tuple[Bar, ...]:
    bars: list[Bar] = []
    at = 0.0
    for p, rest in [*((p, False) for p in phases), *((p, True) for p in rests)]:
        if p.ms.value is not None:
            width, kind = max(0.0, p.ms.value * percent), "rest" if rest else "known"
        elif p.ms.high is not None:
            width, kind = p.ms.high * percent, "bounded"
        else:
            width, kind = GAP_PERCENT, "missing"
        label = "left over" if rest else p.name
        if width < LABEL_PERCENT_PER_LETTER * len(label):
            label = "?" if kind == "missing" else ""
        title = f"{p.name}: {_said(p)}" + (f" (also contains {p.contains})" if p.contains else "")
        said = f"{'left over' if rest else p.name} {wording.value_text(p.ms, mark=False)}"
        hue = colours.get(p.name, 0)
        bars.append(Bar(at, min(width, 100 - at), kind, hue, label, title, said))
        at = min(100.0, at + width)
    return tuple(bars)


def fit_plot(fit: Fit, *, floor: Floor | None, words: str, per: str) -> Plot:
    """Points, fitted line (and floor form) and residuals of a fit in one regressor."""
    column = len(fit.names) - 1
    shown = fit.points[:: max(1, math.ceil(len(fit.points) / MOST_POINTS))]
    seen = [(p.x[column], p.y, p.residual) for p in shown]
    x_high = max(x for x, _, _ in seen) * 1.05
    y_high = max(max(y for _, y, _ in seen), 1e-9) * 1.08
    spread = max((abs(r) for _, _, r in seen), default=0.0) * 1.25 or 1.0
    y_low = min(0.0, fit.at([*([1.0] * column), 0.0]))
    sx, sy = _scale(0, x_high, LEFT, PLOT_WIDTH - RIGHT), _scale(y_low, y_high, PLOT_HEIGHT, TOP)
    sr = _scale(-spread, spread, REST_HEIGHT - TOP, TOP)
    lines = [tuple((sx(x), sy(fit.at([*([1.0] * column), x]))) for x in (0.0, x_high))]
    if floor is not None:
        ends = (floor.knee, x_high)
        sloped = [(sx(x), sy(floor.line.at([1.0, x]))) for x in ends]
        lines.append(((sx(0.0), sy(floor.floor.value)), *sloped))
    label = f"{per}s"
    return Plot(
        name=fit.name, words=words, x_name=label, lines=tuple(lines), zero=sr(0.0),
        dots=tuple((sx(x), sy(y), f"{x:,.0f} {label}: {wording.number(y)} ms") for x, y, _ in seen),
        rests=tuple((sx(x), sr(r), f"{x:,.0f} {label}: {r:+.3g} ms off") for x, _, r in seen),
        x_ticks=tuple(Tick(sx(v), f"{v:,.0f}") for v in nice_ticks(0, x_high, count=5)),
        y_ticks=tuple(Tick(sy(v), _tick(v)) for v in nice_ticks(max(0.0, y_low), y_high, count=5)),
        rest_ticks=tuple(Tick(sr(v), f"{v:+.3g}") for v in (-spread / 1.25, spread / 1.25)),
    )  # fmt: skip


def nice_ticks(low: float, high: float, *, count: int) -> list[float]:
    """At most about `count` round numbers from `low` to `high`."""
    step = 10 ** math.floor(math.log10(max(high - low, 1e-9) / count))
    step *= next(m for m in (1, 2, 5, 10) if (high - low) / (step * m) <= count)
    first = math.ceil(low / step)
    return [k * step for k in range(first, math.floor(high / step) + 1)]


def _scale(low: float, high: float, to_low: float, to_high: float):
    span = high - low

    def place(value: float) -> float:
        return round(to_low + (value - low) / span * (to_high - to_low), 2)

    return place


def _tick(ms: float) -> str:
    return f"{ms:,.0f}" if ms >= 1 or ms == 0 else f"{ms:g}"


def _said(phase: Phase) -> str:
    text = wording.value_text(phase.ms, mark=False)
    if phase.ms.how == "missing":
        return f"not known{': ' + phase.ms.why if phase.ms.why else ''}"
    return f"{text} ms, {phase.ms.how}"
