"""A refill keeps books of its own until the next loan, whatever requests come meanwhile."""

from __future__ import annotations

from experts.fakes import PAGE, Bench, ids, make_layout


def bench(slots: int = 10, **settings: object) -> Bench:
    return Bench(make_layout(layers=2, experts=8), slots=(slots,), **settings)


def lend(b: Bench, slots: int = 3) -> None:
    b.experts.give_back(b.experts.lend(slots * PAGE))


def test_they_go_on_after_whoever_asked_has_left() -> None:
    with bench() as b:
        b.experts.warm()
        lend(b)
        with b.store.held():
            b.experts.refill()
            books = b.experts.refill_books
            assert (books.done, books.end, books.end_ns) == (0, "running", None)
            b.store.let(1)
            b.store.wait_begun(10 + 2)
            assert (books.done, books.bytes, books.end) == (1, PAGE, "running")
        b.quiet()
        assert (books.done, books.bytes, books.filled_bytes) == (3, 3 * PAGE, 3 * PAGE)
        assert books.end == "full"
        assert books.end_ns is not None
        assert books.ns > 0
        assert not books.superseded


def test_the_next_loan_cuts_it_short_and_begins_new_books() -> None:
    with bench() as b:
        b.experts.warm()
        lend(b)
        with b.store.held():
            b.experts.refill()
            first = b.experts.refill_books
            b.store.wait_begun(10 + 1)
            b.store.let(1)
            lend(b)
        assert (first.end, first.superseded) == ("cut_short", True)
        assert first.done <= 2  # what was in flight ended, nothing was begun
        after = first.done
        b.experts.refill()
        second = b.experts.refill_books
        b.quiet()
        assert second is not first
        assert (second.end, first.done) == ("full", after)
        assert not b.experts.pool.counts(0).free


def test_a_use_of_what_it_brought_back_is_credited_to_it() -> None:
    with bench() as b:
        b.experts.warm()
        before = b.experts.pool.table.copy()
        lend(b)
        gone = (before >= 0) & (b.experts.pool.table < 0)
        b.experts.refill()
        books = b.experts.refill_books
        b.quiet()
        back = gone & (b.experts.pool.table >= 0)
        moe_index, expert = map(int, zip(*back.nonzero(), strict=True).__next__())
        b.experts.touch(moe_index, ids(expert))
        b.experts.touch(moe_index, ids(expert))
        assert books.saved_misses == 1


def test_nothing_to_fill_is_an_end_too() -> None:
    with bench(16) as b:
        b.experts.warm()
        b.experts.refill()
        assert (b.experts.refill_books.done, b.experts.refill_books.end) == (0, "full")


def test_misses_of_a_loan_are_counted_for_the_stage_they_hit() -> None:
    with bench(10) as b:
        b.experts.warm()
        before = b.experts.pool.table.copy()
        lend(b)
        moe_index, expert = (
            int(v[0]) for v in ((before >= 0) & (b.experts.pool.table < 0)).nonzero()
        )
        b.experts.stage = "read"
        b.check(moe_index, *next(iter(b.experts.stream(moe_index, ids(expert)))))
        stats = b.experts.snapshot()
        assert (stats.read.loan_misses, stats.decode.loan_misses) == (1, 0)
