"""Strata's window lines, by far the most lines of a trace, many at a time.

A run of them is taken apart by columns: neighbours are equally long, so the same character
of every line is one slice. What is not exactly such a line is left to the line reader.
"""

from __future__ import annotations

WINDOW = b"strata trace: window "
SPAN = 32 << 10
"""Bytes looked at together."""
_SHORTEST, _LONGEST = len(WINDOW) + len(b"1 1\n"), len(WINDOW) + len(b"123456789012345 1\n")
_WITHOUT_DIGITS = WINDOW + b" \n"
_FULL = _WITHOUT_DIGITS * (SPAN // _SHORTEST + 1)


def like_the_first(block: bytes, at: int) -> tuple[int, int]:
    """How many lines from `at` on are as long as the first one, and that length.

    They are lines by their ends only: one may hold further line ends.
    """
    width = block.find(b"\n", at, at + _LONGEST) + 1 - at
    if width < _SHORTEST:
        return 0, 0
    ends = block[at + width - 1 : at + SPAN : width]
    return len(ends) - len(ends.lstrip(b"\n")), width


def window_rows(run: bytes, lines: int, width: int) -> int | None:
    """The sum of T over the run, None when a line is not a window's with a T of one digit.

    Without its digits the run is the fixed text alone; the two characters before the number
    and the space before T being in their columns, no digit is anywhere else.
    """
    at = len(WINDOW)
    if (
        run.translate(None, b"0123456789") != _FULL[: lines * len(_WITHOUT_DIGITS)]
        or run[at - 1 :: width] != b" " * lines
        or run[at - 2 :: width] != b"w" * lines
        or run[width - 3 :: width] != b" " * lines
    ):
        return None
    return sum(run[width - 2 :: width]) - ord("0") * lines
