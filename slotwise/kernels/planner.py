"""Puts the intermediate tensors of a graph into memory that is already there.

ggml's own graph allocator brings its own buffer; ours must live in lent expert slots, so
the addresses are found here. Knows sizes and lifetimes, nothing of ggml.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slotwise.kernels.lib import TENSOR_ALIGNMENT

Extent = tuple[int, int]
"""(offset, length) in bytes of a free stretch of memory."""


@dataclass(frozen=True)
class Span:
    """Bytes that a tensor needs from the op that makes it to the last op that reads it."""

    nbytes: int
    first: int
    last: int


class DoesNotFitError(Exception):
    """The extents are too small or too scattered for the tensors."""


def place(spans: Sequence[Span], extents: Sequence[Extent]) -> list[int]:
    """An offset for each span, such that spans alive at the same time never overlap.

    Greedy by size: the biggest first, each at the lowest offset that is free for its
    whole life (Pisarchyk and Lee, 2020, "Efficient memory management for deep neural net
    inference", section 4.3). Raises `DoesNotFitError`.
    """
    offsets = [-1] * len(spans)
    placed: list[int] = []
    for index in sorted(range(len(spans)), key=lambda i: -spans[i].nbytes):
        span = spans[index]
        taken = sorted(
            (offsets[other], offsets[other] + spans[other].nbytes)
            for other in placed
            if spans[other].first <= span.last and span.first <= spans[other].last
        )
        offsets[index] = _lowest_free(span.nbytes, taken, extents)
        placed.append(index)
    return offsets


def peak_bytes(spans: Sequence[Span]) -> int:
    """Length of one extent that is enough for `place`."""
    offsets = place(spans, [(0, 1 << 62)])
    return max((o + s.nbytes for o, s in zip(offsets, spans, strict=True)), default=0)


def _lowest_free(nbytes: int, taken: Sequence[Extent], extents: Sequence[Extent]) -> int:
    """`taken` holds (start, end) pairs in ascending order."""
    for start, length in extents:
        cursor = _aligned(start)
        for begin, end in taken:
            if end <= cursor or begin >= start + length:
                continue
            if cursor + nbytes <= begin:
                break
            cursor = _aligned(max(cursor, end))
        if cursor + nbytes <= start + length:
            return cursor
    raise DoesNotFitError(f"no room for {nbytes:,} bytes in {extents}")


def _aligned(offset: int) -> int:
    return -(-offset // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
