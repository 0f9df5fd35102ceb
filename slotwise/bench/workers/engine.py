"""Our engine on the other side of a pipe, in a process of its own.

It is opened and asked as any caller would: ledger, lanes and records are on.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from time import perf_counter_ns, process_time_ns
from typing import cast

from slotwise.bench.workers.protocol import Answer, Pipe, between, storage_bytes
from slotwise.engine.engine import Engine, Step
from slotwise.engine.sampling import Sampling
from slotwise.engine.settings import EngineSettings, RefillPolicy
from slotwise.kernels.features import cpu_features, ggml_version
from slotwise.trace.record import RequestRecord
from slotwise.weights.tokenizer import Tokenizer

ALL = "all"
"""Memory: a slot for every expert, and those that a loan takes."""
AUTO = "auto"
"""Memory: what the engine itself finds that it may use."""
MORE_THAN_ANY = 1 << 20
GREEDY = Sampling(temperature=0)


def settings(
    memory: str,
    *,
    threads: int,
    context: int,
    refill: RefillPolicy = "deferred",
    io_lanes: int = 4,
) -> EngineSettings:
    """`memory` is a number of bytes, `all` or `auto`."""
    everything = memory == ALL
    return EngineSettings(
        memory=None if memory in (ALL, AUTO) else int(memory),
        slots=MORE_THAN_ANY if everything else None,
        threads=threads,
        context=context,
        refill=refill,
        io_lanes=io_lanes,
    )


class EngineWorker:
    """Answers requests by token ids from an empty state."""

    def __init__(self, engine: Engine, pipe: Pipe) -> None:
        self._engine, self._pipe = engine, pipe
        metadata = engine.model.metadata
        self._tokenizer = Tokenizer.from_metadata(metadata)
        plan, loaded = engine.loaded.plan, engine.loaded
        self.ready: Answer = {
            "engine": "slotwise",
            "ggml": ggml_version(),
            "system_info": cpu_features(),
            "threads": loaded.backend.threads,
            "context": loaded.settings.context,
            "kv_type": loaded.settings.kv_type,
            "refill": loaded.settings.refill,
            "chunk": loaded.settings.chunk,
            "expert_slots": list(plan.slots),
            "plan_bytes": plan.parts(),
            "plan_total": plan.total,
            "budget_bytes": plan.budget.nbytes,
            "budget_reason": plan.budget.reason,
            "store": loaded.store.note if loaded.store else "",
            "direct": loaded.store.direct if loaded.store else None,
        }

    def tokenize(self, text: str) -> Answer:
        """The ids of `text`, control tokens in it taken as text, no bos."""
        return {"tokens": self._tokenizer.encode(text, special=False, add_bos=False)}

    def request(
        self, tokens: Sequence[int], max_tokens: int, *, seconds: float | None = None
    ) -> Answer:
        """Times seen by the caller of the engine, and the engine's own record. Decode ends after
        `max_tokens`, or with the token that comes `seconds` after the first."""
        self._engine.loaded.state.reuse([-1])
        from_disk = storage_bytes()
        cpu, begin = process_time_ns(), perf_counter_ns()
        steps = self._engine.generate(tokens, sampling=GREEDY, max_tokens=max_tokens)
        answer = [next(steps).token]
        first, first_cpu = perf_counter_ns(), process_time_ns()
        from_disk_first = storage_bytes()
        for step in steps:
            answer.append(step.token)
            if seconds and perf_counter_ns() - first > seconds * 1e9:
                break
        end, end_cpu = perf_counter_ns(), process_time_ns()
        cast("Generator[Step]", steps).close()
        return {
            "tokens": answer,
            "first_ns": first - begin,
            "decode_ns": end - first,
            "decode_tokens": len(answer) - 1,
            "read_cpu_ns": first_cpu - cpu,
            "decode_cpu_ns": end_cpu - first_cpu,
            "read_bytes": between(from_disk, from_disk_first),
            "decode_bytes": between(from_disk_first, storage_bytes()),
            "record": self._record().to_dict(),
        }

    def routing(self, tokens: Sequence[int], max_tokens: int, path: str) -> Answer:
        """Answers again, unmeasured, and writes which experts were chosen to `path`."""
        from slotwise.engine.session import recorded_routing

        self._engine.loaded.state.reuse([-1])
        with recorded_routing(self._engine, Path(path)):
            for _ in self._engine.generate(tokens, sampling=GREEDY, max_tokens=max_tokens):
                pass
        return {}

    def _record(self) -> RequestRecord:
        record = self._engine.last_record
        if record is None:
            raise RuntimeError("the engine has no record of its latest request")
        return record

    def settle(self) -> Answer:
        """Waits until the refill lane has nothing left to do."""
        experts = self._engine.loaded.experts
        while experts and experts.refill_state().active:
            time.sleep(0.002)
        return {}

    def stream(self, text: str, max_tokens: int, *, arrived_ns: int) -> Answer:
        """Says every token as it comes; the ledger starts when the request's line had arrived."""
        opened = self._engine.new_ledger(start_ns=arrived_ns)
        self._engine.loaded.state.reuse([-1])
        with opened[1].phase("tokenize"):
            tokens = self._tokenizer.encode(text, special=False, add_bos=False)
        steps = self._engine.generate(tokens, sampling=GREEDY, max_tokens=max_tokens, opened=opened)
        for step in steps:
            self._pipe.say({"token": step.token})
        return {"record": self._record().to_dict()}

    def serve(self) -> None:
        """Until stdin ends."""
        self._pipe.say(self.ready)
        while line := self._pipe.line():
            arrived_ns = perf_counter_ns()
            request = json.loads(line)
            op = request.pop("op")
            extra = {"arrived_ns": arrived_ns} if op == "stream" else {}
            self._pipe.say(getattr(self, op)(**request, **extra))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--memory", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--refill", default="deferred")
    parser.add_argument("--io-lanes", type=int, default=4)
    args = parser.parse_args()
    pipe = Pipe()
    chosen = settings(
        args.memory,
        threads=args.threads,
        context=args.context,
        refill=args.refill,
        io_lanes=args.io_lanes,
    )
    with Engine.open(args.model, chosen) as engine:
        EngineWorker(engine, pipe).serve()


if __name__ == "__main__":
    main()
