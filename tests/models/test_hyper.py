"""Metadata either becomes sizes that make sense or a refusal that names every bad key."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference.tiny import ARCHITECTURES
from reference.writers.shared import N_LAYERS, N_VOCAB

from slotwise.errors import Refused
from slotwise.models.hyper import LARGEST, Hyper, read_hyper


def keys_of(name: str, **changes: Any) -> dict[str, Any]:
    """The tiny model's metadata; a change to None leaves the key out."""
    arch = ARCHITECTURES[name]
    keys = {f"{arch.name}.{key}": value for key, value in arch.metadata.items()}
    keys["general.architecture"] = arch.name
    for key, value in changes.items():
        keys[f"{arch.name}.{key}"] = value
    return {key: value for key, value in keys.items() if value is not None}


def read(keys: dict[str, Any]) -> Hyper:
    return read_hyper(keys, N_VOCAB, "tiny.gguf")


def bad_keys(keys: dict[str, Any]) -> list[str]:
    """The keys that the refusal names."""
    with pytest.raises(Refused) as caught:
        read(keys)
    for finding in caught.value.findings:
        assert finding.level == "refusal"
        assert finding.where.startswith("tiny.gguf, key ")
        assert finding.found
        assert finding.expected
        assert finding.next_step
    return [f.where.rpartition("key ")[2].partition(".")[2] for f in caught.value.findings]


def test_a_mixture_of_experts() -> None:
    h = read(keys_of("qwen3moe"))
    assert (h.arch, h.n_layers, h.n_vocab) == ("qwen3moe", N_LAYERS, N_VOCAB)
    assert (h.n_embd, h.n_heads, h.n_heads_kv, h.head_k, h.head_v) == (256, 8, 2, 64, 64)
    assert (h.n_experts, h.n_used, h.n_ff_expert, h.n_ff_shared) == (8, 3, 256, 0)
    assert (h.width_k, h.width_v) == (128, 128)
    assert h.rms_eps == pytest.approx(1e-6)
    assert (h.rope.dims, h.rope.base, h.rope.extrapolation) == (64, 1e6, 0.0)
    assert h.expert_scale == 1.0


def test_yarn() -> None:
    rope = read(keys_of("gpt-oss")).rope
    assert rope.extrapolation == 1.0
    assert rope.frequency_scale == pytest.approx(1 / 32)
    assert (rope.original_context, rope.beta_fast, rope.beta_slow) == (64, 32.0, 1.0)


def test_linear_scaling_slows_the_rotation_and_nothing_else() -> None:
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    rope = read(keys_of("qwen3moe", **scaling)).rope
    assert (rope.frequency_scale, rope.extrapolation) == (0.25, 0.0)
    unscaled = read(keys_of("qwen3moe", **{**scaling, "rope.scaling.type": "none"})).rope
    assert unscaled.frequency_scale == 1.0


def test_what_a_file_may_leave_out() -> None:
    left_out = (
        "attention.head_count_kv", "attention.key_length", "attention.value_length",
        "rope.dimension_count", "rope.freq_base", "context_length", "feed_forward_length",
    )  # fmt: skip
    h = read(keys_of("llama", **dict.fromkeys(left_out)))
    assert h.n_heads_kv == h.n_heads
    assert h.head_k == h.head_v == h.rope.dims == h.n_embd // h.n_heads
    assert (h.rope.base, h.context_train, h.n_ff) == (10_000.0, 0, 0)
    assert (h.n_experts, h.n_used) == (0, 0)


def test_one_number_for_each_layer_is_read_if_they_agree() -> None:
    assert read(keys_of("llama", feed_forward_length=[160] * N_LAYERS)).n_ff == 160
    assert bad_keys(keys_of("llama", feed_forward_length=[160, 161, 160])) == [
        "feed_forward_length"
    ]


REQUIRED = (
    "block_count",
    "embedding_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
    "expert_used_count",
)


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key(key: str) -> None:
    assert key in bad_keys(keys_of("qwen3moe", **{key: None}))


def test_all_missing_keys_at_once() -> None:
    found = bad_keys({"general.architecture": "qwen3moe"})
    assert set(found) >= set(REQUIRED) - {"expert_used_count"}  # nothing says it has experts


@pytest.mark.parametrize("value", ["3", 3.0, True, [], [1, 2], [[3], [3]], {}, -1, LARGEST + 1])
@pytest.mark.parametrize("key", ["block_count", "context_length", "expert_count"])
def test_a_count_of_the_wrong_kind(key: str, value: object) -> None:
    assert key in bad_keys(keys_of("qwen3moe", **{key: value}))


@pytest.mark.parametrize("value", ["1", True, 0.0, -1.0, math.nan, math.inf, [1.0], -3])
@pytest.mark.parametrize("key", ["attention.layer_norm_rms_epsilon", "rope.freq_base"])
def test_a_number_of_the_wrong_kind(key: str, value: object) -> None:
    assert bad_keys(keys_of("qwen3moe", **{key: value})) == [key]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.head_count_kv", 3),
        ("attention.head_count_kv", 16),
        ("expert_used_count", 0),
        ("expert_used_count", 9),
        ("rope.dimension_count", 63),
        ("rope.dimension_count", 66),
        ("rope.scaling.type", "longrope"),
        ("rope.scaling.factor", 0.0),
        ("embedding_length", 0),
    ],
)
def test_an_impossible_value(key: str, value: object) -> None:
    assert key in bad_keys(keys_of("qwen3moe", **{key: value}))


def test_several_impossible_values_at_once() -> None:
    wrong = {"attention.head_count_kv": 3, "expert_used_count": 9, "rope.scaling.type": "x"}
    assert sorted(bad_keys(keys_of("qwen3moe", **wrong))) == sorted(wrong)


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(Refused) as caught:
        read(keys_of("llama", block_count="9" * 10_000))
    assert len(str(caught.value)) < 1000


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.sampled_from([0, 1, 2, 3, 2**31 - 1, 2**31, 2**32, 2**63, 2**64 - 1])
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text("ab.\0\u20ac", max_size=5)
    | st.sampled_from(["none", "linear", "yarn"]),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)
KEYS = sorted(
    {key for arch in ARCHITECTURES.values() for key in arch.metadata}
    | {"expert_weights_scale", "rope.scaling.attn_factor", "rope.scaling.type"}
    | {"expert_shared_feed_forward_length", "rope.scaling.factor"}
)


@given(
    st.sampled_from(sorted(ARCHITECTURES)),
    st.dictionaries(st.sampled_from(KEYS), JUNK, max_size=4),
)
def test_junk_is_refused_or_makes_sense(name: str, junk: dict[str, Any]) -> None:
    try:
        h = read(keys_of(name, **junk))
    except Refused:
        return
    positive = (h.n_layers, h.n_embd, h.n_heads, h.n_heads_kv, h.head_k, h.head_v, h.rope.dims)
    counts = (h.n_ff, h.n_experts, h.n_ff_expert, h.n_ff_shared, h.context_train, h.sliding_window)
    assert all(type(n) is int and 0 < n <= LARGEST for n in positive)
    assert all(type(n) is int and 0 <= n <= LARGEST for n in counts)
    assert h.n_heads % h.n_heads_kv == 0
    assert h.rope.dims % 2 == 0
    assert h.rope.dims <= h.head_k
    assert (0 < h.n_used <= h.n_experts) if h.n_experts else h.n_used == 0
    numbers = (h.rms_eps, h.expert_scale, h.rope.base, h.rope.frequency_scale)
    assert all(0 < x < math.inf for x in numbers)


@given(st.dictionaries(st.text("abc.", max_size=12), JUNK, max_size=6))
def test_metadata_of_nothing_we_know(keys: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        read(keys)
