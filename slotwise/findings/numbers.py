"""Numbers in the text of a claim, and when a number of the evidence agrees with one.

A stated number is as exact as it is written: `12 s` agrees with 12,240 ms, `12.0 s` does not. Units
are converted where both sides name one; where they name units of different things, the numbers do
not agree. Without a sign, the sign is not compared ("12 ms less"). Digits inside names (FP16, Q8_0,
0.1.41, dates) are not numbers; neither are number words.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from typing import Any

_TIME = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1, "sec": 1, "min": 60,
         "second": 1, "seconds": 1, "milliseconds": 1e-3, "minutes": 60}  # fmt: skip
_BYTES = {"B": 1, "byte": 1, "bytes": 1} | {
    f"{prefix}{form}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for form, base in (("B", 1000), ("iB", 1024))
}
_OTHERS = {"token": "tokens", "tokens": "tokens", "tok": "tokens", "slot": "slots",
           "slots": "slots", "tok/s": "tok/s", "t/s": "tok/s", "tokens/s": "tok/s",
           "ms/token": "ms/token", "ms/tok": "ms/token", "ms/slot": "ms/slot"}  # fmt: skip
UNITS: dict[str, tuple[str, float]] = (
    {unit: ("time", scale) for unit, scale in _TIME.items()}
    | {unit: ("bytes", float(scale)) for unit, scale in _BYTES.items()}
    | {"%": ("ratio", 0.01), "percent": ("ratio", 0.01), "ratio": ("ratio", 1.0)}
    | {unit: (name, 1.0) for unit, name in _OTHERS.items()}
)
"""Unit -> (what it measures, its size in that dimension's own unit)."""
_KEY_UNITS = {unit.lower(): unit for unit in UNITS}

_NO_NUMBERS = re.compile(
    r"`[^`\s]*[A-Za-z_./][^`\s]*:\d+(?:[-–]\d+)?`|\b\d{4}-\d\d-\d\d\b|\b\d+(?:\.\d+){2,}\b"
)
"""Cited lines, dates, versions."""
_BREAKS = re.compile(r"[\s()\[\]{}|=~≈<>≤≥±×–:;\"“”—…]+|(?<=\d)[x/](?=\d)|(?<=\d)-(?=\d+(?!\d*-))")
_AMOUNT = r"(?:(?:\d{1,3}(?:[,_]\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3})?"
_WORD = re.compile(rf"([-+−]?)({_AMOUNT})(k?)(?:-?([A-Za-zµμ%][A-Za-zµμ%/]*))?")
_SPAN = re.compile(rf"({_AMOUNT}[A-Za-zµμ%]+)-({_AMOUNT}[A-Za-zµμ%]*)")
"""`12ms-15ms`"""
_IN_TEXT = re.compile(
    rf"(?<![\w.])([-+]?)({_AMOUNT})(?![\d.]*\d)(?:[ \t]?([A-Za-zµμ%]+(?:/[A-Za-z]+)?))?"
)
LONGEST_FORMULA = 200
NO_FORMULA = "has more in it than numbers, + - * / and brackets"
MOST_SEEN = 1_000_000


@dataclass(frozen=True)
class Stated:
    """A number as somebody wrote it: `step` is the worth of its last digit."""

    text: str
    value: float
    step: float
    unit: str = ""
    signed: bool = False


@dataclass(frozen=True)
class Found:
    """A number of the evidence, and where it is: `/read/ms` or `line 12`."""

    value: float
    unit: str
    place: str


def stated_numbers(statement: str) -> list[Stated]:
    """In order. What looks like a number and cannot be read agrees with nothing."""
    words = [w for w in _BREAKS.split(_NO_NUMBERS.sub(" ", statement)) if w]
    made = []
    for word, after in pairwise([*words, ""]):
        for part in _parts(word):
            number = _WORD.fullmatch(part)
            if number and number[4] not in ("st", "nd", "rd", "th"):
                unit = number[4] or _trimmed(after)
                made.append(_stated(number[1], number[2], thousands=bool(number[3]), unit=unit))
            elif re.fullmatch(r"[-+−]?\.?\d[^A-Za-zµμ]*", part):
                made.append(Stated(part, math.nan, 0.0))
    return made


def stated_value(value: float, unit: str) -> Stated:
    """A value of a record's `numbers`, as exact as it is written there."""
    text = str(value)
    return Stated(text, value, _step(text), _known_unit(unit), signed=True)


def agrees(stated: Stated, found: Found) -> bool:
    """Whether `found`, in the unit and to the digits of `stated`, is the same number."""
    theirs, ours = UNITS.get(found.unit), UNITS.get(stated.unit)
    scale = 1.0
    if theirs and ours:
        if theirs[0] != ours[0]:
            return False
        scale = theirs[1] / ours[1]
    value = found.value * scale
    candidates = (value,) if stated.signed else (value, -value)
    reach = stated.step / 2 + 1e-9 * abs(stated.value)
    return any(abs(c - stated.value) <= reach for c in candidates)


def numbers_in_text(line: str, place: str, *, seen: set[Any] | None = None) -> Iterator[Found]:
    """Of a log line. `252,432` is read both as one number and as two.

    What is in `seen` is left out, and what is not is put in: a log says the same over and over.
    """
    for written in _IN_TEXT.findall(line):
        if seen is not None:
            if written in seen:
                continue
            if len(seen) < MOST_SEEN:
                seen.add(written)
        sign, amount, word = written
        for text in {amount, *amount.split(",")} if "," in amount else (amount,):
            value = _float(text)
            yield Found(-value if sign == "-" else value, _known_unit(word), place)


def unit_of_key(key: str) -> str:
    """`wall_ms` -> ms, `bytes` -> bytes; "" where a key names no unit."""
    *before, last = re.split(r"[_.\- ]", key)
    if "per" in before or (before and before[-1] in ("tok", "token", "tokens", "t")):
        return ""
    return _KEY_UNITS.get(last.lower(), "")


def evaluate(formula: str) -> tuple[float, list[str]]:
    """The value of `+ - * /` over plain numbers, and those numbers. Raises ValueError."""
    if len(formula) > LONGEST_FORMULA:
        raise ValueError(f"is longer than {LONGEST_FORMULA} characters")
    if not re.fullmatch(r"[\d\s.,eE_+\-*/()]*", formula, re.ASCII):
        raise ValueError(NO_FORMULA)
    plain = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", formula)
    numbers: list[str] = []

    def value(node: ast.AST) -> Decimal:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            text = ast.get_source_segment(plain, node) or ""
            numbers.append(text)
            return Decimal(text)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp):
            left, right = value(node.left), value(node.right)
            if isinstance(node.op, ast.Add):
                return left + right
            if isinstance(node.op, ast.Sub):
                return left - right
            if isinstance(node.op, ast.Mult):
                return left * right
            if isinstance(node.op, ast.Div):
                return left / right
        raise ValueError(NO_FORMULA)

    try:
        return float(value(ast.parse(plain, mode="eval").body)), numbers
    except (SyntaxError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ValueError(f"cannot be calculated ({type(error).__name__})") from None


def _parts(word: str) -> list[str]:
    """The word without what stands around it; `1,2,3` is three, `12,532` is one."""
    word = _trimmed(word)
    if _WORD.fullmatch(word):
        return [word]
    if re.fullmatch(r"[-+−]?\d+(?:,\d+)+", word):
        return word.split(",")
    if span := _SPAN.fullmatch(word):
        return [span[1], span[2]]
    return [word]


def _trimmed(word: str) -> str:
    return word.rstrip(".").strip("*_`'’‘$€,!?").rstrip(".")


def _known_unit(word: str) -> str:
    return word if word in UNITS else ""


def _stated(sign: str, text: str, *, thousands: bool, unit: str) -> Stated:
    times = 1000 if thousands else 1
    value = _float(text) * times * (-1 if sign in ("-", "−") else 1)
    return Stated(f"{sign}{text}{'k' if thousands else ''}", value, _step(text) * times,
                  _known_unit(unit), signed=bool(sign))  # fmt: skip


def _step(text: str) -> float:
    """0.01 for `1.25`, 1 for `12,532`, 100 for `1.2e3`."""
    digits, _, power = text.lower().partition("e")
    decimals = len(digits.partition(".")[2])
    return 10.0 ** min(int(power or 0) - decimals, 300)


def _float(text: str) -> float:
    value = float(text.replace(",", "").replace("_", ""))
    return value if math.isfinite(value) else math.nan  # which agrees with nothing
