"""Offsets for the intermediates of a graph: who is alive together never shares a byte."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotwise.kernels.lib import TENSOR_ALIGNMENT
from slotwise.kernels.planner import DoesNotFitError, Extent, Span, peak_bytes, place


@st.composite
def spans(draw: st.DrawFn) -> list[Span]:
    sizes = st.one_of(st.integers(0, 300), st.sampled_from([0, 64, 128, 4096, 5000]))
    moments = st.tuples(st.integers(0, 8), st.integers(0, 8)).map(sorted)
    pairs = draw(st.lists(st.tuples(sizes, moments), max_size=14))
    return [Span(nbytes, first, last) for nbytes, (first, last) in pairs]


@st.composite
def extents(draw: st.DrawFn) -> list[Extent]:
    """Apart from each other, in any order, starting anywhere."""
    found, cursor = [], 0
    for gap, length in draw(
        st.lists(st.tuples(st.integers(0, 200), st.integers(0, 6000)), min_size=1, max_size=5)
    ):
        found.append((cursor + gap, length))
        cursor += gap + length
    return draw(st.permutations(found))


def check(wanted: list[Span], offsets: list[int], free: list[Extent]) -> None:
    for span, offset in zip(wanted, offsets, strict=True):
        assert offset % TENSOR_ALIGNMENT == 0
        assert any(a <= offset and offset + span.nbytes <= a + n for a, n in free)
    for (a, start_a), (b, start_b) in combinations(zip(wanted, offsets, strict=True), 2):
        if a.nbytes and b.nbytes and a.first <= b.last and b.first <= a.last:
            assert start_a + a.nbytes <= start_b or start_b + b.nbytes <= start_a, (a, b)


def padded(nbytes: int) -> int:
    return -(-nbytes // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT


@given(spans(), extents())
def test_spans_alive_together_never_overlap_and_stay_inside(
    wanted: list[Span], free: list[Extent]
) -> None:
    try:
        offsets = place(wanted, free)
    except DoesNotFitError:
        # Only allowed where one extent could not simply hold everything side by side.
        room = max(length - padded(start) + start for start, length in free)
        assert sum(padded(s.nbytes) for s in wanted) > room
    else:
        check(wanted, offsets, free)


@given(spans())
def test_the_peak_is_enough_and_no_byte_of_it_is_spare(wanted: list[Span]) -> None:
    peak = peak_bytes(wanted)
    free = [(0, peak)]
    check(wanted, place(wanted, free), free)
    if peak:
        with pytest.raises(DoesNotFitError):
            place(wanted, [(0, peak - 1)])


def test_spans_that_follow_each_other_share_their_bytes() -> None:
    chain = [Span(1000, i, i + 1) for i in range(0, 20, 2)]
    assert peak_bytes(chain) == 1000


def test_neighbours_in_time_do_not_share() -> None:
    """An op reads its source while it writes its result."""
    assert peak_bytes([Span(64, 0, 1), Span(64, 1, 2)]) == 128


def test_a_span_never_crosses_from_one_extent_into_the_next() -> None:
    with pytest.raises(DoesNotFitError):
        place([Span(128, 0, 0)], [(0, 64), (64, 64)])
    assert place([Span(64, 0, 0), Span(64, 0, 0)], [(0, 64), (4096, 64)]) == [0, 4096]
