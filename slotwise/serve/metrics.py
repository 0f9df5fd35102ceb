"""Prometheus metrics. Names are vLLM's and llama.cpp's where they mean the same, after `slotwise:`;
seconds and bytes; counters end in `_total`.

Most come from the records of requests that have ended. What goes on beside requests (a refill,
parked conversations) is asked of the engine when somebody looks."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from slotwise.engine.engine import Engine
from slotwise.trace.record import RequestRecord

TTFT_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160,
)  # fmt: skip
TOKEN_BUCKETS = (1, 8, 32, 128, 512, 2048, 8192, 32768, 131072)


class Metrics:
    """What the server counts, from the records of its requests."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._count = {name: self._counter(name, text) for name, text in _COUNTERS.items()}
        self._seconds = {name: self._histogram(name, text) for name, text in _SECONDS.items()}
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens.", TOKEN_BUCKETS)
        self._ended = Counter(
            "slotwise:request_success", "Requests that ended, by how.", ["finished_reason"],
            registry=self._registry,
        )  # fmt: skip
        self._phase = Counter(
            "slotwise:ttft_phase_seconds", "Time before first tokens, by the ledger's phase.",
            ["phase"], registry=self._registry,
        )  # fmt: skip
        self._slots = self._labelled("expert_slots", "Expert slots, by state.", "state")
        self._parked = self._labelled(
            "parked_bytes",
            "Rows of parked conversations; `file` is the size of their file.",
            "where",
        )
        self._blocks = Gauge(
            "slotwise:parked_blocks", "Parked blocks of 64 tokens.", registry=self._registry
        )
        self._refilled = 0, 0

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"slotwise:{name}", text, registry=self._registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...] = TTFT_BUCKETS
    ) -> Histogram:
        return Histogram(f"slotwise:{name}", text, buckets=buckets, registry=self._registry)

    def _labelled(self, name: str, text: str, label: str) -> Gauge:
        return Gauge(f"slotwise:{name}", text, [label], registry=self._registry)

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """A number that is asked for when somebody looks."""
        Gauge(f"slotwise:{name}", text, registry=self._registry).set_function(value)

    def refused(self) -> None:
        self._ended.labels("refused").inc()

    def observe(self, record: RequestRecord) -> None:
        """Counts a request that has ended; called by the thread that ends it."""
        self._ended.labels(record.status).inc()
        self._phases(record)
        tokens, c = record.tokens, self._count
        c["prompt_tokens"].inc(tokens.prompt)
        c["generation_tokens"].inc(tokens.generated)
        c["tokens_predicted"].inc(tokens.generated)
        c["prefix_cache_queries"].inc(tokens.prompt)
        c["prefix_cache_hits"].inc(tokens.reused)
        self._prompt.observe(tokens.prompt)
        if record.decode is not None:
            c["n_decode"].inc(record.decode.windows)
            c["tokens_predicted_seconds"].inc(record.decode.windows_ns / 1e9)
        self._experts(record)

    def _phases(self, record: RequestRecord) -> None:
        ledger = record.ledger
        for name, phase in ledger.phases.items():
            self._phase.labels(name).inc(phase.ns / 1e9)
        read = sum(p.ns for name, p in ledger.phases.items() if name.startswith("read."))
        self._count["prompt_seconds"].inc(read / 1e9)
        after = record.decode.wall_ns if record.decode else 0
        s = self._seconds
        s["request_queue_time_seconds"].observe(ledger.ns("queue") / 1e9)
        s["e2e_request_latency_seconds"].observe((ledger.wall_ns + after) / 1e9)
        if record.time_to_first_token_ns is not None:
            s["time_to_first_token_seconds"].observe(record.time_to_first_token_ns / 1e9)
            s["request_prefill_time_seconds"].observe(read / 1e9)
            s["request_decode_time_seconds"].observe(after / 1e9)

    def _experts(self, record: RequestRecord) -> None:
        for counts in (record.prefill_experts, record.decode_experts):
            self._count["expert_hits"].inc(counts.hits or 0)
            self._count["expert_misses"].inc(counts.misses or 0)
            self._count["expert_read_bytes"].inc(counts.bytes or 0)
        if record.loan is not None:
            self._count["expert_slots_lent"].inc(record.loan.slots)

    def text(self, engine: Engine | None) -> bytes:
        """For the event loop's thread."""
        if engine is not None:
            self._look_at(engine)
        return generate_latest(self._registry)

    def _look_at(self, engine: Engine) -> None:
        for state, count in engine.expert_slots().items():
            self._slots.labels(state).set(count)
        parking = engine.conversations.parking
        self._parked.labels("memory").set(parking.memory_used)
        self._parked.labels("disk").set(parking.disk_used)
        self._parked.labels("file").set(parking.file_bytes)
        self._blocks.set(parking.blocks)
        if (experts := engine.loaded.experts) is not None:
            stats, before = experts.snapshot(), self._refilled
            self._refilled = stats.refill_bytes, stats.refill_ns
            self._count["expert_refill_bytes"].inc(stats.refill_bytes - before[0])
            self._count["expert_refill_seconds"].inc((stats.refill_ns - before[1]) / 1e9)


_COUNTERS = {
    "prompt_tokens": "Prompt tokens, reused ones included.",
    "prompt_seconds": "Time in the prompt read's phases.",
    "generation_tokens": "Tokens of answers (vLLM's name).",
    "tokens_predicted": "Tokens of answers (llama.cpp's name).",
    "tokens_predicted_seconds": "Time in decode windows.",
    "n_decode": "Decode windows.",
    "prefix_cache_queries": "Prompt tokens looked up.",
    "prefix_cache_hits": "Prompt tokens whose state was there already.",
    "expert_hits": "Experts asked for that were in an expert slot.",
    "expert_misses": "Experts asked for that were not.",
    "expert_read_bytes": "Read from the slow tier because somebody waited.",
    "expert_slots_lent": "Expert slots lent to prompt reads.",
    "expert_refill_bytes": "Read to fill lent expert slots again.",
    "expert_refill_seconds": "Time of refills on their own lane.",
}
_SECONDS = {
    "time_to_first_token_seconds": "Last byte in to first token's first byte out, queue included.",
    "request_queue_time_seconds": "Last byte in to the engine's first work.",
    "request_prefill_time_seconds": "The prompt read.",
    "request_decode_time_seconds": "First token to the end.",
    "e2e_request_latency_seconds": "Last byte in to the end.",
}
