"""What a user may choose about the engine; checked once, before anything is opened."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from slotwise.engine.conversations import ParkSettings
from slotwise.engine.expert_gemm import GemmUse
from slotwise.errors import UsageError

KvType = Literal["f16", "f32"]
RefillPolicy = Literal["deferred", "blocking", "lazy"]
SlotPolicy = Literal["two-rate", "lfu", "lru"]
LookAheadMode = Literal["auto", "on", "off"]

_MOST = {"threads": 512, "context": 2**31 - 1}
"""ggml's limits; it crashes beyond them."""

MOST_READ_SECONDS = 86_400


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Raises `UsageError` for a value that makes no sense."""

    memory: int | None = None
    """Bytes for expert slots, dense weights, keys and values, and buffers; None looks around."""
    threads: int | None = None
    """None: as many as this process may use."""
    context: int = 4096
    """Tokens of one conversation, prompt and answer together."""
    chunk: int = 2048
    """Tokens of the prompt read at once. Changes rounding, unless `exact`."""
    exact: bool = False
    """Quantised products only: the same bits whatever the chunk, at the price of a slower read."""
    gemm_rows: int | None = None
    """Rows of one expert in a chunk from which its weights are repacked or dequantised; None: what
    was measured for each of the two."""
    kv_type: KvType = "f16"
    refill: RefillPolicy = "deferred"
    policy: SlotPolicy = "two-rate"
    lookahead: LookAheadMode = "auto"
    """Whether decode reads what the next layer will probably want."""
    profile: Path | None = None
    pack: Path | None = None
    """None: beside the model, if there is one."""
    io_lanes: int = 4
    mirror: int | None = None
    """Bytes of host memory, beside `memory`, for copies of experts that have no slot."""
    read_limit: float = 60.0
    """Seconds that the slow tier may take for one expert; then the request fails."""
    park: ParkSettings = field(default_factory=ParkSettings)
    """What becomes of conversations between requests."""
    slots: int | None = None
    """Expert slots per class, instead of what `memory` allows (for tests and experiments)."""

    def __post_init__(self) -> None:
        for name in (
            "threads",
            "context",
            "chunk",
            "io_lanes",
            "slots",
            "memory",
            "gemm_rows",
            "mirror",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} is {value}, expected at least 1")
            if value is not None and value > _MOST.get(name, value):
                raise UsageError(f"--{name} is {value}, expected {_MOST[name]} at most")
        if not 0 < self.read_limit <= MOST_READ_SECONDS:
            raise UsageError(
                f"--read-limit is {self.read_limit:g}, expected over 0 and at most "
                f"{MOST_READ_SECONDS:,} seconds"
            )
        for name, allowed in (
            ("kv_type", ("f16", "f32")),
            ("refill", ("deferred", "blocking", "lazy")),
            ("policy", get_args(SlotPolicy)),
            ("lookahead", get_args(LookAheadMode)),
        ):
            if getattr(self, name) not in allowed:
                raise UsageError(
                    f"--{name.replace('_', '-')} is {getattr(self, name)!r}, "
                    f"expected one of {', '.join(allowed)}"
                )

    @property
    def n_threads(self) -> int:
        return self.threads or len(os.sched_getaffinity(0))

    @property
    def gemm(self) -> GemmUse | None:
        if self.exact:
            return None
        if self.gemm_rows is None:
            return GemmUse(self.n_threads)
        return GemmUse(self.n_threads, self.gemm_rows, self.gemm_rows)
