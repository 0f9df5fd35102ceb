"""A findings record as values, and how one is read: strictly, everything wrong said at once."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from slotwise.errors import SlotwiseError
from slotwise.findings.older import OLDER_SCHEMA, from_older
from slotwise.findings.schema import FINDINGS_SCHEMA, MAJOR, MINOR, findings_schema
from slotwise.findings.validate import did_you_mean, shown, violations

LARGEST_RECORD = 16 * 1024**2
Missing = dict[str, str]


@dataclass(frozen=True)
class Issue:
    """Something about a record: `problem` speaks against it, `unchecked` could not be looked at."""

    level: Literal["problem", "unchecked", "note"]
    where: str
    found: str
    next_step: str = ""


@dataclass(frozen=True)
class Subject:
    repository: str | None
    revision: str | None
    missing: Missing = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """Lines of a file at the subject's revision, both ends included, from 1."""

    path: str
    start_line: int
    end_line: int
    sha256: str = ""
    note: str = ""

    def __str__(self) -> str:
        end = f"-{self.end_line}" if self.end_line != self.start_line else ""
        return f"{self.path}:{self.start_line}{end}"


@dataclass(frozen=True)
class Evidence:
    """A file by its SHA-256; the path is relative to the record or to `--evidence`."""

    id: str
    path: str
    sha256: str
    kind: str = "other"
    note: str = ""


@dataclass(frozen=True)
class Number:
    """A value and where it is from: one of evidence, formula and quoted."""

    value: float | None
    unit: str
    how: str
    evidence: str = ""
    pointer: str | None = None
    line: int | None = None
    formula: str = ""
    quoted: str = ""
    note: str = ""
    missing: Missing = field(default_factory=dict)


@dataclass(frozen=True)
class Claim:
    id: str
    statement: str
    status: str
    sources: tuple[Source, ...]
    evidence: tuple[str, ...]
    numbers: tuple[Number, ...]
    refuted_by: str | None
    limitations: tuple[str, ...] = ()
    missing: Missing = field(default_factory=dict)


@dataclass(frozen=True)
class Observation:
    statement: str
    evidence: tuple[str, ...] = ()
    n: int | None = None
    method: str = ""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Record:
    title: str
    subject: Subject
    status: str
    claims: tuple[Claim, ...]
    evidence: tuple[Evidence, ...]
    limitations: tuple[str, ...]
    observations: tuple[Observation, ...]
    invocation: str | None
    tool: dict[str, str]
    status_note: str = ""
    date: str = ""
    missing: Missing = field(default_factory=dict)
    older: bool = False
    """Converted from the older form, which has no place for evidence and numbers."""


def read_record(path: Path, data: bytes) -> tuple[Record | None, list[Issue]]:
    """The record in `data`, or None; and every reason why not. `path` is for messages only."""
    try:
        document = parse_strictly(data)
    except SlotwiseError as error:
        return None, [Issue("problem", path.name, str(error), error.next_step)]
    if not isinstance(document, dict):
        return None, [Issue("problem", path.name, f"is {shown(document)}; expected an object")]
    schema = document.get("schema")
    version = schema if isinstance(schema, str) else ""
    older = version == OLDER_SCHEMA
    if older:
        document, version = from_older(document), FINDINGS_SCHEMA
    minor, refusal = _minor_version(version)
    if refusal:
        return None, [refusal]
    document["schema"] = FINDINGS_SCHEMA
    issues = [
        Issue("problem", place or path.name, message)
        for place, message in violations(document, findings_schema(), newer=minor > MINOR)
    ]
    if issues:
        return None, issues
    if minor > MINOR:
        issues = [Issue("note", "schema", f"is of minor version {minor}, newer than {MINOR}",
                        "Keys unknown here were not checked; take a newer slotwise.")]  # fmt: skip
    return _record(document, older=older), issues


def parse_strictly(data: bytes) -> Any:
    """JSON without NaN, infinite numbers and keys given twice; SlotwiseError says what is wrong."""
    if len(data) > LARGEST_RECORD:
        raise SlotwiseError(f"has more than {LARGEST_RECORD:,} bytes; that is no findings record")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(items)
        if len(made) < len(items):
            keys = [key for key, _ in items]
            twice = sorted({shown(key) for key in keys if keys.count(key) > 1})
            raise SlotwiseError(f"has a key twice: {', '.join(twice)}", next_step="Keep one.")
        return made

    def constant(text: str) -> float:
        raise SlotwiseError(
            f"holds {text}, which is no JSON number", next_step="Write null, and why in `missing`."
        )

    def whole(text: str) -> int:
        number(text)
        return int(text)

    def number(text: str) -> float:
        value = float(text)
        return value if math.isfinite(value) else constant(text[:40])

    try:
        return json.loads(
            data.decode("utf-8-sig"), object_pairs_hook=pairs, parse_constant=constant,
            parse_float=number, parse_int=whole,
        )  # fmt: skip
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise SlotwiseError(f"is not JSON: {error.msg} at {where}") from None
    except UnicodeDecodeError as error:
        raise SlotwiseError(f"is not UTF-8 text (byte {error.start:,})") from None
    except RecursionError:
        raise SlotwiseError("is nested too deeply") from None


def _minor_version(schema: str) -> tuple[int, Issue | None]:
    found = re.fullmatch(r"slotwise\.findings/v(\d{1,6})(?:\.(\d{1,6}))?", schema)
    if not found:
        known = [FINDINGS_SCHEMA, OLDER_SCHEMA]
        text = f"is {shown(schema)}; expected {' or '.join(known)}{did_you_mean(schema, known)}"
        return 0, Issue("problem", "schema", text)
    if int(found[1]) != MAJOR:
        text = f"is major version {found[1]}; this slotwise reads {MAJOR}"
        return 0, Issue("problem", "schema", text, "Take the slotwise that wrote it, or a newer.")
    return int(found[2] or 0), None


def _record(document: dict[str, Any], *, older: bool) -> Record:
    claims = tuple(
        _make(
            Claim,
            claim
            | {"sources": tuple(_make(Source, s) for s in claim["sources"])}
            | {"numbers": tuple(_make(Number, n) for n in claim["numbers"])},
        )
        for claim in document["claims"]
    )
    parts = {
        "subject": _make(Subject, document["subject"]),
        "claims": claims,
        "evidence": tuple(_make(Evidence, e) for e in document["evidence"]),
        "observations": tuple(_make(Observation, o) for o in document["observations"]),
        "older": older,
    }
    return _make(Record, document | parts)


def _make(cls: type[Any], values: dict[str, Any]) -> Any:
    """The dataclass from a checked object; keys of a newer minor version are left away."""
    known = {f.name: f.type for f in dataclasses.fields(cls)}
    made = {}
    for key, value in values.items():
        if key in known:
            whole = isinstance(value, float) and "int" in str(known[key])
            made[key] = int(value) if whole else tuple(value) if isinstance(value, list) else value
    return cls(**made)
