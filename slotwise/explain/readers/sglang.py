"""SGLang's scheduler log (and ATOM's): batches, and requests where they are logged.

A `Prefill batch` line is a step over several requests without their ids, so it is counted, not
turned into a request's speed. `ReqTimeStats(...)` lines (`--enable-request-time-stats-logging`)
and ATOM's `Scheduled prefill batch ... req_ids` do tell about requests.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from slotwise.explain.readers.common import (
    INT,
    NUM,
    Shapes,
    duration_ms,
    read_planned,
    request,
    size_warnings,
)
from slotwise.explain.readers.envelope import unwrapped
from slotwise.explain.record import Life, Phase, Request, Status, Value

_BATCH = re.compile(
    rf"Prefill batch(?: \[\d+\]| [\w=]{{1,40}})?[.,] #new-seq: ({INT}), #new-token: ({INT})"
)
_FILL = re.compile(
    rf"new fill batch\. #seq: ({INT})\.(?: #cached_token: ({INT})\.)? #new_token: ({INT})\."
)
_REMAINING = re.compile(rf"#remaining_req: ({INT})")
_OTHER_RANK = re.compile(
    r" (?:PP[1-9]\d{0,3}|(?<!DP\d )(?<!DP\d\d )TP[1-9]\d{0,3})\b[^\]]{0,40}\] Prefill"
)
_COUNTED = re.compile(rf"(#cached-token|#queue-req|#running-req|#pending-token): ({INT})")
_RATE = re.compile(rf"input throughput \(token/s\): ({NUM})")
_STATS = re.compile(
    rf"Req ?Time ?Stats\(rid=[^)]*?input[_ ]len=({INT}), (?:cached_input_len=({INT}), )?"
    rf"output[_ ]len=({INT})[^)]*?type=(\w+)\)?:?(.{{0,1000}})"
)
_PART = re.compile(rf"\b([a-z_]{{1,32}}(?:duration|elapsed))=({NUM}(?:ms|us|s))")
_ATOM = re.compile(
    rf"Scheduled prefill batch:\s*{INT} reqs,\s*{INT} new tokens "
    r"\(cached: \[([\d, ]{0,4000})\],\s*new: \[([\d, ]{0,4000})\]\),"
    r"\s*req_ids: \(([\d, ]{0,4000})\)"
)
_ABORT = re.compile(r"\bAbort (?:queued|running|completed)|\bAbort(?:ed)? request\b")
_PHASES = {
    "bootstrap_duration": "bootstrap",
    "queue_duration": "queue",
    "initial_prefill_elapsed": "prefill",
}
OPEN_LIMIT = 10_000
_RATES = (
    "reading speed from `input throughput`: some versions divide the previous batch's tokens by "
    "this batch's interval, older ones print 0.00; do not average it"
)
_CANNOT = (
    "which requests a prefill batch held: lines have no request ids. A request's time to first "
    "token is every batch before its own, and all of its own",
    _RATES,
    "queue and prefill per request: only with --enable-request-time-stats-logging",
)
_NOISE = ("Decode batch", "INFO:", "HTTP/1.1", "server is fired up")
_NAMED = ("last_input_throughput", "input throughput (token/s)", "server_args=ServerArgs(")


class SglangReader:
    """Counts batches; makes requests of the lines that speak of one."""

    name = "sglang"

    def __init__(self, file: str) -> None:
        self._file = file
        self._first_line = 0
        self._lives: list[Life] = []
        self._facts: dict[str, float] = {}
        self._done: list[Request] = []
        self._open: dict[int, tuple[int, int, int, int]] = {}
        """ATOM's requests: first line, last line, cached at the start, read so far."""
        self._timed = self._note = False
        self.unknown = Shapes("INFO batch new seq token cached running queue req")

    def sniff(self, lines: Sequence[str]) -> float:
        score = named = 0.0
        for line in lines:
            if any(pattern.search(line) for pattern in (_BATCH, _FILL, _ATOM, _STATS)):
                score += 0.6
            elif "Decode batch, #running-req" in line or "Decode batch. #running-req" in line:
                score += 0.4
            elif any(words in line for words in _NAMED):
                score += 0.3
            elif "sglang" in line:
                named = 0.1  # prose names it too
            if score >= 0.95:
                return 0.95
        return score + named

    def feed(self, line_no: int, line: str) -> None:
        _, line = unwrapped(line)
        self._first_line = self._first_line or line_no
        if "#new-token" in line and (batch := _BATCH.search(line)):
            if not _OTHER_RANK.search(line):  # its batches are the first rank's too
                self._batch(batch, line)
        elif "new fill batch" in line and (fill := _FILL.search(line)):
            self._fill(fill, line)
        elif "server_args=ServerArgs(" in line:
            self._start(line_no)
        elif "Abort" in line and _ABORT.search(line):
            self._add("aborted", 1)
        elif "Stats(" in line and (stats := _STATS.search(line)):
            self._done.append(_timed(len(self._done), line_no, stats))
            self._timed = True
        elif "Scheduled prefill batch" in line and (atom := _ATOM.search(line)):
            self._scheduled(line_no, atom)
        elif "input_throughput" in line or "input throughput" in line:
            self._note = True
        elif not any(word in line for word in _NOISE):
            self.unknown.see(line)

    def _start(self, line_no: int) -> None:
        """A server starts: after batches or requests, that is another life."""
        if self._facts or self._done or self._open:
            self._lives.append(self._life())
            self._facts, self._done, self._open = {}, [], {}
            self._timed = self._note = False
        self._first_line = line_no

    def _add(self, name: str, n: float) -> None:
        self._facts[name] = self._facts.get(name, 0) + n

    def _fill(self, fill: re.Match[str], line: str) -> None:
        """Versions of early 2024."""
        self._add("prefill_batches", 1)
        self._add("new_tokens", int(fill[3]))
        if fill[2]:
            self._add("cached_tokens", int(fill[2]))
        self._highest("batch_tokens_max", int(fill[3]))
        self._highest("batch_sequences_max", int(fill[1]))
        if remaining := _REMAINING.search(line):
            self._highest("queue_max", int(remaining[1]))

    def _highest(self, name: str, value: float) -> None:
        self._facts[name] = max(self._facts.get(name, 0.0), value)

    def _batch(self, batch: re.Match[str], line: str) -> None:
        self._add("prefill_batches", 1)
        self._add("new_tokens", int(batch[2]))
        self._highest("batch_tokens_max", int(batch[2]))
        self._highest("batch_sequences_max", int(batch[1]))
        for name, n in _COUNTED.findall(line):
            if name == "#cached-token":
                self._add("cached_tokens", int(n))
            elif name == "#queue-req":
                self._highest("queue_max", int(n))
            elif name == "#pending-token":
                self._highest("pending_tokens_max", int(n))
        if _RATE.search(line):
            self._note = True

    def _scheduled(self, line_no: int, atom: re.Match[str]) -> None:
        cached, new, ids = (
            [int(n[:12]) for n in re.findall(r"\d+", part)] for part in atom.groups()
        )
        for rid, had, reads in zip(ids, cached, new, strict=False):
            first, _, start, read = self._open.get(rid, (line_no, line_no, had, 0))
            if read and had == start + read:
                self._open[rid] = (first, line_no, start, read + reads)
                continue
            if read:
                self._done.append(_atom_request(len(self._done), self._open.pop(rid)))
            if len(self._open) < OPEN_LIMIT:
                self._open[rid] = (line_no, line_no, had, reads)

    def finish(self) -> list[Life]:
        return [*self._lives, self._life()] if self._first_line else []

    def _life(self) -> Life:
        requests = list(self._done)
        for item in sorted(self._open.values()):
            requests.append(_atom_request(len(requests), item))
        cannot = _CANNOT
        if requests:
            cannot = (_RATES,) if self._note else ()
        return Life(
            dialect=self.name,
            file=self._file,
            first_line=self._first_line,
            capabilities={"requests": bool(requests), "phases": self._timed},
            facts={name: Value.measured(value) for name, value in self._facts.items()},
            requests=tuple(requests),
            cannot_tell=cannot,
        )


def _timed(index: int, line_no: int, stats: re.Match[str]) -> Request:
    parts = {name: duration_ms(text) for name, text in _PART.findall(stats[5])}
    phases = tuple(
        Phase(_PHASES[name], Value.measured(ms))
        for name, ms in parts.items()
        if name in _PHASES and ms is not None
    )
    prefill, forward = parts.get("initial_prefill_elapsed"), parts.get("forward_duration")
    queue = parts.get("queue_duration") or 0.0
    known: dict[str, Value] = {"generated": Value.measured(int(stats[3]))}
    known["prompt"] = prompt = Value.measured(int(stats[1]))
    if stats[2]:
        known["reused"] = reused = Value.measured(int(stats[2]))
        known["read_planned"] = known["read"] = read_planned(prompt, reused)
    if prefill is not None:
        known["prompt_ms"] = Value.measured(prefill)
        why = "at least queue + prefill; HTTP and tokenising are not in it"
        known["ttft_ms"] = Value.bounded(queue + prefill, None, why)
        if forward is not None:
            known["decode_ms"] = Value.derived(forward - prefill, "forward - prefill")
    elif forward is not None:
        known["prompt_ms"] = Value.bounded(
            None, forward, "forward time holds the answer too in this version"
        )
        known["ttft_ms"] = Value.bounded(queue, None, "at least the queue")
    kind = stats[4].lower()
    told = ("time in the scheduler only: HTTP, template and tokenising come before",)
    if kind not in ("unified", "prefill"):
        told += ("this worker decodes only: the prompt was read by another",)
    return request(
        index,
        (line_no, line_no),
        "done",
        **known,
        phases=phases,
        cannot_tell=told,
        warnings=tuple(size_warnings(known.get("read", prompt))),
        facts={"forward_ms": Value.measured(forward)} if forward is not None else {},
    )


def _atom_request(index: int, item: tuple[int, int, int, int]) -> Request:
    first, last, cached, read = item
    status: Status = "done"
    return request(
        index,
        (first, last),
        status,
        prompt=Value.derived(cached + read, "cached + new"),
        reused=Value.measured(cached),
        read_planned=Value.measured(read),
        read=Value.measured(read),
        cannot_tell=("times: this log has no clock",),
        warnings=tuple(size_warnings(Value.measured(read))),
    )
