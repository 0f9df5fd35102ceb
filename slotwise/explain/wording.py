"""Numbers in words for the terminal and the page: how precise, with which unit, how known.

Formatting only; nothing is computed here.
"""

from __future__ import annotations

from slotwise.explain.fit import Fit
from slotwise.explain.record import Value
from slotwise.explain.stats import Difference, Estimate

MARKS = {"measured": "m", "derived": "d", "bounded": "b", "missing": "-"}
LEGEND = (
    "m measured: printed by the log   d derived: calculated from printed numbers   "
    "b bounded: between two numbers   - missing: the log does not say"
)


def number(value: float) -> str:
    """Milliseconds and rates: enough digits to compare, never an exponent."""
    size = abs(value)
    if size >= 9_999.5:
        return f"{value:,.0f}"
    if size >= 10 or value == 0:
        return f"{value:,.1f}"
    return f"{value:.3f}" if size < 1 else f"{value:.2f}"


def value_text(value: Value, *, whole: bool = False, mark: bool = True) -> str:
    """A value with its one-letter mark; bounds as `low..high`, nothing as `-`."""
    shown = (lambda v: f"{v:,.0f}") if whole else number
    if value.value is not None:
        text = shown(value.value)
    elif value.how == "bounded":
        low = "?" if value.low is None else shown(value.low)
        high = "?" if value.high is None else shown(value.high)
        text = f"{low}..{high}"
    else:
        return "-"
    return f"{text} {MARKS[value.how]}" if mark else text


def interval_text(estimate: Estimate) -> str:
    """`[low, high]`, or why there is none."""
    if estimate.low is None or estimate.high is None:
        return f"no interval, n = {estimate.n}"
    return f"[{number(estimate.low)}, {number(estimate.high)}]"


def estimate_text(estimate: Estimate) -> str:
    return f"{number(estimate.value)} {estimate.unit} {interval_text(estimate)}"


def change_text(difference: Difference) -> str:
    """A difference with its sign and interval."""
    value = difference.estimate.value
    sign = "+" if value > 0 else ""
    return f"{sign}{number(value)} {interval_text(difference.estimate)}"


def formula(fit: Fit) -> str:
    """`109.5 ms + 0.706 ms/token`."""
    first, *others = fit.terms
    parts = [f"{number(first.value)} {first.unit}"]
    for term in others:
        sign = "+" if term.value >= 0 else "-"
        parts.append(f"{sign} {number(abs(term.value))} {term.unit}")
    return " ".join(parts)
