"""The forecast of the time to the first token, against timings whose rule is known."""

from __future__ import annotations

import numpy as np
import pytest

from slotwise.engine.forecast import Forecaster, Read, expected_bytes
from slotwise.trace.ledger import LedgerRecord, PhaseRecord
from slotwise.trace.record import Forecast

MS = 1_000_000


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


def took(tokens: int, *, each: int = MS, wait: int = 0) -> LedgerRecord:
    """`each` ns of compute a token."""
    return ledger(
        lookup=MS,
        lend=1000 * tokens,
        read__attention=tokens * each // 2,
        read__expert_compute=tokens * each // 2,
        read__expert_wait=wait,
        first_window=20 * MS,
        sample=MS,
        emit=MS,
    )


def read(tokens: int) -> Read:
    return Read(tokens=tokens, chunk=4096)


def learnt(*costs: tuple[int, int]) -> Forecaster:
    """From reads of (tokens, ns a token)."""
    forecaster = Forecaster()
    for tokens, each in costs:
        forecaster.learn(read(tokens), took(tokens, each=each), missing_bytes=0, bytes_read=0)
    return forecaster


def foretold(forecaster: Forecaster, tokens: int, missing_bytes: float = 0) -> Forecast:
    return forecaster.forecast(read(tokens), so_far_ns=MS, missing_bytes=missing_bytes)


def test_without_an_earlier_request_there_is_none() -> None:
    assert foretold(learnt(), 512) == Forecast()
    assert set(vars(Forecast()).values()) == {None}


def test_a_prompt_of_a_known_size_takes_as_long_as_before() -> None:
    first = foretold(learnt((512, 2 * MS)), 512).time_to_first_token_ns
    assert first == pytest.approx(took(512, each=2 * MS).wall_ns)


def test_one_size_is_scaled_by_its_tokens() -> None:
    assert foretold(learnt((512, MS)), 256).read_compute_ns == pytest.approx(256 * MS)
    assert foretold(learnt((512, MS)), 2048).read_compute_ns == pytest.approx(2048 * MS)


def test_between_two_sizes_a_token_costs_something_between() -> None:
    forecaster = learnt((100, 4 * MS), (1600, MS))
    assert foretold(forecaster, 400).read_compute_ns == pytest.approx(400 * 2 * MS)
    assert foretold(forecaster, 50).read_compute_ns == pytest.approx(50 * 4 * MS)
    assert foretold(forecaster, 3200).read_compute_ns == pytest.approx(3200 * MS)


def test_of_one_size_the_newest_count() -> None:
    """A machine that became twice as slow is believed after two requests."""
    forecaster = learnt(*[(512, MS)] * 9, (500, 2 * MS))
    assert foretold(forecaster, 512).read_compute_ns == pytest.approx(512 * MS)
    forecaster.learn(read(500), took(500, each=2 * MS), missing_bytes=0, bytes_read=0)
    assert foretold(forecaster, 512).read_compute_ns == pytest.approx(512 * 2 * MS)


def test_the_first_request_is_forgotten_when_there_are_others() -> None:
    forecaster = learnt((75, 9 * MS), (512, MS), (2048, MS))
    assert foretold(forecaster, 75).read_compute_ns == pytest.approx(75 * 9 * MS)
    forecaster.learn(read(512), took(512), missing_bytes=0, bytes_read=0)
    assert foretold(forecaster, 75).read_compute_ns == pytest.approx(75 * MS)


def test_nothing_to_read_needs_only_what_comes_after() -> None:
    assert foretold(learnt((512, MS)), 0).time_to_first_token_ns == 23 * MS
    assert foretold(learnt((512, MS)), 0).read_bytes == 0


def test_waiting_goes_with_the_bytes_to_read() -> None:
    forecaster = Forecaster()
    forecaster.learn(read(512), took(512, wait=300), missing_bytes=1000.0, bytes_read=1000)
    assert foretold(forecaster, 512, missing_bytes=200.0).read_wait_ns == 60


def test_a_guess_of_the_bytes_is_corrected_by_what_was_read() -> None:
    forecaster = Forecaster()
    forecaster.learn(read(512), took(512), missing_bytes=100.0, bytes_read=80)
    assert foretold(forecaster, 512, missing_bytes=1000.0).read_bytes == 800


def test_chunks_of_a_read() -> None:
    assert Read(tokens=1100, chunk=512).chunks == [512, 512, 76]
    assert Read(tokens=1024, chunk=512).chunks == [512, 512]


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
