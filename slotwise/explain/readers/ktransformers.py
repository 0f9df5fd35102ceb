"""KTransformers' logs: the server's `Performance` lines, the chat's verbose block, batch steps.

A step's printed `tokens/s` is one over its time whatever it read, so a rate is only given over
the tokens the step held. Short prompts measure start-up here, and that is said.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from slotwise.explain.readers.common import (
    INT,
    NUM,
    Shapes,
    duration_ms,
    request,
    size_warnings,
    to_ms,
)
from slotwise.explain.readers.envelope import unwrapped
from slotwise.explain.record import Life, Phase, Request, Value

_PERFORMANCE = re.compile(
    rf"Performance\(T/s\): prefill ({NUM})\d*, decode ({NUM})\d*\. "
    rf"Time\(s\): tokenize ({NUM})\d*, prefill ({NUM})\d*, decode ({NUM})"
)
_BLOCK = re.compile(
    r"^\s*(prompt eval count|prompt eval duration|prompt eval rate|eval count|eval duration|"
    r"eval rate):\s+(\S{1,40})"
)
_BATCH = re.compile(rf"\bprefill_batch_i: ({INT})")
_STEP = re.compile(rf"Model execution time \((?:GPU|CPU|NPU)\): ({NUM}) ms, {NUM} tokens/s")
_SHAPE = re.compile(rf"(?:ids of shape )?torch\.Size\(\[1, ({INT})\]\)")
_LENGTH = re.compile(r"\.py\[\d{1,6}\]: get input ids of shape torch\.Size")
_TYPED = re.compile(rf"(Prefill|Decode) token/s\S{{0,20}}[:：]\s*({NUM})", re.IGNORECASE)
_STEP_WHY = "prompt tokens of the steps / their time; the printed rate is 1 / time"
_CANNOT_STEPS = (
    "which request a step belongs to: steps have no ids; a prompt may take several",
    "a reading speed from the printed tokens/s of a step: it is one over the step's time",
)
_CANNOT_TYPED = ("prompt lengths and times: only rates are given, and a rate depends on length",)
_REQUEST = ("expert reads and start-up inside prefill; queue and HTTP before it",)
_NOISE = ("flashinfer", "padded_batch_size", "decode_batch_i", "merge two adjacent")


class KTransformersReader:
    """Requests from lines that hold one; steps as facts of the life."""

    name = "ktransformers"

    def __init__(self, file: str) -> None:
        self._file = file
        self._first_line = 0
        self._done: list[Request] = []
        self._block: dict[str, float] = {}
        self._block_line = 0
        self._shape: tuple[int, int] | None = None
        self._batch: int | None = None
        self._steps = 0
        self._step_tokens = 0
        self._step_ms = 0.0
        self._jit = self._typed = False
        self.unknown = Shapes("INFO DEBUG WARNING prefill decode batch tokens ms")

    def sniff(self, lines: Sequence[str]) -> float:
        score = named = 0.0
        for _, line in map(unwrapped, lines):
            if line.startswith("|"):
                continue  # a table that quotes a log
            if "Performance(T/s)" in line and _PERFORMANCE.search(line):
                score += 0.7
            elif _BATCH.search(line) or _STEP.search(line):
                score += 0.4
            elif line.startswith(("total duration:", "load duration:")):
                return 0.0  # Ollama prints the same block with these two lines
            elif _TYPED.search(line) or _BLOCK.match(line) or _LENGTH.search(line):
                score += 0.2
            elif "ktransformers" in line:
                named = 0.1  # prose names it too
            if score >= 0.95:
                return 0.95
        return score + named

    def feed(self, line_no: int, line: str) -> None:
        _, line = unwrapped(line)
        self._first_line = self._first_line or line_no
        if "Performance(T/s)" in line and (found := _PERFORMANCE.search(line)):
            self._shape = None
            self._done.append(_performance(len(self._done), line_no, found))
        elif "eval" in line and (found := _BLOCK.match(line)):
            self._block_value(line_no, found[1], found[2])
        elif "prefill_batch_i" in line and (found := _BATCH.search(line)):
            self._batch = int(found[1])
        elif "Model execution time" in line and (found := _STEP.search(line)):
            self._step(float(found[1]))
        elif "torch.Size" in line and (found := _SHAPE.search(line)):
            self._close_shape()
            self._shape = (line_no, int(found[1]))
        elif _TYPED.search(line):
            self._typed = True
        elif not any(word in line for word in _NOISE):
            self.unknown.see(line)
        else:
            self._jit = self._jit or "JIT" in line

    def _step(self, ms: float) -> None:
        """Time of a step; with a prefill batch before it, the prompt tokens it held."""
        if self._batch is not None:
            self._steps += 1
            self._step_tokens += self._batch
            self._step_ms += ms
        self._batch = None

    def _block_value(self, line_no: int, key: str, text: str) -> None:
        if key == "prompt eval count":
            self._close_block()
            self._block_line = line_no
        if key.endswith("count") and text.isdigit():
            self._block[key] = float(text[:12])
        elif key.endswith("duration") and (ms := duration_ms(text)) is not None:
            self._block[key] = ms
        if key == "eval duration":
            self._block["end"] = line_no

    def _close_block(self) -> None:
        if self._block:
            self._done.append(self._block_request(len(self._done)))
        self._block = {}

    def _close_shape(self) -> None:
        if self._shape is not None:
            self._done.append(self._shape_request(len(self._done)))
        self._shape = None

    def _block_request(self, index: int) -> Request:
        block = self._block
        lines = (self._block_line, int(block.get("end", self._block_line)))
        read = _given(block, "prompt eval count")
        ms = _given(block, "prompt eval duration")
        return request(
            index,
            lines,
            "done" if "end" in block else "incomplete",
            read=read,
            generated=_given(block, "eval count"),
            prompt_ms=ms,
            decode_ms=_given(block, "eval duration"),
            ttft_ms=_at_least(ms.value),
            phases=(Phase("prefill", ms),) if ms.value is not None else (),
            cannot_tell=_REQUEST,
            warnings=tuple(size_warnings(read)),
        )

    def _shape_request(self, index: int) -> Request:
        line, tokens = self._shape or (0, 0)
        return request(
            index,
            (line, line),
            "incomplete",
            prompt=Value.measured(tokens),
            cannot_tell=("any time: the log shows the prompt's length and no end",),
        )

    def finish(self) -> list[Life]:
        if not self._first_line:
            return []
        requests = list(self._done)
        if self._block:
            requests.append(self._block_request(len(requests)))
        if self._shape is not None:
            requests.append(self._shape_request(len(requests)))
        cannot = (*(_CANNOT_STEPS if self._steps else ()), *(_CANNOT_TYPED if self._typed else ()))
        notes = ("kernels were compiled (JIT) between steps",) if self._jit else ()
        return [
            Life(
                dialect=self.name,
                file=self._file,
                first_line=self._first_line,
                capabilities={"requests": bool(requests), "phases": False},
                facts=self._facts(),
                requests=tuple(requests),
                notes=notes,
                cannot_tell=cannot,
            )
        ]

    def _facts(self) -> dict[str, Value]:
        if not self._steps or not self._step_ms:
            return {}
        rate = self._step_tokens / self._step_ms * 1e3
        return {
            "prefill_steps": Value.measured(self._steps),
            "prefill_step_tokens": Value.measured(self._step_tokens),
            "prefill_step_ms": Value.measured(self._step_ms),
            "prefill_step_tokens_per_s": Value.derived(rate, _STEP_WHY),
        }


def _given(block: dict[str, float], key: str) -> Value:
    return Value.measured(block[key]) if key in block else Value.missing("the block is cut")


def _at_least(ms: float | None) -> Value:
    if ms is None:
        return Value.missing("no prefill time")
    return Value.bounded(ms, None, "at least tokenising and prefill; queue and HTTP are not told")


def _performance(index: int, line_no: int, found: re.Match[str]) -> Request:
    """Tokens are rate x time; newer versions round both, so a long one can be off by some."""
    prefill_rate, decode_rate, tokenize_s, prefill_s, decode_s = map(float, found.groups())
    read = Value.derived(round(prefill_rate * prefill_s), "printed rate x time")
    return request(
        index,
        (line_no, line_no),
        "done",
        read=read,
        generated=Value.derived(round(decode_rate * decode_s), "printed rate x time"),
        prompt_ms=Value.measured(to_ms(prefill_s)),
        decode_ms=Value.measured(to_ms(decode_s)),
        ttft_ms=_at_least(to_ms(tokenize_s + prefill_s)),
        phases=(
            Phase("tokenize", Value.measured(to_ms(tokenize_s))),
            Phase("prefill", Value.measured(to_ms(prefill_s))),
        ),
        cannot_tell=_REQUEST,
        warnings=tuple(size_warnings(read)),
    )
