"""A findings record as Markdown. Writes what the record says, calculates nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from slotwise.findings.record import Claim, Number, Record, Source
from slotwise.findings.schema import FINDINGS_SCHEMA


def markdown(record: Record) -> str:
    blocks = [
        f"# {_text(record.title)}",
        "\n".join(_head(record)),
        "## Claims",
        *(block for number, claim in enumerate(record.claims, 1)
          for block in _claim(claim, number, record)),
        "## Evidence",
        _evidence(record),
        "## Limitations",
        _bullets(record.limitations),
    ]  # fmt: skip
    if record.observations:
        blocks += ["## Observations", "\n".join(_observations(record))]
    command = f": {_code(record.invocation)}" if record.invocation else ""
    blocks.append(f"Written by {_text(record.tool['name'])} {record.tool['version']}{command}.")
    return "\n\n".join(blocks) + "\n"


def _head(record: Record) -> Iterator[str]:
    subject = record.subject
    yield "| | |"
    yield "| --- | --- |"
    yield f"| subject | {_or_reason(subject.repository, subject.missing.get('repository'))} |"
    yield f"| revision | {_or_reason(subject.revision, subject.missing.get('revision'))} |"
    note = f": {_cell(record.status_note)}" if record.status_note else ""
    yield f"| status | {record.status}{note} |"
    if record.date:
        yield f"| date | {record.date} |"
    form = "the older form, converted" if record.older else FINDINGS_SCHEMA
    yield f"| schema | {form} |"


def _claim(claim: Claim, number: int, record: Record) -> Iterator[str]:
    yield f"### {number}. {_text(claim.id)} ({claim.status})"
    yield _text(claim.statement)
    facts = [f"Source: {_source(source, record)}" for source in claim.sources]
    if claim.evidence:
        facts.append(f"Evidence: {', '.join(claim.evidence)}")
    if claim.refuted_by:
        facts.append(f"Refuted by: {_text(claim.refuted_by)}")
    facts += [f"Limitation: {_text(text)}" for text in claim.limitations]
    facts += [f"No {_text(name)}: {_text(why)}" for name, why in claim.missing.items()]
    if facts:
        yield "\n".join(f"- {fact}" for fact in facts)
    if claim.numbers:
        rows = [f"| {_value(n)} | {n.how} | {_cell(_origin(n))} |" for n in claim.numbers]
        yield "\n".join(["| number | how | where from |", "| ---: | --- | --- |", *rows])


def _source(source: Source, record: Record) -> str:
    revision = f"@{record.subject.revision[:12]}" if record.subject.revision else ""
    digest = f", SHA-256 `{source.sha256[:12]}…`" if source.sha256 else ""
    note = f" ({_text(source.note)})" if source.note else ""
    return f"{_code(f'{source}{revision}')}{digest}{note}"


def _value(number: Number) -> str:
    if number.value is None:
        return f"missing {_cell(number.unit)}".strip()
    value = number.value
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return f"{text} {_cell(number.unit)}".strip()


def _origin(number: Number) -> str:
    note = f" ({number.note})" if number.note else ""
    if number.value is None:
        return f"missing: {number.missing.get('value', 'no reason given')}{note}"
    if number.quoted:
        return f"quoted from {number.quoted}{note}"
    if number.formula:
        return f"`{number.formula}`{note}"
    at = f" `{number.pointer}`" if number.pointer else ""
    at = f" line {number.line}" if number.line else at
    return f"{number.evidence}{at}{note}"


def _evidence(record: Record) -> str:
    if not record.evidence:
        return "None is attached."
    rows = [
        f"| {e.id} | {_cell(e.path)} | {e.kind} | `{e.sha256}` | {_cell(e.note)} |"
        for e in record.evidence
    ]
    header = ["| id | file | kind | SHA-256 | |", "| --- | --- | --- | --- | --- |"]
    return "\n".join([*header, *rows])


def _observations(record: Record) -> Iterator[str]:
    for observation in record.observations:
        facts = [f"n = {observation.n}"] if observation.n is not None else []
        facts += [f"method: {_text(observation.method)}"] if observation.method else []
        facts += [f"evidence: {', '.join(observation.evidence)}"] if observation.evidence else []
        yield f"- {_text(observation.statement)}" + (f" ({'; '.join(facts)})" if facts else "")
        yield from (f"  - Warning: {_text(warning)}" for warning in observation.warnings)


def _bullets(texts: Sequence[str]) -> str:
    return "\n".join(f"- {_text(text)}" for text in texts)


def _or_reason(value: str | None, reason: str | None) -> str:
    return _code(value) if value else f"unknown: {_cell(reason or 'no reason given')}"


def _code(text: str) -> str:
    return f"`{_one_line(text).replace('`', chr(39)).replace('|', chr(92) + '|')}`"


def _cell(text: str) -> str:
    return _text(text).replace("|", "\\|")


def _text(text: str) -> str:
    """One line of Markdown in which no HTML is left; what is in backticks stays as it is."""
    pieces = re.split(r"(`[^`]*`)", _one_line(text))
    return "".join(
        p if i % 2 else p.replace("&", "&amp;").replace("<", "&lt;") for i, p in enumerate(pieces)
    )


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))
