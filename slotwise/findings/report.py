"""What a check found, as lines and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from slotwise.findings.citations import Citation
from slotwise.findings.record import Issue, Record

CHECK_SCHEMA = "slotwise.findings-check/v1"
LINES_SHOWN, WIDTH_SHOWN = 12, 120
PROBLEM, UNCHECKED = 4, 3


@dataclass
class Report:
    """Grows while a check runs."""

    record: Record | None
    issues: list[Issue] = field(default_factory=list)
    citations: list[tuple[str, Citation]] = field(default_factory=list)
    """With the place of each in the record."""
    numbers: list[tuple[str, str, str]] = field(default_factory=list)
    """(claim, number as stated, where it is from) of every number that is accounted for."""
    evidence: int = 0
    """Files whose checksum is right."""

    @property
    def exit_code(self) -> int:
        levels = {issue.level for issue in self.issues}
        return PROBLEM if "problem" in levels else UNCHECKED if "unchecked" in levels else 0

    def add(
        self, level: Literal["problem", "unchecked", "note"], where: str, found: str,
        next_step: str = "",
    ) -> None:  # fmt: skip
        self.issues.append(Issue(level, where, found, next_step))

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": CHECK_SCHEMA,
            "exit_code": self.exit_code,
            "issues": [vars(issue) for issue in self.issues],
            "citations": [
                {"where": where, "source": str(c.source), "sha256": c.sha256,
                 "lines": [line.rstrip("\r\n") for line in c.lines]}
                for where, c in self.citations
            ],
            "numbers": [
                {"claim": claim, "number": text, "from": place}
                for claim, text, place in self.numbers
            ],
            "evidence_verified": self.evidence,
        }  # fmt: skip


def report_lines(report: Report, name: str) -> Iterator[str]:
    """For people; whatever the record holds, a line is a line and has no control characters."""
    for _, citation in report.citations:
        yield from _citation(citation)
    for claim, text, place in report.numbers:
        yield plain(f"{claim}: {text} <- {place}")
    for level in ("note", "unchecked", "problem"):
        for issue in report.issues:
            if issue.level == level:
                step = f" {issue.next_step}" if issue.next_step else ""
                end = "" if issue.found.endswith((".", "!", "?")) else "."
                yield plain(f"{level}: {issue.where}: {issue.found}{end}{step}")
    verdict = {PROBLEM: "does not hold", UNCHECKED: "not fully checked"}
    yield plain(
        f"{name}: {verdict.get(report.exit_code, 'holds')}; problems: {_count(report, 'problem')}, "
        f"unchecked: {_count(report, 'unchecked')}; citations found: {len(report.citations)}, "
        f"evidence verified: {report.evidence}, numbers accounted for: {len(report.numbers)}"
    )


def plain(text: str) -> str:
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _citation(citation: Citation) -> Iterator[str]:
    yield plain(str(citation.source))
    shown = citation.lines[:LINES_SHOWN]
    for number, line in enumerate(shown, citation.source.start_line):
        text = plain(line.rstrip("\r\n").expandtabs(4))
        yield f"{number:6} | {text[:WIDTH_SHOWN]}{'…' if len(text) > WIDTH_SHOWN else ''}".rstrip()
    if len(citation.lines) > len(shown):
        yield f"       | ... {len(citation.lines) - len(shown)} more lines"


def _count(report: Report, level: str) -> int:
    return sum(issue.level == level for issue in report.issues)
