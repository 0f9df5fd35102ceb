"""Finds each sample's request in the server's trace, and says what has no partner.

In the order of trust: the ledger that came inside the answer itself; then equal token counts in the
order of sending, checked by the prompt's time on both sides (`explain.join`). What the trace holds
of others is counted, what was not found is listed, nothing is paired silently.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slotwise.explain.join import Row, join
from slotwise.explain.readers import read_files
from slotwise.explain.readers.slotwise_trace import SlotwiseTraceReader
from slotwise.explain.record import Request
from slotwise.ladder import counters
from slotwise.ladder.arms import Arm
from slotwise.ladder.proof import unproven
from slotwise.ladder.record import Record

IN_ANSWER = "the ledger inside the answer"


def pair(record: Record, traces: Mapping[str, Sequence[Path]], arms: Sequence[Arm]) -> dict:
    """Puts each sample's request into it; what the record says of the pairing."""
    samples = record.data["samples"]
    said: dict[str, Any] = {
        "files": [], "method": "", "paired": 0, "unpaired_samples": [],
        "unpaired_requests": 0, "warnings": [],
    }  # fmt: skip
    methods = []
    for files, names in _by_files(traces).items():
        own = [s for s in samples if s["arm"] in names]
        said["files"] += [{"name": f.name, "sha256": _digest(f)} for f in files]
        methods += _with_trace(own, record.data["probes"], files, said)
    alone = [s for s in samples if s["trace"] is None and s["slotwise"] is not None]
    found = [_with_answer(sample) for sample in alone]
    methods += [IN_ANSWER] * any(found)
    said["method"] = "; ".join(dict.fromkeys(methods)) or "no trace was given"
    said["paired"] = sum(s["trace"] is not None for s in samples)
    answered = (s for s in samples if s["trace"] is None and s["status"] != "error")
    said["unpaired_samples"] = [s["index"] for s in answered]
    _judge_by_trace(samples, arms)
    return said


def _by_files(traces: Mapping[str, Sequence[Path]]) -> dict[tuple[Path, ...], set[str]]:
    """Arms that share a trace are paired together."""
    shared: dict[tuple[Path, ...], set[str]] = {}
    for arm, files in traces.items():
        if files:
            shared.setdefault(tuple(files), set()).add(arm)
    return shared


def _with_trace(
    samples: Sequence[dict[str, Any]], probes: Sequence[dict[str, Any]],
    files: Sequence[Path], said: dict[str, Any],
) -> Iterator[str]:  # fmt: skip
    """Pairs by token counts and order; yields the method."""
    reading = read_files(files)
    said["warnings"] += reading.unreadable
    requests = [r for life in reading.lives for r in life.requests]
    sent = sorted([*samples, *probes], key=lambda s: s["began_ns"])
    joined = join(requests, [_row(i, s) for i, s in enumerate(sent)])
    for position, index in joined.pairs:
        if "trace" in sent[index]:
            sent[index]["trace"] = joined.requests[position].to_dict()
    said["unpaired_requests"] += len(joined.unpaired_requests)
    said["warnings"] += joined.warnings
    yield joined.method


def _row(index: int, sent: Mapping[str, Any]) -> Row:
    if "tokens" not in sent:  # a probe
        return Row(index, sent["prompt"], None, None, sent["generated"], None, None)
    tokens = sent["tokens"]
    prompt, cached = tokens["prompt"], tokens["cached"]
    read = None if prompt is None or cached is None else prompt - cached
    prompt_ms = counters.at(sent["timings"], "prompt_ms")
    return Row(
        index, prompt, cached, read, tokens["generated"],
        prompt_ms if isinstance(prompt_ms, int | float) else None,
        sent["edges_ms"]["first_token"],
    )  # fmt: skip


def _with_answer(sample: dict[str, Any]) -> bool:
    """The request out of the `slotwise` block of the sample's own answer."""
    request = request_of(sample["slotwise"])
    if request is None:
        return False
    joined = join([request], [_row(0, sample)])
    if not joined.pairs:
        return False
    sample["trace"] = joined.requests[0].to_dict()
    return True


def request_of(block: Mapping[str, Any]) -> Request | None:
    """The trace's request that a `slotwise` block is, or None when it holds no ledger."""
    record = block.get("record", block)
    if not isinstance(record, Mapping) or "ledger" not in record:
        return None
    reader = SlotwiseTraceReader("answer")
    event = {"type": "request_end", "status": record.get("status"), "record": record}
    reader.feed(1, json.dumps(event))
    return reader.finish()[0].requests[0]


def _judge_by_trace(samples: Sequence[dict[str, Any]], arms: Sequence[Arm]) -> None:
    """What `trace:` counters say is only known now."""
    by_name = {a.name: a for a in arms}
    for sample in samples:
        arm = by_name.get(sample["arm"])
        if arm is None:
            continue
        if sample["trace"] is not None:
            for position, engaged in enumerate(arm.engaged):
                if engaged.source == "trace":
                    sample["engaged"][position] = counters.of_trace(sample["trace"], engaged.name)
        why = unproven(arm, sample["engaged"], of_trace=True)
        if why and sample["status"] == "ok":
            sample["status"], sample["why"] = "refused", why


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
