"""A run's lines as tables: for the terminal, and in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slotwise.bench.results import Line
from slotwise.bench.stats import Estimate

Cell = Callable[[Line], str]
COLUMNS: tuple[tuple[str, Cell], ...] = (
    ("memory", lambda line: line.where),
    ("", lambda line: line.what),
    ("tokens/s", lambda line: line.shown("tokens/s", "{:.2f}")),
    ("llama.cpp", lambda line: line.shown("llama.cpp tokens/s", "{:.2f}")),
    ("ratio", lambda line: _with_interval(line, "against llama.cpp")),
    ("TTFT, ms", lambda line: line.shown("TTFT, ms", "{:,.0f}")),
    ("MiB/token", lambda line: _mib(line, "bytes read/token")),
    ("hits", lambda line: line.shown("hit rate", "{:.1%}")),
    ("of the limit", lambda line: _with_interval(line, "of the limit")),
    ("policy", lambda line: line.shown("policy quality", "{:.2f}")),
    ("overlap", lambda line: line.shown("overlap quality", "{:.2f}")),
    ("peak, MiB", lambda line: line.shown("peak, MiB", "{:,.0f}")),
    ("n", lambda line: _n(line)),
)
LEGEND = (
    "ratio: llama.cpp's time / ours under the same limit, median of pairs (95 % interval of their "
    "geometric mean).",
    "of the limit: max(compute, Belady's bytes / disk speed) / our time. policy: Belady's bytes / "
    "bytes read. overlap: max(compute, bytes read / disk speed) / our time.",
)


@dataclass(frozen=True)
class Table:
    """Plain text, ready for any form of table."""

    columns: tuple[str, ...]
    rows: list[list[str]]

    def markdown(self) -> str:
        """Ends with a newline."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def table(found: Sequence[Line]) -> Table:
    """Columns in which nothing was found are left out."""
    kept = [(name, cell) for name, cell in COLUMNS if any(cell(line) != "-" for line in found)]
    return Table(
        columns=tuple(name for name, _ in kept),
        rows=[[cell(line) for _, cell in kept] for line in found],
    )


def gaps(found: Sequence[Line]) -> list[str]:
    """Every figure that is missing, each reason once."""
    reasons: dict[str, list[str]] = {}
    for line in found:
        for name, why in line.missing.items():
            reasons.setdefault(f"{name}: {why}", []).append(f"{line.where} {line.what}")
    return [f"missing: {reason} ({', '.join(where)})" for reason, where in reasons.items()]


def interval(found: Estimate, form: str = "{:.2f}") -> str:
    """`median (low to high)`, without brackets where one sample has no interval."""
    shown = form.format(found.median)
    if found.low is None or found.high is None:
        return shown
    return f"{shown} ({form.format(found.low)} to {form.format(found.high)})"


def _with_interval(line: Line, name: str) -> str:
    found = line.figures.get(name)
    return "-" if found is None else interval(found)


def _mib(line: Line, name: str) -> str:
    found = line.figures.get(name)
    return "-" if found is None else f"{found.median / 2**20:.2f}"


def _n(line: Line) -> str:
    found = line.figures.get("tokens/s")
    return "0" if found is None else str(found.n)
