"""How small a change has to be to count as none: the margin of an equivalence statement.

"Did not move" needs more than an interval that contains zero, which any noisy measurement has: the
whole interval has to lie inside a margin that was chosen beforehand.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from slotwise.errors import UsageError
from slotwise.explain.stats import Estimate

_FORM = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(%|ms)\s*")


@dataclass(frozen=True, kw_only=True)
class Margin:
    """`number` milliseconds, or per cent of arm A's mean outer clock at that size."""

    number: float
    relative: bool

    @classmethod
    def parse(cls, text: str) -> Margin:
        """`5%` or `20ms`. Raises UsageError for anything else and for zero."""
        found = _FORM.fullmatch(text)
        if found is None or float(found[1]) == 0.0:
            raise UsageError(
                f"--margin {text}: expected a number above zero with % or ms",
                next_step="For example --margin 5% or --margin 20ms.",
            )
        return cls(number=float(found[1]), relative=found[2] == "%")

    def ms(self, outer: float) -> float:
        """In milliseconds, where the outer clock of arm A is `outer` ms in the mean."""
        return abs(outer) * self.number / 100 if self.relative else self.number

    @property
    def words(self) -> str:
        if self.relative:
            return f"{self.number:g} % of A's mean outer clock"
        return f"{self.number:g} ms"


DEFAULT = Margin(number=5.0, relative=True)


def inside(change: Estimate, margin_ms: float) -> bool:
    """Whether the whole 95 % interval of `change` is less than the margin away from zero.

    Two one-sided tests at 2.5 % each (Schuirmann 1987): stricter than the usual 5 %, so that the
    interval that is shown is also the one that decides.
    """
    if change.low is None or change.high is None:
        return False
    return -margin_ms < change.low and change.high < margin_ms
