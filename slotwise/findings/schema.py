"""The published JSON Schema of a findings record, `slotwise.findings/v1`.

`python -m slotwise.findings.schema > docs/schemas/findings-v1.json` writes it; a test compares the
two. What no JSON Schema says (a null needs a reason, an id must exist) is in `check.py`.

Shapes are borrowed from SARIF 2.1.0 (a citation: path, lines, digest of the snippet) and in-toto (a
subject, a versioned schema name).
"""

from __future__ import annotations

import json
from typing import Any

FINDINGS_SCHEMA = "slotwise.findings/v1"
MAJOR, MINOR = 1, 0
"""A record of a newer minor version has keys unknown here; one of a newer major is refused."""

RECORD_STATUSES = ("draft", "source-supported", "measured", "refuted", "superseded")
CLAIM_STATUSES = ("source-supported", "measured", "derived", "predicted", "refuted")
HOWS = ("measured", "derived", "bounded", "missing")
EVIDENCE_KINDS = ("run-record", "trace", "log", "other")

_TEXT = {"type": "string", "minLength": 1}
_TEXTS = {"type": "array", "items": _TEXT}
_ID = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]*$"}
_IDS = {"type": "array", "items": _ID}
_LINE = {"type": "integer", "minimum": 1}
_SHA256 = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_RELATIVE = {"type": "string", "minLength": 1, "description": "Relative, with / between folders."}
_MISSING = {
    "type": "object",
    "additionalProperties": _TEXT,
    "description": "Why a field is null or empty, by the field's name.",
}


def _object(required: dict[str, Any], optional: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "type": [schema["type"], "null"]}


def _list_of(name: str, *, at_least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": {"$ref": f"#/$defs/{name}"}, "minItems": at_least}


def _definitions() -> dict[str, Any]:
    revision = {"type": "string", "pattern": "^[0-9a-f]{40}$"}
    return {
        "Subject": _object(
            {"repository": _or_null(_TEXT), "revision": _or_null(revision)}, {"missing": _MISSING}
        ),
        "Source": _object(
            {"path": _RELATIVE, "start_line": _LINE, "end_line": _LINE},
            {"sha256": {**_SHA256, "description": "Of the cited lines as the blob holds them."},
             "note": _TEXT},
        ),
        "Evidence": _object(
            {"id": _ID, "path": _RELATIVE, "sha256": _SHA256},
            {"kind": {"enum": list(EVIDENCE_KINDS)}, "note": _TEXT},
        ),
        "Number": _object(
            {"value": {"type": ["number", "null"]}, "unit": {"type": "string"},
             "how": {"enum": list(HOWS)}},
            {"evidence": {**_ID, "description": "Id of the evidence that holds the value."},
             "pointer": {"type": "string", "pattern": "^(/.*)?$",
                         "description": "RFC 6901, into JSON evidence; in JSON lines the first "
                                        "part is the line's index from 0."},
             "line": {**_LINE, "description": "Line of text evidence."},
             "formula": {**_TEXT, "description": "+ - * / of numbers that the evidence holds."},
             "quoted": {**_TEXT, "description": "Where it was quoted from; not checked."},
             "note": _TEXT, "missing": _MISSING},
        ),
        "Claim": _object(
            {"id": _ID, "statement": _TEXT, "status": {"enum": list(CLAIM_STATUSES)},
             "sources": _list_of("Source"), "evidence": _IDS, "numbers": _list_of("Number"),
             "refuted_by": {**_or_null(_TEXT), "description": "What would refute it."}},
            {"limitations": _TEXTS, "missing": _MISSING},
        ),
        "Observation": _object(
            {"statement": _TEXT},
            {"evidence": _IDS, "n": {"type": "integer", "minimum": 0}, "method": _TEXT,
             "warnings": _TEXTS},
        ),
        "Tool": _object({"name": _TEXT, "version": _TEXT}, {}),
    }  # fmt: skip


def findings_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) that a record must satisfy."""
    record = _object(
        {
            "schema": {"const": FINDINGS_SCHEMA},
            "title": _TEXT,
            "subject": {"$ref": "#/$defs/Subject"},
            "status": {"enum": list(RECORD_STATUSES)},
            "claims": _list_of("Claim", at_least=1),
            "evidence": _list_of("Evidence"),
            "limitations": {**_TEXTS, "minItems": 1},
            "observations": _list_of("Observation"),
            "invocation": {"type": ["string", "null"]},
            "tool": {"$ref": "#/$defs/Tool"},
        },
        {"status_note": _TEXT, "date": {"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}$"},
         "missing": _MISSING},
    )  # fmt: skip
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"A {FINDINGS_SCHEMA} record",
        "description": "Claims about one revision of a source, with what each of them rests on.",
        **record,
        "$defs": _definitions(),
    }


if __name__ == "__main__":
    print(json.dumps(findings_schema(), indent=1))
