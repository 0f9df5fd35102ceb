"""The older form of a findings record, converted to `slotwise.findings/v1` in memory.

`anvil-investigation.prefill-phase-interpretation/v1`: a source revision, a status, findings (each a
claim and source lines), limitations, observations. No published schema of it is known, so several
spellings of every key are read. What cannot be converted is kept as text with its reason.
"""

from __future__ import annotations

import json
import re
from typing import Any

OLDER_SCHEMA = "anvil-investigation.prefill-phase-interpretation/v1"

_CLAIMS = ("findings", "claims", "interpretations", "results")
_STATEMENT = ("claim", "statement", "finding", "text", "summary", "title", "description")
_SOURCES = (
    "sources", "source_lines", "sourceLines", "source", "citations", "source_refs", "references",
    "refs", "lines", "evidence",
)  # fmt: skip
_REVISION = (
    "source_revision", "sourceRevision", "revision", "revisionId", "source_commit", "commit", "sha",
)  # fmt: skip
_REPOSITORY = ("repository", "repositoryUri", "repo", "source_repository", "url")
_PATH = ("path", "file", "uri", "source", "filename")
_START = ("start_line", "startLine", "line", "line_start", "lineStart", "start", "lines")
_END = ("end_line", "endLine", "line_end", "lineEnd", "end")
_CITATION = re.compile(r"^(.+?)(?::|#)L?(\d+)(?:\s*[-–:]\s*L?(\d+))?$")


def from_older(document: dict[str, Any]) -> dict[str, Any]:
    """A v1 document; whatever the older one holds, this does not fail."""
    claims = _items(_first(document, _CLAIMS))
    return {
        "schema": "slotwise.findings/v1",
        "title": _text(document.get("title")) or "Interpretation of prefill phases",
        "subject": _subject(document),
        "status": "source-supported",
        "status_note": _text(document.get("status")) or "no status is given",
        "claims": [_claim(item, number) for number, item in enumerate(claims, 1)],
        "evidence": [],
        "limitations": _texts(_first(document, ("limitations", "limits", "caveats"))),
        "observations": [
            {"statement": text} for text in _texts(_first(document, ("observations", "notes")))
        ],
        "invocation": None,
        "missing": {"invocation": "the older form has no place for it"},
        "tool": {"name": "converted from the older form", "version": "v1"},
    }


def _subject(document: dict[str, Any]) -> dict[str, Any]:
    inner = next(
        (v for k in ("source", "subject", *_REVISION) if isinstance(v := document.get(k), dict)), {}
    )
    revision = _text(_first(document, _REVISION, plain=True) or _first(inner, _REVISION))
    repository = _text(_first(document, _REPOSITORY) or _first(inner, _REPOSITORY))
    about, _, after = revision.rpartition("@")
    if about and re.fullmatch(r"[0-9a-fA-F]{40}", after):
        repository, revision = repository or about, after
    missing = {}
    if not re.fullmatch(r"[0-9a-fA-F]{40}", revision):
        missing["revision"] = f"given as '{revision}', not as 40 hexadecimal digits"
    if not repository:
        missing["repository"] = "the older form does not name it"
    return {
        "repository": repository or None,
        "revision": None if "revision" in missing else revision.lower(),
        "missing": missing,
    }


def _claim(item: Any, number: int) -> dict[str, Any]:
    entry = item if isinstance(item, dict) else {"claim": item}
    sources, unclear = [], []
    for cited in _items(_first(entry, _SOURCES)):
        found = list(_sources(cited))
        sources += found
        unclear += [] if found else [_text(cited)]
    missing = {"refuted_by": "the older form has no place for it"}
    if unclear:
        missing["sources"] = f"cited without path and line: {'; '.join(unclear)}"
    elif not sources:
        missing["sources"] = "the older record cites none"
    name = _text(_first(entry, ("id", "name", "key")))
    return {
        "id": name if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) else f"claim-{number}",
        "statement": _text(_first(entry, _STATEMENT)) or "TODO: the older record states nothing",
        "status": "source-supported",
        "sources": sources,
        "evidence": [],
        "numbers": [],
        "refuted_by": None,
        "limitations": _texts(_first(entry, ("limitations", "caveats"))),
        "missing": missing,
    }


def _sources(cited: Any) -> list[dict[str, Any]]:
    """Citations out of `a.cpp:10-20`, `a.cpp#L10-L20`, `a.cpp:10,30-31`, or an object."""
    if isinstance(cited, dict):
        path, start, end = _text(_first(cited, _PATH)), _first(cited, _START), _first(cited, _END)
        if isinstance(start, list):
            whole = start and all(isinstance(n, int) for n in start)
            ranges = [f"{min(start)}-{max(start)}"] if whole else [_text(n) for n in start]
        else:
            ranges = [f"{_text(start)}-{_text(end)}" if end is not None else _text(start)]
        return [s for r in ranges if path for s in _sources(f"{path}:{r}" if start else path)]
    if not isinstance(cited, str):
        return []
    path, _, tail = cited.strip().rpartition(":")
    if path and "," in tail:
        return [s for part in tail.split(",") for s in _sources(f"{path}:{part.strip()}")]
    found = _CITATION.fullmatch(cited.strip())
    if not found or len(cited) > 1000 or int(found[2]) < 1:
        return []
    start, end = int(found[2]), int(found[3] or found[2])
    return [{"path": found[1], "start_line": start, "end_line": end}]


def _first(entry: dict[str, Any], keys: tuple[str, ...], *, plain: bool = False) -> Any:
    """The value of the first of the keys that is there."""
    for key in keys:
        value = entry.get(key)
        if value is not None and not (plain and isinstance(value, dict)):
            return value
    return None


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        if any(key in value for key in (*_PATH, *_STATEMENT)):
            return [value]
        return [
            {"id": key, **item} if isinstance(item, dict) else f"{key}: {_text(item)}"
            for key, item in value.items()
        ]
    return value if isinstance(value, list) else [] if value is None else [value]


def _texts(value: Any) -> list[str]:
    made = [
        _text(_first(item, _STATEMENT)) or _text(item) if isinstance(item, dict) else _text(item)
        for item in _items(value)
    ]
    return [text for text in made if text]


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value.strip() if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
