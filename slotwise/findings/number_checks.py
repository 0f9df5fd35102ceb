"""Every number in a claim's statement: in its evidence, calculated from it, or marked as quoted."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

from slotwise.findings.evidence import Opened, Unreadable, at_pointer, in_line, search
from slotwise.findings.numbers import (
    Found,
    Stated,
    agrees,
    evaluate,
    stated_numbers,
    stated_value,
)
from slotwise.findings.record import Claim, Number, Record
from slotwise.findings.report import Report

PLAIN_FACTORS = {1, 10, 60, 100, 1000, 1024, 1_000_000, 1_048_576}
"""Numbers of a formula that no evidence has to hold: they change units."""


def check_numbers(record: Record, report: Report, opened: dict[str, Opened]) -> None:
    checker = _Checker(record, report, opened)
    for index, claim in enumerate(record.claims):
        checker.check(f"claims[{index}]", claim)


class _Checker:
    """Holds what was found where, so that every file is searched once."""

    def __init__(self, record: Record, report: Report, opened: dict[str, Opened]) -> None:
        self.record, self.report, self.opened = record, report, opened
        self.paths = {e.id: e.path for e in record.evidence}
        self.found = {name: self._search(name, file) for name, file in opened.items()}

    def check(self, place: str, claim: Claim) -> None:
        origins = [
            (number, self._origin(f"{place}.numbers[{at}]", number, claim))
            for at, number in enumerate(claim.numbers)
            if number.value is not None
        ]
        for stated in stated_numbers(claim.statement):
            fitting = [(n, origin) for n, origin in origins if _is_stated(n, stated)]
            origin = next((o for _, o in fitting if o), "")
            if fitting and not origin:
                continue  # the entry is wrong, and that was said
            origin = origin or self._place(stated, claim.evidence)
            if origin:
                self.report.numbers.append((claim.id, _as_written(stated), origin))
            else:
                self._not_found(f"{place}.statement", stated, claim)

    def _origin(self, where: str, number: Number, claim: Claim) -> str:
        """Where the value is from, or "" after saying what is wrong with it."""
        if number.quoted:
            return f"quoted from {number.quoted}"
        if number.formula:
            return self._calculated(where, number, claim)
        if number.evidence not in self.opened:
            if number.evidence in self.paths:
                text = f"{_value(number)} not looked up: {number.evidence} was not read"
                self.report.add("unchecked", where, text)
            return ""
        return self._looked_up(where, number)

    def _looked_up(self, where: str, number: Number) -> str:
        stated = _stated(number)
        file, path = self.opened[number.evidence], self.paths[number.evidence]
        try:
            if number.pointer is not None:
                found: Found | None = at_pointer(file, number.pointer)
                if found and not agrees(stated, found):
                    text = f"{path} has {found.value:,.12g} {found.unit} at {number.pointer}"
                    self.report.add("problem", where, f"{text}, not {_value(number)}")
                    return ""
            elif number.line is not None:
                found = in_line(file, number.line, stated)
            else:
                found = self.found[number.evidence].get(stated)
        except (Unreadable, OSError, EOFError, zlib.error) as error:
            self.report.add("problem", where, f"{path} {error}")
            return ""
        if found:
            return f"{path}, {found.place}"
        at = f"line {number.line} of {path}" if number.line else path
        level = "problem" if file.whole else "unchecked"
        self.report.add(level, where, f"{_value(number)} is not in {at}")
        return ""

    def _calculated(self, where: str, number: Number, claim: Claim) -> str:
        try:
            value, operands = evaluate(number.formula)
        except ValueError as error:
            self.report.add("problem", where, f"the formula {error}: {number.formula}")
            return ""
        if not agrees(_stated(number), Found(value, "", "")):
            text = f"{number.formula} is {value:,.6g}, not {_value(number)}"
            self.report.add("problem", where, text)
            return ""
        unknown = [text for text in operands if not self._is_known(text, number, claim)]
        if unknown:
            level = "problem" if self._all_read(claim) else "unchecked"
            text = f"{', '.join(unknown)} in the formula: not in the evidence, nor quoted"
            self.report.add(level, where, text)
            return ""
        return f"calculated: {number.formula}"

    def _is_known(self, text: str, number: Number, claim: Claim) -> bool:
        stated = _operand(text)
        others = [n for n in claim.numbers if n is not number and n.value is not None]
        return (
            stated.value in PLAIN_FACTORS
            or any(_is_stated(other, stated) for other in others)
            or bool(self._place(stated, self._evidence_of(claim)))
        )

    def _not_found(self, where: str, stated: Stated, claim: Claim) -> None:
        text = _as_written(stated)
        if math.isnan(stated.value):
            step = "Write it like 12,532 or 0.319."
            self.report.add("problem", where, f"{text} cannot be read as a number", step)
        elif self.record.older:
            self.report.add("unchecked", where, f"{text}: the older form names no evidence")
        elif self._all_read(claim):
            there = f"not in its evidence ({', '.join(claim.evidence)})"
            text = f"{text} is {there if claim.evidence else 'in no evidence: none is named'}"
            step = "Add it to `numbers`: with evidence, a formula, or where it is quoted from."
            self.report.add("problem", where, text, step)
        else:
            self.report.add("unchecked", where, f"{text}: not all of its evidence was read")

    def _place(self, stated: Stated, names: Sequence[str]) -> str:
        for name in names:
            found = self.found.get(name, {}).get(stated)
            if found:
                return f"{self.paths[name]}, {found.place}"
        return ""

    def _search(self, name: str, file: Opened) -> dict[Stated, Found]:
        wanted: list[Stated] = []
        for claim in self.record.claims:
            if name in self._evidence_of(claim):
                wanted += stated_numbers(claim.statement)
                wanted += [_stated(n) for n in claim.numbers if n.value is not None]
                wanted += [_operand(o) for n in claim.numbers for o in _operands(n.formula)]
        try:
            return search(file, wanted)
        except (OSError, EOFError, zlib.error) as error:
            self.report.add("problem", "evidence", f"{self.paths[name]}: {error}")
            return {}

    def _evidence_of(self, claim: Claim) -> list[str]:
        names = [*claim.evidence, *(n.evidence for n in claim.numbers if n.evidence)]
        return list(dict.fromkeys(names))

    def _all_read(self, claim: Claim) -> bool:
        files = [self.opened.get(name) for name in self._evidence_of(claim)]
        return all(file and file.whole for file in files)


def _is_stated(number: Number, stated: Stated) -> bool:
    """Whether the statement's number is this entry's, to the digits it is stated with."""
    unit = _stated(number).unit
    return number.value is not None and agrees(stated, Found(number.value, unit, ""))


def _stated(number: Number) -> Stated:
    return stated_value(number.value or 0, number.unit)


def _operand(text: str) -> Stated:
    return next(iter(stated_numbers(text)), Stated(text, float(text), 0))


def _operands(formula: str) -> list[str]:
    try:
        return evaluate(formula)[1] if formula else []
    except ValueError:
        return []


def _value(number: Number) -> str:
    return f"{number.value:,.12g} {number.unit}".strip() if number.value is not None else "null"


def _as_written(stated: Stated) -> str:
    return f"{stated.text} {stated.unit}".strip()
