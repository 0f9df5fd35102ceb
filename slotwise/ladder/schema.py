"""The published JSON Schema of a ladder's run record, `slotwise.ladder/v1`.

`python -m slotwise.ladder.schema > docs/schemas/ladder-v1.json` writes it; a test compares the two.
Times are milliseconds after the request's last byte left this client, unless their name says
otherwise. The record holds no prompt, no answer, no path and no key.
"""

from __future__ import annotations

import json
from typing import Any

LADDER_SCHEMA = "slotwise.ladder/v1"
MAJOR, MINOR = 1, 0
"""A record of a newer minor version has keys unknown here; one of a newer major is refused."""

RUN_STATUSES = ("running", "done", "interrupted", "failed")
SAMPLE_STATUSES = ("ok", "refused", "error")
EDGES: tuple[str, ...] = ("first_byte", "first_event", "first_token", "first_content", "last_byte")

_TEXT = {"type": "string", "minLength": 1}
_TEXTS = {"type": "array", "items": {"type": "string"}}
_COUNT = {"type": "integer", "minimum": 0}
_SHA256 = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_MS = {"type": ["number", "null"]}
_BLOCK = {"type": ["object", "null"], "description": "As the server sent it, without its texts."}


def _object(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "type": [schema["type"], "null"]}


def _list_of(name: str) -> dict[str, Any]:
    return {"type": "array", "items": {"$ref": f"#/$defs/{name}"}}


def _plan() -> dict[str, Any]:
    return _object({
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1},
        "samples": {"type": "integer", "minimum": 1,
                    "description": "Per size and arm, beside the first ones."},
        "starts": {"type": "integer", "minimum": 1,
                   "description": "How often an arm that is a process of its own is started."},
        "seed": {"type": "integer", "description": "Of the order of sizes and the passages."},
        "endpoint": {"enum": ["chat", "completions"]},
        "max_tokens": {"type": "integer", "minimum": 1},
        "reuse": {"type": "boolean", "description": "Samples ask for the cache on purpose."},
        "text": {"$ref": "#/$defs/Text"},
        "steps": {"type": "integer", "minimum": 1, "description": "Samples that were planned."},
    })  # fmt: skip


def _arm() -> dict[str, Any]:
    engaged = _object({
        "counter": _TEXT,
        "is": {"type": ["number", "string", "boolean", "null"], "description": "What it must be."},
        "above": {"type": ["number", "null"], "description": "Or what it must be more than."},
        "every_sample": {"type": "boolean", "description": "Or else once in the arm."},
    })  # fmt: skip
    return _object({
        "name": _TEXT,
        "file_sha256": _or_null(_SHA256),
        "switched_on_by": {"type": "array", "items": {"enum": ["process", "fields", "url"]}},
        "fields": {"type": "object", "description": "Added to each request; texts of over 64 "
                                                    "characters as their checksum."},
        "environment": {**_TEXTS, "description": "Names of the variables that were set."},
        "engaged": {"type": "array", "items": engaged,
                    "description": "What has to hold for the arm to have been switched on."},
        "servers": {**_list_of("Server"), "description": "One per start."},
    })  # fmt: skip


def _sample() -> dict[str, Any]:
    edge: dict[str, Any] = dict.fromkeys(EDGES, _MS)
    tokens = _object(
        {"prompt": _or_null(_COUNT), "cached": _or_null(_COUNT), "generated": _or_null(_COUNT)}
    )
    return _object({
        "index": _COUNT,
        "arm": _TEXT,
        "start": {**_COUNT, "description": "Which start of the arm, from 0."},
        "target_tokens": {"type": "integer", "minimum": 1},
        "round": {**_COUNT, "description": "0 is the first round of a start: the cold samples."},
        "cold": {"type": "boolean"},
        "first_of_process": {"type": "boolean"},
        "status": {"enum": list(SAMPLE_STATUSES)},
        "why": {"type": "string", "description": "Why it was refused or failed; else empty."},
        "request_id": {**_TEXT, "description": "Sent as X-Request-Id."},
        "prompt_sha256": _SHA256,
        "prompt_chars": _COUNT,
        "passage": {**_COUNT, "description": "Where in the text the prompt begins."},
        "http_status": _or_null(_COUNT),
        "began_ns": {**_COUNT, "description": "On the run's clock, before the request was sent."},
        "sent_ns": {**_or_null(_COUNT), "description": "On the run's clock: the last bytes were "
                                                       "handed over. Zero of the edges."},
        "edges_ms": _object(edge),
        "token_ms": {"type": "array", "items": {"type": "number"},
                     "description": "Each event that carried tokens; one may carry several."},
        "tokens": tokens,
        "finish": {"type": ["string", "null"]},
        "usage": _BLOCK,
        "timings": _BLOCK,
        "metrics": _BLOCK,
        "slotwise": _BLOCK,
        "engaged": {"type": "array", "items": {"type": ["number", "string", "boolean", "null"]},
                    "description": "What the arm's counters said of this sample, in their order."},
        "trace": {**_BLOCK, "description": "The request of the trace this sample was paired "
                                           "with, as slotwise.explain/v1 writes one."},
    })  # fmt: skip


def _pairing() -> dict[str, Any]:
    return _object({
        "files": {"type": "array", "items": _object({"name": _TEXT, "sha256": _SHA256})},
        "method": {"type": "string"},
        "paired": _COUNT,
        "unpaired_samples": {"type": "array", "items": _COUNT},
        "unpaired_requests": {**_COUNT, "description": "Requests of the trace of nobody here."},
        "warnings": _TEXTS,
    })  # fmt: skip


def _service() -> dict[str, Any]:
    return _object({
        "restored": {"type": "boolean"},
        "attempts": _COUNT,
        "http_status": _or_null(_COUNT),
        "down_ms": {**_MS, "description": "From the stop until production answered again."},
        "before": _server(),
        "after": _or_null(_server()),
        "steps": {"type": "array", "items": _object({"step": _TEXT, "at": _TEXT})},
    })  # fmt: skip


def _server() -> dict[str, Any]:
    model = _object(
        {"name": {"type": "string"}, "sha256": {**_SHA256, "description": "Of the full id."}},
        {"meta": {"type": "object"}},
    )
    return _object({
        "local": {"type": "boolean", "description": "On this machine, by its address."},
        "software": {"type": ["string", "null"], "description": "The Server header."},
        "version": {"type": ["string", "null"]},
        "models": {"type": "array", "items": model},
        "health": _BLOCK,
        "props": _BLOCK,
        "ready_ms": {**_MS, "description": "From the start of its process, where we started it."},
    })  # fmt: skip


def ladder_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) that a run record must satisfy."""
    record = _object({
        "schema": {"const": LADDER_SCHEMA},
        "run": {**_TEXT, "description": "Random name of the run."},
        "status": {"enum": list(RUN_STATUSES)},
        "status_why": {"type": "string"},
        "tool": _object({"name": _TEXT, "version": _TEXT}),
        "started": {**_TEXT, "description": "UTC, ISO 8601."},
        "ended": {"type": ["string", "null"]},
        "clock": _object({"name": _TEXT, "zero_monotonic_ns": _COUNT, "zero_unix_ns": _COUNT}),
        "machine": {"type": "object", "description": "Of this client."},
        "plan": {"$ref": "#/$defs/Plan"},
        "arms": _list_of("Arm"),
        "samples": _list_of("Sample"),
        "probes": {"type": "array", "items": _object(
            {"began_ns": _COUNT, "prompt": _or_null(_COUNT), "generated": _or_null(_COUNT)}),
            "description": "Requests sent to find the size of a prompt or to fill the cache."},
        "pairing": _or_null(_pairing()),
        "service": _or_null(_service()),
        "limitations": _TEXTS,
        "warnings": _TEXTS,
    })  # fmt: skip
    text = _object({"name": _TEXT, "sha256": _SHA256, "chars": _COUNT, "licence": _TEXT})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"A {LADDER_SCHEMA} record",
        "description": "Every sample of one ladder of prompt sizes against one server.",
        **record,
        "$defs": {
            "Plan": _plan(), "Text": text, "Arm": _arm(), "Server": _server(),
            "Sample": _sample(),
        },
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(ladder_schema(), indent=1))
