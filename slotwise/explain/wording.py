"""Numbers in words for the terminal and the page: how precise, with which unit, how known.

Formatting only; nothing is computed here.
"""

from __future__ import annotations

from slotwise.explain.compare import SizeComparison
from slotwise.explain.fit import Fit
from slotwise.explain.record import Value
from slotwise.explain.stats import Difference, Estimate

MARKS = {"measured": "m", "derived": "d", "bounded": "b", "missing": "-"}
MARGIN = '"did not move" means: the whole 95 % interval is less than this away from zero:'
LEGEND = (
    "m measured: printed by the log   d derived: calculated from printed numbers   "
    "b bounded: between two numbers   - missing: the log does not say"
)


def number(value: float) -> str:
    """Milliseconds and rates: enough digits to compare, never an exponent."""
    size = abs(value)
    if size >= 9_999.5:
        return f"{value:,.0f}"
    if size >= 10 or size < 5e-4:
        return f"{value + 0.0:,.1f}" if size >= 10 else "0.0"
    return f"{value:.3f}" if size < 1 else f"{value:.2f}"


def quantity(value: float, unit: str) -> str:
    """A number with its unit; rates with three decimals, they get multiplied by thousands."""
    text = f"{value:,.3f}" if "/" in unit else number(value)
    return f"{text} {unit}"


def value_text(value: Value, *, whole: bool = False, mark: bool = True) -> str:
    """A value with its one-letter mark; bounds as `low..high`, nothing as `-`."""
    shown = (lambda v: f"{v:,.0f}") if whole else number
    if value.value is not None:
        text = shown(value.value)
    elif value.how == "bounded":
        if value.low is not None and value.high is not None:
            text = f"{shown(value.low)}..{shown(value.high)}"
        elif value.low is not None:
            text = f">={shown(value.low)}"
        else:
            text = "?" if value.high is None else f"<={shown(value.high)}"
    else:
        return "-"
    return f"{text} {MARKS[value.how]}" if mark else text


def interval_text(estimate: Estimate) -> str:
    """`[low, high]`, or why there is none."""
    if estimate.low is None or estimate.high is None:
        return f"no interval, n = {estimate.n}"
    low, high = (quantity(v, estimate.unit) for v in (estimate.low, estimate.high))
    return f"[{low.split(' ')[0]}, {high.split(' ')[0]}]"


def estimate_text(estimate: Estimate) -> str:
    return f"{quantity(estimate.value, estimate.unit)} {interval_text(estimate)}"


def change_text(difference: Difference) -> str:
    """A difference with its sign and interval."""
    value = difference.estimate.value
    sign = "+" if value > 0 else ""
    return f"{sign}{number(value)} {interval_text(difference.estimate)}"


def explained_text(size: SizeComparison) -> str:
    """How much of the outer difference the phases explain, and what stays."""
    text = f"the phases explain {number(size.explained_ms)} ms of the difference"
    if size.explained_share is not None:
        text += f" ({round(100 * size.explained_share) + 0:d} %)"
    return f"{text}; {change_text(size.unexplained.by)} ms stays unexplained"


def still_texts(size: SizeComparison) -> list[str]:
    """What did not move, and how much could still hide in what was not shown to move."""
    changes = (*size.phases, size.unexplained, size.outer)
    still = [c.name for c in changes if c.verdict == "did not move"]
    texts = []
    if still:
        texts.append(
            f"did not move, by less than {number(size.margin_ms)} ms either way: {', '.join(still)}"
        )
    for c in changes:
        low, high = c.by.estimate.low, c.by.estimate.high
        if c.verdict == "not shown to move" and low is not None and high is not None:
            texts.append(
                f"{c.name}: not shown to move, but a change of {number(max(-low, high))} ms "
                f"would fit as well (margin {number(size.margin_ms)} ms)"
            )
    return texts


def formula(fit: Fit) -> str:
    """`109.5 ms + 0.706 ms/token`."""
    first, *others = fit.terms
    parts = [quantity(first.value, first.unit)]
    for term in others:
        sign = "+" if term.value >= 0 else "-"
        parts.append(f"{sign} {quantity(abs(term.value), term.unit)}")
    return " ".join(parts)


def fit_title(what: str, fit: Fit) -> str:
    """The formula; where it has no interval or a fixed cost below zero, with its warnings."""
    fixed = fit.terms[0]
    warnings = () if fixed.has_interval and fixed.value >= 0 else fit.warnings
    return "; ".join([f"{what}: {formula(fit)}", *warnings])
