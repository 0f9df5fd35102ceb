"""Result files of benchmark clients and gateways, one JSON object (or list) per request.

Known: objects with `ttft_ms` and token counts (one per request, pretty-printed or on one line),
probe results with `elapsed_s` and `usage`, and the result line of agent clients, whose
`ttft_stream_ms` is the gateway's first event and not a token. Numbers of listed keys only.
"""

from __future__ import annotations

import re

from slotwise.explain.readers.common import NUM, request
from slotwise.explain.record import Request, Value

_KEYS = (
    "request_index|prompt_tokens|input_tokens|output_tokens|completion_tokens|cached_tokens|"
    "cache_read_input_tokens|ttft_ms|ttft_stream_ms|generation_ms|e2e_ms|duration_ms|"
    "duration_api_ms|elapsed_s|elapsed_seconds|num_turns"
)
_FIELD = re.compile(rf'(?<!\\)"({_KEYS})"\s*:\s*({NUM})|([{{}}])|(?<!\\)"(usage)"\s*:\s*(?=\{{)')
REQUESTS_LIMIT = 1_000_000
_STREAM = "ttft_stream_ms is the gateway's first event (a keep-alive), not the first token"
_BUFFERED = (
    "the whole answer arrived {} ms after its first token: it was buffered, so decoding is "
    "inside this time to first token"
)


class ClientJson:
    """Collects numbers per `{...}` object; an object with a first-token time is a request."""

    def __init__(self) -> None:
        self._stack: list[dict[str, float]] = []
        self._usage = False
        self._requests: list[Request] = []

    def feed(self, line_no: int, line: str) -> bool:
        """Take a line; whether it was (part of) a known JSON object."""
        if '"' not in line and "{" not in line and "}" not in line:
            return bool(self._stack) and not line.strip(" ,[]\t")
        if not self._stack and line.lstrip()[:1] not in ("{", "["):
            return False
        for found in _FIELD.finditer(line):
            self._piece(line_no, found)
        return True

    def _piece(self, line_no: int, found: re.Match[str]) -> None:
        if found[3] == "{":
            if len(self._stack) < 100:
                self._stack.append({"inside_usage": 1.0} if self._usage else {})
            self._usage = False
        elif found[3] == "}":
            if self._stack:
                self._close(line_no, self._stack.pop())
        elif found[4]:
            self._usage = True
        elif self._stack:
            self._stack[-1].setdefault("line", line_no)
            self._stack[-1].setdefault(found[1], float(found[2]))

    def _close(self, line_no: int, data: dict[str, float]) -> None:
        if "elapsed_seconds" in data:
            data.setdefault("elapsed_s", data.pop("elapsed_seconds"))
        timed = "ttft_ms" in data or "elapsed_s" in data
        if "inside_usage" in data and not timed and self._stack:
            for key, value in data.items():
                self._stack[-1].setdefault(key, value)
        elif timed and len(self._requests) < REQUESTS_LIMIT:
            lines = (int(data.get("line", line_no)), line_no)
            self._requests.append(_request(len(self._requests), lines, data))

    def requests(self) -> tuple[Request, ...]:
        return tuple(self._requests)

    def notes(self) -> tuple[str, ...]:
        if not self._requests:
            return ()
        return ("a client's figures: its time to first token includes queue and scheduling",)


def _request(index: int, lines: tuple[int, int], data: dict[str, float]) -> Request:
    prompt = data.get("prompt_tokens", data.get("input_tokens"))
    cached = data.get("cached_tokens", data.get("cache_read_input_tokens"))
    known: dict[str, Value] = {}
    for name, value in (
        ("prompt", prompt),
        ("reused", cached),
        ("generated", data.get("output_tokens", data.get("completion_tokens"))),
        ("ttft_ms", data.get("ttft_ms")),
        ("decode_ms", data.get("generation_ms")),
    ):
        if value is not None:
            known[name] = Value.measured(value)
    if prompt is not None and cached is not None:
        known["read"] = Value.derived(prompt - cached, "prompt - cached")
    warnings, facts = _doubts(data)
    if "ttft_ms" not in data and "elapsed_s" in data:
        ms = data["elapsed_s"] * 1e3
        known["ttft_ms"] = Value.bounded(None, ms, "at most the whole request's time")
        facts["elapsed_ms"] = Value.measured(ms)
    return request(
        index,
        lines,
        "done",
        **known,
        warnings=tuple(warnings),
        facts=facts,
        cannot_tell=("where the time to first token went: a client sees its sum only",),
    )


def _doubts(data: dict[str, float]) -> tuple[list[str], dict[str, Value]]:
    warnings: list[str] = []
    facts: dict[str, Value] = {}
    if "ttft_stream_ms" in data:
        facts["first_event_ms"] = Value.measured(data["ttft_stream_ms"])
        warnings.append(_STREAM)
    rest = data.get("duration_ms", 0.0) - data.get("ttft_ms", 0.0)
    if "duration_ms" in data and "ttft_ms" in data:
        facts["after_first_token_ms"] = Value.derived(rest, "duration - time to first token")
        if data.get("output_tokens", 0) > 1 and 0 <= rest <= 2 * data["output_tokens"]:
            warnings.append(_BUFFERED.format(f"{rest:.0f}"))
    turns = data.get("num_turns", 1.0)
    if turns > 1:
        facts["turns"] = Value.measured(turns)
        warnings.append("tokens are of all turns, the time to first token of one: no speed")
    return warnings, facts
