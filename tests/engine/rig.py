"""Small models, engines over them, and what must hold whenever an engine is idle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jsonschema
import numpy as np
from experts.faulty_store import FaultyStore
from reference.tiny import TinyModel, TypeOf, build, everything_f32, random_tokens

from slotwise.engine import loading
from slotwise.engine.engine import Engine
from slotwise.engine.sampling import Sampling
from slotwise.engine.settings import EngineSettings
from slotwise.experts.profile import Profile, save_profile
from slotwise.experts.store import open_store
from slotwise.trace import RequestRecord
from slotwise.trace.schema import trace_schema
from slotwise.weights.layout import ExpertLayout, expert_layout
from slotwise.weights.pack import write_pack
from slotwise.weights.shards import ModelFile, open_model

GREEDY = Sampling(temperature=0.0)
PROMPT = random_tokens(14, seed=1)
OTHER = random_tokens(17, seed=2)
CHUNK = 8


def mixed(name: str) -> str:
    """Another type for the experts of every layer, as mixed quantisations have them."""
    for part, type_name in {
        "0.ffn_down_exps": "Q6_K",
        "0.ffn": "Q4_K",
        "1.ffn": "Q8_0",
        "2.ffn_down_exps": "Q2_0",
        "2.ffn": "IQ4_XS",
    }.items():
        if part in name and "_exps" in name:
            return type_name
    return "F32"


def q4_1(name: str) -> str:
    """Experts that ggml's kernels for repacked weights take, on every x86 with AVX2."""
    return "Q4_1" if "_exps" in name else "F32"


KINDS: dict[str, tuple[str, TypeOf]] = {
    "qwen3moe": ("qwen3moe", everything_f32),
    "qwen3moe-mixed": ("qwen3moe", mixed),
    "qwen3moe-q4_1": ("qwen3moe", q4_1),
    "gpt-oss": ("gpt-oss", everything_f32),
    "qwen2moe": ("qwen2moe", everything_f32),
    "mixtral": ("mixtral", everything_f32),
    "llama": ("llama", everything_f32),
}


@dataclass(frozen=True)
class Small:
    """A small model on disk, with a pack and profiles in a folder of their own."""

    tiny: TinyModel
    folder: Path

    @property
    def path(self) -> Path:
        return self.tiny.path

    @cached_property
    def model(self) -> ModelFile:
        return open_model(self.path)

    @cached_property
    def layout(self) -> ExpertLayout:
        layout = expert_layout(self.model)
        assert layout is not None
        return layout

    @cached_property
    def pack(self) -> Path:
        write_pack(self.model, self.layout, self.folder / "pack", lanes=1)
        return self.folder / "pack"

    @cached_property
    def profiles(self) -> dict[str, Path | None]:
        """A profile that likes the first experts of the last layers, and its opposite."""
        shape = (self.layout.n_moe_layers, self.layout.n_experts)
        ranks = np.arange(shape[0] * shape[1], dtype=np.int64).reshape(shape)
        counts = {"skewed": 1 << ranks[:, ::-1] % 20, "reversed": 1 << 20 - ranks % 20}
        paths: dict[str, Path | None] = {"none": None}
        for name, table in counts.items():
            paths[name] = self.folder / f"{name}.json"
            profile = Profile(counts=table, model_name="x", model_digest=self.model.digest)
            save_profile(self.folder / f"{name}.json", profile)
        return paths


def make(kind: str, folder: Path) -> Small:
    name, type_of = KINDS[kind]
    return Small(build(name, folder, type_of=type_of, label=kind), folder)


def settings(**chosen: Any) -> EngineSettings:
    """One thread, F32 keys and values, a small context and chunk, unless chosen otherwise.

    No chunk is so long that products go to the BLAS; `gemm_rows=2` has both kinds of product.
    """
    usual = {"threads": 1, "context": 256, "chunk": CHUNK, "kv_type": "f32", "memory": 1 << 40}
    return EngineSettings(**{**usual, **chosen})


def open_engine(small: Small, *, trace: Path | None = None, **chosen: Any) -> Engine:
    return Engine.open(small.path, settings(**chosen), trace=trace)


@contextmanager
def faulty_engine(
    small: Small, *, trace: Path | None = None, **chosen: Any
) -> Iterator[tuple[Engine, FaultyStore]]:
    """An engine over a store that fails when it is told to."""
    stores: list[FaultyStore] = []

    def wrapped(*args: Any, **kwargs: Any) -> FaultyStore:
        stores.append(FaultyStore(open_store(*args, **kwargs)))
        return stores[0]

    with patch.object(loading, "open_store", wrapped):
        engine = open_engine(small, trace=trace, **chosen)
    with engine:
        try:
            yield engine, stores[0]
        finally:
            stores[0].heal()


def generate(engine: Engine, prompt: Sequence[int] = PROMPT, n: int = 4, **more: Any) -> list[int]:
    more = {"sampling": GREEDY, **more}
    return [step.token for step in engine.generate(prompt, max_tokens=n, **more)]


def window_logits(
    engine: Engine, prompt: Sequence[int] = PROMPT, n: int = 4
) -> tuple[list[int], np.ndarray]:
    """An answer, and the logits f32 [n, n_vocab] that `generate` chose its tokens from."""
    rows: list[np.ndarray] = []
    window: Callable[[int, int], np.ndarray] = engine.window

    def recorded(token: int, position: int) -> np.ndarray:
        rows.append(window(token, position).copy())
        return rows[-1]

    with patch.object(engine, "window", recorded):
        tokens = generate(engine, prompt, n)
    return tokens, np.stack(rows)


def record_of(engine: Engine) -> RequestRecord:
    """The latest request's, after the checks that every record must pass."""
    record = engine.last_record
    assert record is not None
    ledger, tokens = record.ledger, record.tokens
    assert sum(p.ns for p in ledger.phases.values()) == ledger.wall_ns
    assert ledger.counted_twice_ns == 0
    _validator().validate(record.to_dict())
    assert RequestRecord.from_dict(record.to_dict()) == record
    assert 0 <= tokens.read <= tokens.read_planned
    if ledger.status == "done":
        assert tokens.read == tokens.read_planned
        assert tokens.prompt == tokens.reused + tokens.read + 1
    if record.decode is not None:
        assert tokens.generated <= record.decode.tokens + 1
        assert 0 <= record.decode.windows_ns <= record.decode.wall_ns
    return record


@cache
def _validator() -> Any:
    schema = trace_schema()
    of_a_record = {"$ref": "#/$defs/RequestRecord", "$defs": schema["$defs"]}
    return jsonschema.Draft202012Validator(of_a_record)


def check_idle(engine: Engine) -> None:
    """Between requests: the books balance, nothing is pinned and nothing is lent."""
    experts = engine.loaded.experts
    if experts is None:
        return
    experts.check_conservation()
    for region in experts.pool.regions:
        assert not region.pins.any()
        assert experts.pool.counts(region.index).lent == 0
