"""The lane log: bounded, thread-safe, and open about what it dropped."""

from __future__ import annotations

import threading

import pytest

from slotwise.trace import LaneLog, LaneTotal


def test_window_cuts_spans_at_its_edges_and_leaves_idle_lanes_out() -> None:
    log = LaneLog()
    log.record("io.0", "read", 0, 10, bytes=7, slots=1)
    log.record("io.0", "read", 90, 120, bytes=5, slots=2)
    log.record("io.1", "read", 300, 400, bytes=1)
    log.record("refill", "fill", 50, 1000, slots=3)
    window = log.window(5, 100)
    assert window.complete
    assert window.lanes == {
        "io.0": LaneTotal(busy_ns=15, calls=2, bytes=12, slots=3),
        "refill": LaneTotal(busy_ns=50, calls=1, bytes=0, slots=3),
    }


def test_edges_that_only_touch_are_outside() -> None:
    log = LaneLog()
    log.record("io.0", "read", 0, 10)
    log.record("io.0", "read", 20, 30)
    assert log.window(10, 20).lanes == {}


def test_dropped_spans_are_reported_where_they_matter() -> None:
    log = LaneLog(capacity=2)
    for start in (0, 10, 20, 30):
        log.record("io.0", "read", start, start + 10)
    assert log.window(0, 40).lanes["io.0"].calls == 2
    assert not log.window(0, 40).complete
    assert not log.window(19, 40).complete
    assert log.window(20, 40).complete  # the last lost span ended at 20
    spans, lost = log.take()
    assert ([span.start_ns for span in spans], lost) == ([20, 30], 2)


def test_take_gives_each_span_once_and_keeps_it_for_windows() -> None:
    log = LaneLog()
    log.record("b", "read", 5, 6)
    log.record("a", "read", 7, 8)
    assert [span.lane for span in log.take()[0]] == ["b", "a"]
    assert log.take() == ([], 0)
    log.record("a", "read", 9, 10)
    assert [span.start_ns for span in log.take()[0]] == [9]
    assert log.window(0, 20).lanes["a"].calls == 2


def test_unknown_counts_are_an_error() -> None:
    with pytest.raises(TypeError, match="tokens"):
        LaneLog().record("io.0", "read", 0, 1, tokens=3)  # pyright: ignore[reportCallIssue]


def test_many_writers_lose_nothing() -> None:
    log = LaneLog(capacity=100)
    gate = threading.Barrier(4)

    def write(lane: str) -> None:
        gate.wait()
        for i in range(500):
            log.record(lane, "read", i, i + 1, bytes=1)

    threads = [threading.Thread(target=write, args=(f"io.{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    taken = 0
    for _ in range(50):
        spans, lost = log.take()
        taken += len(spans) + lost
    for thread in threads:
        thread.join()
    spans, lost = log.take()
    assert taken + len(spans) + lost == 4 * 500
