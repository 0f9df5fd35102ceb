"""Our engine on the other side of a pipe, in a process of its own.

It is opened and asked as any caller would: ledger, lanes and records are on.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter_ns, process_time_ns

import ggml

from bench.workers.protocol import Answer, Pipe
from slotwise.engine.engine import Engine
from slotwise.engine.sampling import Sampling
from slotwise.engine.settings import EngineSettings, RefillPolicy
from slotwise.trace.record import RequestRecord
from slotwise.weights.tokenizer import Tokenizer

ALL = "all"
"""Memory: a slot for every expert, and those that a loan takes."""
MORE_THAN_ANY = 1 << 20
GREEDY = Sampling(temperature=0)


def settings(
    memory: str, *, threads: int, context: int, refill: RefillPolicy = "deferred"
) -> EngineSettings:
    """`memory` is a number of bytes, or `all`."""
    everything = memory == ALL
    return EngineSettings(
        memory=None if everything else int(memory),
        slots=MORE_THAN_ANY if everything else None,
        threads=threads,
        context=context,
        refill=refill,
    )


class _Feature(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("value", ctypes.c_char_p))


def ggml_features() -> str:
    """What ggml's CPU backend was built with, in the words of llama.cpp's system info."""
    library = ggml.ggml.lib
    library.ggml_backend_cpu_reg.restype = ctypes.c_void_p
    address = library.ggml_backend_reg_get_proc_address
    address.restype, address.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_char_p)
    registry = library.ggml_backend_cpu_reg()
    features = ctypes.CFUNCTYPE(ctypes.POINTER(_Feature), ctypes.c_void_p)(
        address(registry, b"ggml_backend_get_features")
    )(registry)
    found = []
    while name := features[len(found)].name:
        found.append(f"{name.decode()} = {features[len(found)].value.decode()}")
    return "CPU : " + " | ".join(found)


class EngineWorker:
    """Answers requests by token ids from an empty state."""

    def __init__(self, engine: Engine, pipe: Pipe) -> None:
        self._engine, self._pipe = engine, pipe
        metadata = engine.model.metadata
        self._tokenizer = Tokenizer.from_metadata(metadata)
        plan, loaded = engine.loaded.plan, engine.loaded
        self.ready: Answer = {
            "engine": "slotwise",
            "ggml": f"{ggml.ggml_version().decode()} (ggml-python {ggml.__version__})",
            "system_info": ggml_features(),
            "threads": loaded.backend.threads,
            "context": loaded.settings.context,
            "kv_type": loaded.settings.kv_type,
            "refill": loaded.settings.refill,
            "chunk": loaded.settings.chunk,
            "expert_slots": list(plan.slots),
            "plan_bytes": plan.parts(),
            "plan_total": plan.total,
            "store": loaded.store.note if loaded.store else "",
            "direct": loaded.store.direct if loaded.store else None,
        }

    def tokenize(self, text: str) -> Answer:
        """The ids of `text`, control tokens in it taken as text, no bos."""
        return {"tokens": self._tokenizer.encode(text, special=False, add_bos=False)}

    def request(self, tokens: Sequence[int], max_tokens: int) -> Answer:
        """Times seen by the caller of the engine, and the engine's own record."""
        self._engine.loaded.state.reuse([-1])
        cpu, begin = process_time_ns(), perf_counter_ns()
        steps = self._engine.generate(tokens, sampling=GREEDY, max_tokens=max_tokens)
        answer = [next(steps).token]
        first, first_cpu = perf_counter_ns(), process_time_ns()
        answer.extend(step.token for step in steps)
        end, end_cpu = perf_counter_ns(), process_time_ns()
        return {
            "tokens": answer,
            "first_ns": first - begin,
            "decode_ns": end - first,
            "read_cpu_ns": first_cpu - cpu,
            "decode_cpu_ns": end_cpu - first_cpu,
            "record": self._record().to_dict(),
        }

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
    args = parser.parse_args()
    pipe = Pipe()
    chosen = settings(args.memory, threads=args.threads, context=args.context, refill=args.refill)
    with Engine.open(args.model, chosen) as engine:
        EngineWorker(engine, pipe).serve()


if __name__ == "__main__":
    main()
