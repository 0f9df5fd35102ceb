"""vLLM's server log, and the clients' result files that its users keep beside it.

The log's throughput lines are averages of one interval (ten seconds; five in old versions) over
all requests: a prompt is booked whole in the interval in which it ends. They are counted, never
turned into a request's speed. Client JSON (one object per request) does tell TTFT per request.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from slotwise.explain.readers.client_json import ClientJson
from slotwise.explain.readers.common import INT, NUM, VERSION, Shapes
from slotwise.explain.readers.envelope import unwrapped
from slotwise.explain.record import Life, Value

_AVERAGE = re.compile(
    rf"Avg prompt throughput:\s*({NUM}) tokens/s"
    rf"(?:, Avg generation throughput:\s*({NUM}) tokens/s)?"
    rf"(?:.{{0,80}}?\bRunning: ({INT}) reqs)?(?:.{{0,40}}?\b(?:Waiting|Pending): ({INT}) reqs)?"
)
_HITS = re.compile(rf"Prefix cache hit rate:(?: GPU:)?\s*({NUM})%")
_VERSION = re.compile(rf"(?:vLLM API server |LLM engine \(v|  )version ({VERSION})(?!\w)")
_ENGINE = re.compile(rf"LLM engine \(v({VERSION})\)")
_BUDGET = re.compile(rf"max_num_batched_tokens=({INT})")
_REQUEST = re.compile(r"\b(Received|Added|Finished|Aborted) request ")
_DRAFTS = re.compile(
    rf"(?:Accepted: ({INT}) tokens, Drafted: ({INT}) tokens|"
    rf"Number of accepted tokens: ({INT}), Number of draft tokens: ({INT}))"
)
_SUMMARY = re.compile(
    rf"^(Successful requests|Total input tokens|Total generated tokens|Mean TTFT \(ms\)|"
    rf"Median TTFT \(ms\)|P9[0-9] TTFT \(ms\)|Benchmark duration \(s\)):\s+({NUM})\s*$"
)
_SUMMARY_NAMES = {
    "Successful requests": "requests_completed",
    "Total input tokens": "input_tokens",
    "Total generated tokens": "output_tokens",
    "Mean TTFT (ms)": "ttft_ms_mean",
    "Median TTFT (ms)": "ttft_ms_median",
    "Benchmark duration (s)": "duration_s",
}
_SUMMARY_HEAD = "= Serving Benchmark Result ="
_TTFT_METRIC = re.compile(r"vllm:time_to_first_token_seconds_(?:sum|count)")
_HTTP = re.compile(r'"POST \S{0,80}/(?:chat/completions|completions|responses|messages)')
_OK = re.compile(r'HTTP/[\d.]+" 2\d\d')
_SUMMARY_NOTE = "a benchmark client's summary over all its requests; none of them is told alone"
_QUEUED = "--max-num-seqs 1"
_NOISE = ("INFO", "WARNING", "Loading safetensors", "(EngineCore", "(APIServer", "(Worker")
_CANNOT = (
    "one request's prompt speed: throughput lines are averages of an interval (10 s; 5 s in old "
    "versions) over all requests, a prompt is booked whole where it ends, 0.0 before that",
    "one request's time to first token, queue and prefill: this log does not print them",
    "this run's cache hits: the printed rate covers the last 1,000 requests or the whole life",
    "steps of several tokens (multi-step scheduling): some builds count a step as one token",
)


_CLIENT_CANNOT = ("where the time to first token went: a client sees its sum only",)


class VllmReader:
    """Counts what the log says and says what it cannot. Result files become requests.

    A client's result file that does not name vLLM is of the dialect ``client``.
    """

    name = "vllm"

    def __init__(self, file: str) -> None:
        self._file = file
        self._lives: list[Life] = []
        self._begin(0)
        self.unknown = Shapes("INFO WARNING Engine APIServer EngineCore pid")

    def _begin(self, line_no: int) -> None:
        self._first_line = line_no
        self._version = ""
        self._facts: dict[str, float] = {}
        self._json = ClientJson()
        self._named = False
        self._notes: dict[str, None] = {}

    def _restart(self, line_no: int) -> None:
        """A process starts (or a benchmark's summary): another life, if this one had anything."""
        if self._facts.keys() - {"batched_tokens_max"} or self._json.requests():
            self._lives.append(self._life())
            self._begin(line_no)

    def sniff(self, lines: Sequence[str]) -> float:
        score = named = 0.0
        for line in lines:
            average = "Avg prompt throughput:" in line and _AVERAGE.search(line)
            if average or _SUMMARY_HEAD in line:
                score += 0.6
            elif (
                _TTFT_METRIC.search(line)
                or " TTFT (ms): " in line
                or _QUEUED in line
                or "(APIServer pid=" in line[:60]
                or "(EngineCore" in line[:60]
            ):
                score += 0.2
            elif '"anvil-serving.' in line or '"ttft_ms":' in line:
                score += 0.15
            elif '"elapsed_s' in line or '"effective_prefill_tok_s' in line:
                score += 0.1
            elif "vllm" in line or "vLLM" in line:
                named = 0.1  # prose names it too
            if score >= 0.95:
                return 0.95
        return score + named

    def feed(self, line_no: int, line: str) -> None:
        _, line = unwrapped(line)
        self._first_line = self._first_line or line_no
        self._named = self._named or "vllm" in line
        if " request " in line and (request := _REQUEST.search(line)):
            # the rest of such a line may be a prompt
            self._add(f"requests_{request[1].lower()}", 1)
        elif "Avg prompt throughput" in line and (average := _AVERAGE.search(line)):
            self._average(line, average)
        elif "Prefix cache hit rate" in line and (hits := _HITS.search(line)):
            self._facts["hit_rate_percent_last"] = float(hits[1])
        elif '"POST ' in line and _HTTP.search(line):
            self._add("http_requests" if _OK.search(line) else "http_failures", 1)
        elif "vllm:" in line and _TTFT_METRIC.search(line):
            self._notes["a metric's sum over all requests; 0.5.3 and before computed it wrong"] = (
                None
            )
        elif "queue time" in line or _QUEUED in line:
            self._notes["time to first token includes the time in the queue"] = None
        elif "raft" in line and (drafts := _DRAFTS.search(line)):
            self._drafts(drafts)
        elif _SUMMARY_HEAD in line:
            self._restart(line_no)
            self._notes[_SUMMARY_NOTE] = None
        elif line[:1] in "STMPB" and (summary := _SUMMARY.match(line)):
            name = summary[1]
            known = _SUMMARY_NAMES.get(name, f"ttft_ms_{name[:3].lower()}")
            self._facts[known] = float(summary[2])
        elif not self._json.feed(line_no, line) and not self._start_up(line_no, line):
            self.unknown.see(line)

    def _drafts(self, drafts: re.Match[str]) -> None:
        """Newer versions print each interval's drafts, older ones (0.x) the sums so far."""
        if drafts[1]:
            self._add("drafts_accepted", int(drafts[1]))
            self._add("drafts", int(drafts[2]))
        else:
            self._highest("drafts_accepted", int(drafts[3]))
            self._highest("drafts", int(drafts[4]))

    def _add(self, name: str, n: float) -> None:
        self._facts[name] = self._facts.get(name, 0.0) + n

    def _highest(self, name: str, value: float) -> None:
        self._facts[name] = max(self._facts.get(name, 0.0), value)

    def _average(self, line: str, average: re.Match[str]) -> None:
        self._add("intervals", 1)
        rate = float(average[1])
        self._add("intervals_with_prompts", 1 if rate > 0 else 0)
        self._highest("interval_prompt_tokens_per_s_max", rate)
        if average[3]:
            self._highest("running_max", int(average[3]))
            if rate == 0 and int(average[3]) and average[2] and float(average[2]) == 0:
                self._add("intervals_reading_unseen", 1)
        if average[4]:
            self._highest("waiting_max", int(average[4]))
        if hits := _HITS.search(line):
            self._facts["hit_rate_percent_last"] = float(hits[1])

    def _start_up(self, line_no: int, line: str) -> bool:
        named = "version" in line or "engine (v" in line
        if named and (version := _VERSION.search(line) or _ENGINE.search(line)):
            self._restart(line_no)
            self._version = self._version or version[1]
        if "max_num_batched" in line and (budget := _BUDGET.search(line)):
            self._facts["batched_tokens_max"] = int(budget[1])
        return any(word in line[:60] for word in _NOISE)

    def finish(self) -> list[Life]:
        return [*self._lives, self._life()] if self._first_line else list(self._lives)

    def _life(self) -> Life:
        requests = self._json.requests()
        client = _SUMMARY_NOTE in self._notes
        served = bool(self._facts or self._notes or self._version) and not client
        client = client or bool(requests and not (served or self._named))
        return Life(
            dialect="client" if client else self.name,
            version=self._version,
            file=self._file,
            first_line=self._first_line,
            capabilities={"requests": bool(requests), "phases": False},
            facts={name: Value.measured(value) for name, value in self._facts.items()},
            requests=requests,
            notes=(*self._notes, *self._json.notes()),
            cannot_tell=_CANNOT if served or not (requests or client) else _CLIENT_CANNOT,
        )
