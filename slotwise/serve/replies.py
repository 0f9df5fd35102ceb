"""Response bodies: OpenAI's objects, llama.cpp's `timings`, and the request's own record."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from slotwise.serve.ask import Ask
from slotwise.serve.faults import ApiError
from slotwise.serve.jobs import Done, Progress
from slotwise.serve.pieces import Piece, TokenEntry, ToolCall
from slotwise.trace.ledger import LedgerRecord
from slotwise.trace.record import RequestRecord
from slotwise.weights.tokenizer import Tokenizer

Object = dict[str, Any]
NOT_PROMPT = ("queue", "template", "tokenize", "emit")
"""Phases before and after what llama.cpp counts as its prompt processing."""


def dumps(data: Any) -> bytes:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def sse(data: Object) -> bytes:
    return b"data: " + dumps(data) + b"\n\n"


SSE_DONE = b"data: [DONE]\n\n"
SSE_PING = b": still here\n\n"


@dataclass(kw_only=True)
class Replies:
    """Writes the bodies of one response."""

    ask: Ask
    id: str
    created: int
    model: str
    fingerprint: str
    tokenizer: Tokenizer
    _calls: int = field(default=0, init=False)
    """Tool calls that were streamed so far."""

    @property
    def _chat(self) -> bool:
        return self.ask.messages is not None

    def _head(self, kind: str) -> Object:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    # -- streamed ------------------------------------------------------------------------

    def chunk(self, piece: Piece) -> Object:
        if not self._chat:
            choice = {"index": 0, "text": piece.text, "logprobs": self._logprobs(piece.entries)}
        else:
            delta: Object = {"content": piece.text} if piece.text or piece.first else {}
            if piece.first:
                delta = {"role": "assistant", **delta}
            if piece.calls:
                delta["tool_calls"] = self._numbered(piece.calls)
            choice = {"index": 0, "delta": delta, "logprobs": self._logprobs(piece.entries)}
        return self._chunk([{**choice, "finish_reason": None}])

    def _numbered(self, calls: Sequence[ToolCall]) -> list[Object]:
        """Calls of a stream, which say their place among all of the answer's."""
        objects = [{"index": self._calls + n, **_call(call)} for n, call in enumerate(calls)]
        self._calls += len(calls)
        return objects

    def progress(self, progress: Progress | LedgerRecord) -> Object:
        """llama.cpp's `prompt_progress`, and where the time went so far; then the ledger."""
        empty = {"delta": {}} if self._chat else {"text": ""}
        chunk = self._chunk([{"index": 0, **empty, "finish_reason": None}])
        if isinstance(progress, LedgerRecord):
            return {**chunk, "slotwise_ledger": progress.to_dict()}
        chunk["prompt_progress"] = {
            "total": progress.prompt,
            "cache": progress.reused,
            "processed": progress.processed,
            "time_ms": round(progress.elapsed_ns / 1e6),
        }
        chunk["slotwise_progress"] = {
            "share": round(progress.share, 4),
            "phases_ns": progress.phases,
            "expert_slots": progress.expert_slots,
        }
        return chunk

    def last_chunks(self, done: Done) -> Iterator[Object]:
        """The finish reason, and the usage if it was asked for; the last one has the timings."""
        empty: Object = {"delta": {}} if self._chat else {"text": ""}
        choice = {"index": 0, **empty, "logprobs": None, "finish_reason": done.finish}
        end = self._chunk([choice])
        if self.ask.include_usage:
            yield end
            end = {**self._chunk([]), "usage": usage(done.record)}
        yield {**end, **self._about(done)}

    def _chunk(self, choices: list[Object]) -> Object:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        more = {"usage": None} if self.ask.include_usage else {}
        return {**self._head(kind), "choices": choices, **more}

    # -- whole ---------------------------------------------------------------------------

    def whole(self, pieces: Sequence[Piece], done: Done) -> Object:
        text = "".join(piece.text for piece in pieces)
        entries = [entry for piece in pieces for entry in piece.entries]
        choice: Object = {"index": 0}
        if self._chat:
            calls = [_call(call) for piece in pieces for call in piece.calls]
            message = {"role": "assistant", "content": text, "refusal": None}
            if calls:
                message |= {"content": text or None, "tool_calls": calls}
            choice["message"] = message
        else:
            choice["text"] = text
        choice |= {"logprobs": self._logprobs(entries), "finish_reason": done.finish}
        kind = "chat.completion" if self._chat else "text_completion"
        return {
            **self._head(kind),
            "choices": [choice],
            "usage": usage(done.record),
            **self._about(done),
        }

    def _about(self, done: Done) -> Object:
        block = {
            "request": done.record.request,
            "cause": done.cause,
            "unknown_fields": list(self.ask.unknown),
            "record": done.record.to_dict(),
        }
        return {"timings": timings(done.record), "slotwise": block}

    # -- logprobs ----------------------------------------------------------------------------

    def _logprobs(self, entries: Sequence[TokenEntry]) -> Object | None:
        if self.ask.logprobs is None or not entries:
            return None
        return self._chat_logprobs(entries) if self._chat else self._old_logprobs(entries)

    def _chat_logprobs(self, entries: Iterable[TokenEntry]) -> Object:
        def one(token: int, logprob: float) -> Object:
            raw = self.tokenizer.token_bytes(token)
            shown = raw.decode(errors="replace")
            return {"token": shown, "logprob": logprob, "bytes": list(raw)}

        content = [
            {**one(e.token, e.logprob), "top_logprobs": [one(*pair) for pair in e.top]}
            for e in entries
        ]
        return {"content": content, "refusal": None}

    def _old_logprobs(self, entries: Sequence[TokenEntry]) -> Object:
        """The form of /v1/completions, without offsets into a text that may be cut."""

        def shown(token: int) -> str:
            return self.tokenizer.token_bytes(token).decode(errors="replace")

        return {
            "tokens": [shown(e.token) for e in entries],
            "token_logprobs": [e.logprob for e in entries],
            "top_logprobs": [{shown(t): value for t, value in e.top} for e in entries],
            "text_offset": [],
        }


def _call(call: ToolCall) -> Object:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def usage(record: RequestRecord) -> Object:
    tokens = record.tokens
    return {
        "prompt_tokens": tokens.prompt,
        "completion_tokens": tokens.generated,
        "total_tokens": tokens.prompt + tokens.generated,
        "prompt_tokens_details": {"cached_tokens": tokens.reused},
    }


def timings(record: RequestRecord) -> Object:
    """llama.cpp's block: its `prompt_ms` begins when work on the prompt does, and ends with the
    first token. All are sums of the ledger's phases or clocks of their own."""
    tokens, phases = record.tokens, record.ledger.phases
    prompt_ms = sum(p.ns for name, p in phases.items() if name not in NOT_PROMPT) / 1e6
    predicted_ms = record.decode.wall_ns / 1e6 if record.decode else 0.0
    read, after = tokens.prompt - tokens.reused, max(0, tokens.generated - 1)
    return {
        "cache_n": tokens.reused,
        "prompt_n": read,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / read if read else None,
        "prompt_per_second": read / prompt_ms * 1e3 if prompt_ms else None,
        "predicted_n": tokens.generated,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / after if after else None,
        "predicted_per_second": after / predicted_ms * 1e3 if predicted_ms and after else None,
    }


def error_event(fault: ApiError) -> bytes:
    return sse(fault.to_dict())
