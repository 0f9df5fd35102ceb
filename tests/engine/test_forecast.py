"""The forecast of the time to the first token, against timings whose rule is known."""

from __future__ import annotations

import numpy as np
import pytest

from slotwise.engine.forecast import Forecaster, Read, expected_bytes
from slotwise.trace.ledger import LedgerRecord, PhaseRecord
from slotwise.trace.record import Forecast

MS = 1_000_000
BANDWIDTH = 1e9  # a byte a nanosecond


def ledger(**phases: int) -> LedgerRecord:
    names = {key.replace("__", "."): ns for key, ns in phases.items()}
    records = {n: PhaseRecord(ns=ns, calls=1) for n, ns in {**names, "other": 0}.items()}
    return LedgerRecord(
        status="done",
        clock="perf_counter",
        start_ns=0,
        wall_ns=sum(names.values()),
        phases=records,
        counted_twice_ns=0,
    )


def compute_ns(read: Read) -> int:
    """1 ms a token, 10 ms a chunk, 2 us for each token and position."""
    return int(read.costs() @ np.array([1 * MS, 10 * MS, 2_000]))


def took(read: Read, *, bytes_read: int = 0, hidden: float = 1.0) -> LedgerRecord:
    compute = compute_ns(read)
    wait = max(0, int(bytes_read - hidden * min(bytes_read, compute)))
    return ledger(
        lookup=MS,
        lend=max(read.chunks) * 1000,
        read__attention=compute // 2,
        read__expert_compute=compute - compute // 2,
        read__expert_wait=wait,
        first_window=20 * MS,
        sample=MS,
        emit=MS,
    )


def read(tokens: int, start: int = 0) -> Read:
    return Read(tokens=tokens, start=start, chunk=512)


def learnt(*sizes: int, bandwidth: float | None = None) -> Forecaster:
    forecaster = Forecaster(bandwidth=bandwidth)
    for tokens in sizes:
        forecaster.learn(read(tokens), took(read(tokens)), missing_bytes=0, bytes_read=0)
    return forecaster


def foretold(forecaster: Forecaster, planned: Read, missing_bytes: float = 0) -> Forecast:
    return forecaster.forecast(planned, so_far_ns=MS, missing_bytes=missing_bytes)


def test_without_an_earlier_request_there_is_none() -> None:
    assert foretold(learnt(), read(512)) == Forecast()
    data = Forecast().__dict__
    assert set(data.values()) == {None}


def test_a_prompt_of_a_known_size_takes_as_long_as_before() -> None:
    assert foretold(learnt(512), read(512)).time_to_first_token_ns == pytest.approx(
        took(read(512)).wall_ns, rel=1e-6
    )


@pytest.mark.parametrize("tokens", [100, 700, 2048, 3000])
def test_three_sizes_tell_tokens_chunks_and_positions_apart(tokens: int) -> None:
    forecaster = learnt(75, 512, 2048, 512, 75)
    expected = took(read(tokens)).wall_ns
    assert foretold(forecaster, read(tokens)).time_to_first_token_ns == pytest.approx(
        expected, rel=1e-6
    )


def test_a_read_behind_a_kept_conversation_looks_at_more_positions() -> None:
    forecaster = learnt(75, 512, 2048)
    later = foretold(forecaster, read(512, start=1000)).read_compute_ns
    assert later == pytest.approx(compute_ns(read(512, start=1000)), rel=1e-6)


def test_one_size_is_scaled_by_its_tokens() -> None:
    forecaster = learnt(512, 512)
    half = foretold(forecaster, read(256)).read_compute_ns
    assert half == pytest.approx(compute_ns(read(512)) / 2, rel=1e-6)


def test_nothing_to_read_needs_only_what_comes_after() -> None:
    assert foretold(learnt(512), read(0)).time_to_first_token_ns == 23 * MS
    assert foretold(learnt(512), read(0)).read_bytes == 0


def test_what_the_compute_does_not_hide_is_waited_for() -> None:
    """Half of the compute hides reading: learnt once, it holds for other sizes and other bytes."""
    forecaster = learnt(75, 512, 2048, bandwidth=BANDWIDTH)
    nbytes = 300 * MS
    ledger = took(read(512), bytes_read=nbytes, hidden=0.5)
    forecaster.learn(read(512), ledger, missing_bytes=nbytes, bytes_read=nbytes)
    for missing in (nbytes, nbytes // 3, 5_000 * MS):
        wait = foretold(forecaster, read(512), missing_bytes=missing).read_wait_ns
        assert wait == pytest.approx(missing - 0.5 * min(missing, compute_ns(read(512))), rel=1e-6)


def test_a_guess_of_the_bytes_is_corrected_by_what_was_read() -> None:
    forecaster = learnt(512, bandwidth=BANDWIDTH)
    forecaster.learn(read(512), took(read(512)), missing_bytes=100.0, bytes_read=80)
    assert foretold(forecaster, read(512), missing_bytes=1000.0).read_bytes == 800


def test_the_newest_requests_count() -> None:
    """A machine that became twice as slow is believed after a while."""
    forecaster = learnt(*[512] * 40)
    slow = ledger(read__attention=2 * compute_ns(read(512)), first_window=MS, sample=0, emit=0)
    for _ in range(16):
        forecaster.learn(read(512), slow, missing_bytes=0, bytes_read=0)
    compute = foretold(forecaster, read(512)).read_compute_ns
    assert compute == pytest.approx(2 * compute_ns(read(512)), rel=1e-6)


HEAT = np.array([[8.0, 4.0, 4.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
SLOT_BYTES = np.array([1000, 10_000])


def expected(resident: list[list[bool]], *chunks: int) -> float:
    return expected_bytes(chunks, HEAT, np.array(resident), SLOT_BYTES, 1)


def test_resident_experts_are_not_read() -> None:
    assert expected([[True] * 4] * 2, 512) == 0


def test_a_long_chunk_reads_everything_that_is_missing_once() -> None:
    assert expected([[True, True, True, False], [False] * 4], 5000) == pytest.approx(41_000)
    assert expected([[True, True, True, False], [False] * 4], 5000, 5000) == pytest.approx(82_000)


def test_one_token_reads_by_chance() -> None:
    """Layer 0: the hottest expert is missing, chosen with 0.9 * 1/2 + 0.1 * 1/4."""
    assert expected([[False, True, True, True], [True] * 4], 1) == pytest.approx(475)


def test_a_layer_without_any_heat_is_taken_to_be_even() -> None:
    heat = np.array([[-3.0, -1.0], [0.0, 0.0]])
    missing = np.zeros((2, 2), bool)
    assert expected_bytes([1], heat, missing, np.array([10, 100]), 1) == pytest.approx(110)
