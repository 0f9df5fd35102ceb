"""A record against what it cites: source lines, evidence files, and every number of its claims.

Everything wrong is listed at once. What could not be looked at is `unchecked`, never passed
silently.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from slotwise.findings.citations import CannotCheck, Checkout, NotCited
from slotwise.findings.evidence import SEARCHED, Opened, Unreadable, file_sha256, open_evidence
from slotwise.findings.number_checks import check_numbers
from slotwise.findings.record import Claim, Evidence, Issue, Number, Record
from slotwise.findings.report import Report

PLACEHOLDER = "TODO"
REASON_IS_ENOUGH = {"refuted_by", "invocation", "repository"}
"""Fields that may be missing for a reason and leave nothing unchecked."""


def check_record(
    record: Record, *, repo: Path | None, folder: Path, folder_given: bool,
    issues: Sequence[Issue] = (),
) -> Report:  # fmt: skip
    """Checks all that can be checked. `folder` is where the evidence's paths begin."""
    report = Report(record, list(issues))
    _check_sense(record, report)
    _check_citations(record, report, repo)
    opened = _check_evidence(record, report, folder, must_be_there=folder_given)
    check_numbers(record, report, opened)
    return report


def _check_sense(record: Record, report: Report) -> None:
    """What the schema cannot say."""
    for where, text in _texts(record):
        if text.startswith(PLACEHOLDER):
            report.add("problem", where, "is still to be written", "Write it, or take it out.")
    for where, names in (
        ("claims", [c.id for c in record.claims]),
        ("evidence", [e.id for e in record.evidence]),
    ):
        for name in sorted({n for n in names if names.count(n) > 1}):
            report.add("problem", where, f"the id {name} is there twice")
    known = {e.id for e in record.evidence}
    for where, name in _references(record):
        if name not in known:
            report.add("problem", where, f"there is no evidence {name}")
    _check_reasons("", record, ("invocation",), record.missing, report)
    subject = record.subject
    _check_reasons("subject", subject, ("repository", "revision"), subject.missing, report)
    for index, claim in enumerate(record.claims):
        place = f"claims[{index}]"
        _check_reasons(place, claim, ("refuted_by",), claim.missing, report)
        _check_rests_on_something(place, claim, report)
        for at, source in enumerate(claim.sources):
            where = f"{place}.sources[{at}]"
            if source.end_line < source.start_line:
                report.add("problem", where, f"ends at line {source.end_line}, before it starts")
            if not _is_inside(source.path):
                report.add("problem", where, "the path is not relative to the repository")
        for at, number in enumerate(claim.numbers):
            _check_number_form(f"{place}.numbers[{at}]", number, report)


def _check_reasons(
    place: str, owner: object, names: Sequence[str], missing: dict[str, str], report: Report
) -> None:
    """A null needs a reason in `missing`; what the reason keeps from being checked is said."""
    for name in names:
        where = f"{place}.{name}".lstrip(".")
        if getattr(owner, name) is None and name not in missing:
            report.add("problem", where, "is null without a reason",
                       f"Say why in `missing`: {{\"{name}\": ...}}.")  # fmt: skip
    for name, reason in missing.items():
        if reason.startswith(PLACEHOLDER):
            continue  # said already
        level = "note" if name in REASON_IS_ENOUGH else "unchecked"
        report.add(level, f"{place}.{name}".lstrip("."), f"is missing: {reason}")


def _check_rests_on_something(place: str, claim: Claim, report: Report) -> None:
    needed = "sources" if claim.status == "source-supported" else "evidence"
    quoted = any(n.quoted for n in claim.numbers)
    there = claim.sources or (claim.evidence or quoted if needed == "evidence" else ())
    if claim.status in ("predicted", "refuted"):
        there = claim.sources or claim.evidence or claim.numbers
    if not there and not {"sources", "evidence"} & set(claim.missing):
        report.add("problem", place, f"is {claim.status}, and names no {needed}",
                   f"Name them, or say why not in `missing`: {{\"{needed}\": ...}}.")  # fmt: skip


def _check_number_form(where: str, number: Number, report: Report) -> None:
    origins = [n for n in ("evidence", "formula", "quoted") if getattr(number, n)]
    if number.value is None:
        if number.how != "missing" or "value" not in number.missing:
            report.add("problem", where, "a null value needs how = missing and a reason",
                       'Say why in `missing`: {"value": ...}.')  # fmt: skip
    elif number.how == "missing":
        report.add("problem", where, "is called missing and has a value")
    elif len(origins) != 1:
        report.add("problem", where, f"names {' and '.join(origins) or 'no origin'}",
                   "Exactly one of evidence, formula and quoted.")  # fmt: skip
    if not number.evidence and (number.pointer is not None or number.line is not None):
        report.add("problem", where, "has a pointer or a line and no evidence")


def _check_citations(record: Record, report: Report, repo: Path | None) -> None:
    cited = [
        (f"claims[{i}].sources[{k}]", source)
        for i, claim in enumerate(record.claims)
        for k, source in enumerate(claim.sources)
        if source.start_line <= source.end_line and _is_inside(source.path)
    ]
    if not cited:
        return
    if record.subject.revision is None or repo is None:
        step = "" if repo else "Give --repo CHECKOUT, a git checkout that has the revision."
        what = "the revision is unknown" if repo else "no checkout was given"
        report.add("unchecked", "sources", f"{len(cited)} citations not looked up: {what}", step)
        return
    try:
        checkout = Checkout(repo, record.subject.revision)
    except CannotCheck as error:
        report.add("unchecked", "sources", f"{len(cited)} citations not looked up: {error}")
        return
    for where, source in cited:
        try:
            citation = checkout.cite(source)
        except NotCited as error:
            report.add("problem", where, f"{source}: {error}")
            continue
        except CannotCheck as error:
            report.add("unchecked", where, f"{source}: {error}")
            continue
        report.citations.append((where, citation))
        if source.sha256 and source.sha256 != citation.sha256:
            report.add("problem", where, f"{source}: the lines have the SHA-256 {citation.sha256}",
                       "The lines or the revision are other ones than were cited.")  # fmt: skip
        if not "".join(citation.lines).strip():
            report.add("problem", where, f"{source}: the cited lines are empty")


def _check_evidence(
    record: Record, report: Report, folder: Path, *, must_be_there: bool
) -> dict[str, Opened]:
    """The files that are there and are the right ones, opened, by id."""
    opened = {}
    for index, entry in enumerate(record.evidence):
        where = f"evidence[{index}]"
        path = folder / entry.path
        if not _is_inside(entry.path):
            report.add("problem", where, "the path is not relative, or leads out of the folder")
        elif not must_be_there and not _is_there(path):
            report.add("unchecked", where, f"{entry.path} is not beside the record",
                       "Give --evidence FOLDER.")  # fmt: skip
        else:
            file = _open(entry, path, where, report)
            opened |= {entry.id: file} if file else {}
    return opened


def _open(entry: Evidence, path: Path, where: str, report: Report) -> Opened | None:
    try:
        if not path.is_file():
            what = "is not a file" if _is_there(path) else "is not there"
            report.add("problem", where, f"{entry.path} {what}")
            return None
        digest = file_sha256(path)
        if digest != entry.sha256:
            report.add("problem", where, f"{entry.path} has the SHA-256 {digest}",
                       "It is another file than the record means.")  # fmt: skip
            return None
        report.evidence += 1
        file = open_evidence(path)
    except (OSError, Unreadable) as error:
        reason = getattr(error, "strerror", None) or error
        report.add("problem", where, f"{entry.path}: {reason}")
        return None
    if not file.whole:
        text = f"{entry.path}: numbers were looked for in the first {SEARCHED:,} bytes"
        report.add("note", where, text)
    return file


def _texts(record: Record) -> Iterator[tuple[str, str]]:
    """Every text a person writes, with its place."""
    yield "title", record.title
    for owner, place in ((record, ""), (record.subject, "subject.")):
        yield from ((f"{place}{name}", text) for name, text in owner.missing.items())
    for index, claim in enumerate(record.claims):
        place = f"claims[{index}]"
        yield f"{place}.statement", claim.statement
        yield f"{place}.refuted_by", claim.refuted_by or ""
        yield from ((f"{place}.{name}", text) for name, text in claim.missing.items())
    for index, text in enumerate(record.limitations):
        yield f"limitations[{index}]", text
    for index, observation in enumerate(record.observations):
        yield f"observations[{index}]", observation.statement


def _references(record: Record) -> Iterator[tuple[str, str]]:
    for index, claim in enumerate(record.claims):
        yield from ((f"claims[{index}].evidence", name) for name in claim.evidence)
        for at, number in enumerate(claim.numbers):
            if number.evidence:
                yield f"claims[{index}].numbers[{at}].evidence", number.evidence
    for index, observation in enumerate(record.observations):
        yield from ((f"observations[{index}].evidence", name) for name in observation.evidence)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name longer than the file system allows
        return False


def _is_inside(path: str) -> bool:
    """Relative, without `..` and without characters that no path in a report should have."""
    parts = PurePosixPath(path).parts
    return path.isprintable() and parts[:1] != ("/",) and ".." not in parts and "\\" not in path
