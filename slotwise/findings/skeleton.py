"""A new record to fill in. What is to be written says TODO, and a check asks for it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slotwise import __version__
from slotwise.errors import UsageError
from slotwise.findings.citations import CannotCheck, head_of
from slotwise.findings.evidence import file_sha256
from slotwise.findings.schema import FINDINGS_SCHEMA

_KINDS = {".json": "run-record", ".jsonl": "trace", ".log": "log", ".txt": "log"}


def new_record(
    *, subject_repo: Path | None, evidence: Sequence[Path], folder: Path, arguments: Sequence[str]
) -> dict[str, Any]:
    """A record about `subject_repo` at HEAD; evidence paths relative to `folder`. UsageError."""
    entries = [_entry(path, folder, number) for number, path in enumerate(evidence, 1)]
    return {
        "schema": FINDINGS_SCHEMA,
        "title": "TODO: what this is about",
        "subject": _subject(subject_repo),
        "status": "draft",
        "claims": [
            {
                "id": "first",
                "statement": "TODO: one claim, with its numbers",
                "status": "measured" if entries else "source-supported",
                "sources": [],
                "evidence": [entry["id"] for entry in entries],
                "numbers": [],
                "refuted_by": "TODO: what one would have to see to give the claim up",
                **({} if entries else {"missing": {"sources": "TODO: cite path and lines"}}),
            }
        ],
        "evidence": entries,
        "limitations": ["TODO: what this does not show"],
        "observations": [],
        "invocation": shlex.join(["slotwise", "findings", "new", *arguments]),
        "tool": {"name": "slotwise", "version": __version__},
    }


def _subject(repo: Path | None) -> dict[str, Any]:
    if repo is None:
        missing = dict.fromkeys(("repository", "revision"), "TODO: name it, or say why not")
        return {"repository": None, "revision": None, "missing": missing}
    try:
        repository, revision = head_of(repo)
    except CannotCheck as error:
        raise UsageError(str(error), next_step="Give a git checkout with a commit.") from None
    return {"repository": repository, "revision": revision}


def _entry(path: Path, folder: Path, number: int) -> dict[str, str]:
    try:
        relative = path.resolve().relative_to(folder.resolve()).as_posix()
    except ValueError:
        raise UsageError(
            f"{path} does not lie in the record's folder {folder}",
            next_step="Put it beside the record: its path in the record is relative to it.",
        ) from None
    kind = _KINDS.get(Path(path.name.removesuffix(".gz")).suffix, "other")
    return {"id": f"e{number}", "path": relative, "sha256": file_sha256(path), "kind": kind}
