"""Pieces that several architectures share. Shapes are ggml's: [ne0, ne1, ...]."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slotwise.kernels.graph import Graph, Tensor, Weights
from slotwise.models.hyper import Hyper, Rope

ROPE_NORMAL = 0
"""Rotates neighbouring pairs (llama)."""
ROPE_NEOX = 2
"""Rotates the two halves of a head against each other (most others)."""

SMALLEST_WEIGHT_SUM = 6.103515625e-5
"""The smallest normal half float; keeps the division finite, as llama.cpp does."""


@dataclass(frozen=True)
class SlotTensors:
    """The three projections of all expert slots of one class, [n_in, n_out, slots]."""

    gate: Tensor
    up: Tensor
    down: Tensor


def rms_norm(g: Graph, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return g.op("mul", g.op("rms_norm", x, eps), weight)


def linear(g: Graph, w: Weights, name: str, x: Tensor) -> Tensor:
    """`name`.weight applied to x, plus `name`.bias where the model has one."""
    return _plus_bias(g, w, name, g.product(w[name + ".weight"], x))


def scores(g: Graph, w: Weights, name: str, x: Tensor) -> Tensor:
    """The same for a router, whose close races no other way of rounding may decide."""
    return _plus_bias(g, w, name, g.op("mul_mat", w[name + ".weight"], x))


def _plus_bias(g: Graph, w: Weights, name: str, result: Tensor) -> Tensor:
    bias = w.get(name + ".bias")
    return result if bias is None else g.op("add", result, bias)


def swiglu(g: Graph, w: Weights, pattern: str, x: Tensor) -> Tensor:
    """down(silu(gate(x)) * up(x)); `pattern` is a name with {} for gate, up and down."""
    gate = linear(g, w, pattern.format("gate"), x)
    up = linear(g, w, pattern.format("up"), x)
    return linear(g, w, pattern.format("down"), g.op("swiglu_split", gate, up))


def rope(
    g: Graph, x: Tensor, positions: Tensor, r: Rope, mode: int, factors: Tensor | None
) -> Tensor:
    """Rotates x [head width, heads, T]."""
    return g.op(
        "rope_ext",
        x,
        positions,
        factors,
        r.dims,
        mode,
        r.original_context,
        r.base,
        r.frequency_scale,
        r.extrapolation,
        r.attention_factor,
        r.beta_fast,
        r.beta_slow,
    )


def attend(
    g: Graph,
    h: Hyper,
    qkv: tuple[Tensor, Tensor, Tensor],
    state: tuple[Tensor, Tensor],
    rows: Tensor,
    mask: Tensor,
    sinks: Tensor | None,
) -> Tensor:
    """Stores new keys and values, then attends over the first n_kv = mask.ne[0] positions.

    q [head_k, heads, T], k and v [.., heads_kv, T] or flat; `state` [width, positions] twice;
    result f32 [head_v * heads, T].
    """
    q, k, v = qkv
    keys, values = state
    n_tokens, n_kv = q.contents.ne[2], mask.contents.ne[0]
    g.op("set_rows", keys, g.reshape(k, h.width_k, n_tokens), rows)
    g.op("set_rows", values, g.reshape(v, h.width_v, n_tokens), rows)
    past_keys = _by_head(g, keys, h.head_k, n_kv, h.n_heads_kv)
    past_values = _by_head(g, values, h.head_v, n_kv, h.n_heads_kv)
    queries = g.op("permute", q, 0, 2, 1, 3)
    scale = h.head_k**-0.5
    attended = g.flash_attention(queries, past_keys, past_values, mask, scale, sinks)
    return g.reshape(attended, h.head_v * h.n_heads, n_tokens)


def _by_head(g: Graph, cache: Tensor, head: int, n_kv: int, n_heads: int) -> Tensor:
    """[width, positions] seen as [head, n_kv, heads]."""
    element, row = cache.contents.nb[0], cache.contents.nb[1]
    return g.view(cache, (head, n_kv, n_heads), (row, head * element))


def pick(g: Graph, scores: Tensor, ranking: Tensor, n_used: int) -> Tensor:
    """The first `n_used` ranked entries of each row of scores [E, T], as [1, n_used, T]."""
    n_experts, n_tokens = scores.contents.ne[0], scores.contents.ne[1]
    table = g.reshape(scores, 1, n_experts, n_tokens)
    return g.op("get_rows", table, top(g, ranking, n_used))


def top(g: Graph, ranking: Tensor, n_used: int) -> Tensor:
    """View of the first `n_used` rows of a ranking [E, T], as [n_used, T]."""
    return g.view(ranking, (n_used, ranking.contents.ne[1]), (ranking.contents.nb[1],))


def normalise(g: Graph, weights: Tensor) -> Tensor:
    """Weights [1, k, T] divided by their sum over k."""
    _, n_used, n_tokens, _ = weights.contents.ne
    flat = g.reshape(weights, n_used, n_tokens)
    total = g.op("clamp", g.op("sum_rows", flat), SMALLEST_WEIGHT_SUM, float("inf"))
    return g.reshape(g.op("div", flat, total), 1, n_used, n_tokens)


def weighted_sum(g: Graph, outputs: Tensor, weights: Tensor) -> Tensor:
    """Sum over k of weights [1, k, T] * outputs [n, k, T], in the order of k, as [n, T]."""
    width, n_used, n_tokens, _ = outputs.contents.ne
    weighted = g.op("mul", outputs, weights)
    if n_used == 1:
        return g.reshape(weighted, width, n_tokens)
    row, block = weighted.contents.nb[1], weighted.contents.nb[2]
    parts = [g.view(weighted, (width, n_tokens), (block,), i * row) for i in range(n_used)]
    total = parts[0]
    for part in parts[1:]:
        total = g.op("add", total, part)
    return total


def over_one_plus_exp(values: np.ndarray, x: np.ndarray, factor: float) -> None:
    """values / (1 + exp(factor * x)), f32, into `x`: a sigmoid's product without a copy."""
    x *= np.float32(factor)
    with np.errstate(over="ignore"):  # values / inf is the right 0
        np.exp(x, out=x)
    x += np.float32(1.0)
    np.divide(values, x, out=x)
