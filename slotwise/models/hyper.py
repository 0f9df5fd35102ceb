"""The numbers that describe a model, read from GGUF metadata under their published keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slotwise.errors import Finding, Refused

LARGEST = 2**31 - 1
"""ggml takes most sizes as a C int."""


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding, as `ggml_rope_ext` takes it."""

    dims: int
    base: float
    frequency_scale: float = 1.0
    original_context: int = 0
    extrapolation: float = 0.0
    """1 for YaRN, 0 otherwise."""
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Hyper:
    """Sizes of one model. Widths in elements."""

    arch: str
    n_layers: int
    n_embd: int
    n_heads: int
    n_heads_kv: int
    head_k: int
    head_v: int
    n_ff: int
    n_experts: int
    n_used: int
    n_ff_expert: int
    n_ff_shared: int
    expert_scale: float
    rms_eps: float
    n_vocab: int
    context_train: int
    sliding_window: int
    rope: Rope

    @property
    def width_expert(self) -> int:
        """Columns between gate and down of one expert; some files give them as n_ff."""
        return self.n_ff_expert or self.n_ff

    @property
    def width_k(self) -> int:
        """Elements of one position's keys."""
        return self.head_k * self.n_heads_kv

    @property
    def width_v(self) -> int:
        return self.head_v * self.n_heads_kv


class Keys:
    """Typed access to `{arch}.*` metadata; what is missing or odd becomes a `Finding`."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self._metadata = metadata
        self._where = where
        self.arch = str(metadata.get("general.architecture", ""))
        self.findings: list[Finding] = []

    def integer(self, key: str, default: int | None = None, *, at_least: int = 1) -> int:
        value = self._metadata.get(f"{self.arch}.{key}")
        if isinstance(value, list) and value and value == value[:1] * len(value):
            value = value[0]  # some converters write one number per layer
        if value is None and default is not None:
            return default
        if type(value) is not int or not at_least <= value <= LARGEST:
            self._complain(key, value, f"a whole number, {at_least} to {LARGEST}")
            return max(at_least, default or 0)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._metadata.get(f"{self.arch}.{key}")
        if value is None and default is not None:
            return default
        if type(value) is bool or not isinstance(value, int | float) or not 1e-30 < value < 1e30:
            self._complain(key, value, "a number between 1e-30 and 1e30")
            return default or 1.0
        return float(value)

    def text(self, key: str, default: str = "") -> str:
        value = self._metadata.get(f"{self.arch}.{key}")
        return value if isinstance(value, str) else default

    def complain_unless(self, condition: bool, key: str, found: str, expected: str) -> None:
        if not condition:
            self._complain(key, found, expected)

    def _complain(self, key: str, found: object, expected: str) -> None:
        self.findings.append(
            Finding(
                level="refusal",
                code="metadata-key",
                where=f"{self._where}, key {self.arch}.{key}",
                found="nothing" if found is None else repr(found)[:80],
                expected=expected,
                next_step="Convert the model again, or use another file.",
            )
        )


def read_hyper(metadata: Mapping[str, Any], n_vocab: int, where: str) -> Hyper:
    """Raises `Refused` with every missing or impossible key at once."""
    keys = Keys(metadata, where)
    n_embd = keys.integer("embedding_length")
    n_heads = keys.integer("attention.head_count")
    n_heads_kv = keys.integer("attention.head_count_kv", n_heads)
    head = n_embd // n_heads
    head_k = keys.integer("attention.key_length", max(head, 1))
    n_experts = keys.integer("expert_count", 0, at_least=0)
    hyper = Hyper(
        arch=keys.arch,
        n_layers=keys.integer("block_count"),
        n_embd=n_embd,
        n_heads=n_heads,
        n_heads_kv=n_heads_kv,
        head_k=head_k,
        head_v=keys.integer("attention.value_length", max(head, 1)),
        n_ff=keys.integer("feed_forward_length", 0, at_least=0),
        n_experts=n_experts,
        n_used=keys.integer("expert_used_count", 0 if not n_experts else None, at_least=0),
        n_ff_expert=keys.integer("expert_feed_forward_length", 0, at_least=0),
        n_ff_shared=keys.integer("expert_shared_feed_forward_length", 0, at_least=0),
        expert_scale=keys.number("expert_weights_scale", 1.0),
        rms_eps=keys.number("attention.layer_norm_rms_epsilon"),
        n_vocab=n_vocab,
        context_train=keys.integer("context_length", 0, at_least=0),
        sliding_window=keys.integer("attention.sliding_window", 0, at_least=0),
        rope=_read_rope(keys, head_k),
    )
    _check(hyper, keys)
    if keys.findings:
        raise Refused(keys.findings)
    return hyper


def _check(hyper: Hyper, keys: Keys) -> None:
    keys.complain_unless(
        hyper.n_heads % hyper.n_heads_kv == 0,
        "attention.head_count_kv",
        f"{hyper.n_heads_kv} key heads for {hyper.n_heads} query heads",
        "a divisor of the query heads",
    )
    keys.complain_unless(
        0 <= hyper.n_used <= max(hyper.n_experts, 0) and (hyper.n_used > 0 or not hyper.n_experts),
        "expert_used_count",
        f"{hyper.n_used} of {hyper.n_experts} experts",
        "between 1 and the number of experts",
    )
    keys.complain_unless(
        hyper.rope.dims % 2 == 0 and hyper.rope.dims <= hyper.head_k,
        "rope.dimension_count",
        str(hyper.rope.dims),
        f"an even number up to the head width {hyper.head_k}",
    )


def _read_rope(keys: Keys, head_k: int) -> Rope:
    scaling = keys.text("rope.scaling.type", "none")
    factor = keys.number("rope.scaling.factor", 1.0)
    keys.complain_unless(
        scaling in ("none", "linear", "yarn"), "rope.scaling.type", scaling, "none, linear or yarn"
    )
    return Rope(
        dims=keys.integer("rope.dimension_count", head_k),
        base=keys.number("rope.freq_base", 10_000.0),
        frequency_scale=1.0 / factor if scaling != "none" else 1.0,
        original_context=keys.integer(
            "rope.scaling.original_context_length", keys.integer("context_length", 0, at_least=0)
        ),
        extrapolation=1.0 if scaling == "yarn" else 0.0,
        attention_factor=keys.number("rope.scaling.attn_factor", 1.0),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
    )
