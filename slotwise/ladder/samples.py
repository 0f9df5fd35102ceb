"""One sample: a request is sent, its answer understood, and judged by the rules of the ladder.

A refused sample was answered but cannot be used (the cache was hit, the arm was not switched on,
the server does not say what it read). An error was not answered. Both are kept and counted.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slotwise.ladder import counters
from slotwise.ladder.arms import Arm
from slotwise.ladder.clean import clean
from slotwise.ladder.client import BLOCKS, Answer, Client
from slotwise.ladder.prompts import Prompt, Sizer
from slotwise.ladder.proof import unproven
from slotwise.ladder.record import Record
from slotwise.ladder.schedule import Step

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(kw_only=True)
class Target:
    """An arm as it is running: where, which model, with which fields."""

    arm: Arm
    client: Client
    model: str
    fields: Mapping[str, Any]
    sizer: Sizer


@dataclass(frozen=True, kw_only=True)
class Asking:
    """What all requests of a run have in common."""

    endpoint: str
    max_tokens: int
    seed: int
    reuse: bool

    def body(self, target: Target, prompt: Prompt, *, max_tokens: int | None = None) -> dict:
        common = {
            "model": target.model,
            "max_tokens": max_tokens or self.max_tokens,
            "temperature": 0,
            "seed": self.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.endpoint == "chat":
            common["messages"] = [{"role": "user", "content": prompt.text}]
        else:
            common["prompt"] = prompt.text
        return {**common, **target.fields}


def take(
    target: Target, step: Step, prompt: Prompt, *, asking: Asking, record: Record, first: bool
) -> tuple[dict[str, Any], str]:
    """Sends one request. Returns the sample, which is in the record now, and what the server said
    of an error, which must not be."""
    was = [counters.before(target.client, counter) for counter in target.arm.engaged]
    request_id = f"{record.data['run']}-{secrets.token_hex(4)}"
    answer = target.client.stream(
        PATHS[asking.endpoint], asking.body(target, prompt), request_id=request_id
    )
    tokens = token_counts(answer.blocks)
    engaged = [
        counters.after(target.client, counter, answer, before)
        for counter, before in zip(target.arm.engaged, was, strict=True)
    ]
    if tokens["prompt"] is not None:
        target.sizer.served(
            step.size, prompt=prompt.text, body=prompt.body_chars, tokens=tokens["prompt"]
        )
    status, why = judge(answer, tokens, arm=target.arm, engaged=engaged, reuse=asking.reuse)
    sample = {
        "index": len(record.data["samples"]),
        "arm": target.arm.name,
        "start": step.start,
        "target_tokens": step.size,
        "round": step.round,
        "cold": step.round == 0,
        "first_of_process": first,
        "status": status,
        "why": why,
        "request_id": request_id,
        "prompt_sha256": prompt.sha256,
        "prompt_chars": len(prompt.text),
        "passage": prompt.passage,
        **_times(answer, record),
        "tokens": tokens,
        "finish": clean(answer.finish),
        **{name: clean(answer.blocks.get(name)) for name in BLOCKS},
        "engaged": engaged,
        "trace": None,
    }
    record.data["samples"].append(sample)
    return sample, answer.remark


def judge(
    answer: Answer, tokens: Mapping[str, int | None], *, arm: Arm, engaged: Sequence[Any],
    reuse: bool,
) -> tuple[str, str]:  # fmt: skip
    """(status, why) of a sample."""
    if answer.error:
        return "error", answer.error
    if tokens["prompt"] is None:
        return "refused", "the server does not say how many tokens the prompt has (no usage)"
    cached = tokens["cached"]
    if cached and not reuse:
        return "refused", f"{cached} prompt tokens came from the server's cache"
    if reuse and not cached:
        return "refused", "nothing was reused, and --reuse asks for it"
    why = unproven(arm, engaged, of_trace=False)
    return ("refused", why) if why else ("ok", "")


def token_counts(blocks: Mapping[str, Mapping[str, Any]]) -> dict[str, int | None]:
    """Prompt, cached and generated tokens as the server counted them; null where it does not."""
    usage, timings = blocks.get("usage", {}), blocks.get("timings", {})
    own = blocks.get("slotwise", {})
    evaluated, cached = _count(timings, "prompt_n"), _count(timings, "cache_n")
    whole = evaluated + (cached or 0) if evaluated is not None else None
    return {
        "prompt": _first(_count(usage, "prompt_tokens"), whole, _count(own, "tokens.prompt")),
        "cached": _first(
            _count(usage, "prompt_tokens_details.cached_tokens"),
            cached,
            _count(own, "tokens.reused"),
        ),
        "generated": _first(
            _count(usage, "completion_tokens"),
            _count(timings, "predicted_n"),
            _count(own, "tokens.generated"),
        ),
    }


def _times(answer: Answer, record: Record) -> dict[str, Any]:
    zero = answer.sent_ns
    first_token = answer.token_ns[0] if answer.token_ns else None
    edges = {
        "first_byte": answer.first_byte_ns,
        "first_event": answer.first_event_ns,
        "first_token": first_token,
        "first_content": answer.first_content_ns,
        "last_byte": answer.last_byte_ns,
    }
    return {
        "http_status": answer.http_status,
        "began_ns": record.since_zero(answer.began_ns),
        "sent_ns": None if zero is None else record.since_zero(zero),
        "edges_ms": {name: _ms(zero, stamp) for name, stamp in edges.items()},
        "token_ms": [ms for stamp in answer.token_ns if (ms := _ms(zero, stamp)) is not None],
    }


def _ms(zero: int | None, stamp: int | None) -> float | None:
    return None if zero is None or stamp is None else round((stamp - zero) / 1e6, 4)


def _first(*values: int | None) -> int | None:
    return next((v for v in values if v is not None), None)


def _count(block: Mapping[str, Any], path: str) -> int | None:
    value = counters.at(block, path)
    good = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if good else None
