"""Figures that people misread: each gets the right reading, or the log is said not to tell.

The excerpts and both readings are in data/explain/misreads/MISREADS.md.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slotwise.explain.readers import read_files
from slotwise.explain.record import Life

DATA = Path(__file__).parents[1] / "data" / "explain" / "misreads"

NOT_A_LOG = {
    "m01": "a reporter's sentence about another server; its lines are in no dialect",
    "m03": "figures of an API quoted in prose",
    "m08": "a formula of a benchmark",
    "m12": "a Markdown table of a benchmark",
    "m13": "a Markdown table of a benchmark",
    "m15": "prose about a simulator",
    "m16": "prose about another server",
    "m17": "prose about a provider",
    "m22": "a table of kernel times",
    "m23": "prose about a device trace",
    "m29": "a sentence of a documentation change",
}


def says(life: Life, *words: str) -> bool:
    told = " ".join((*life.cannot_tell, *life.notes))
    return all(word in told for word in words)


def no_speed(life: Life) -> bool:
    return not life.requests and says(life, "prompt speed", "averages of an interval")


def queue(life: Life) -> bool:
    return not life.requests and says(life, "queue")


def old_metric(life: Life) -> bool:
    return says(life, "0.5.3", "wrong")


def previous_batch(life: Life) -> bool:
    return not life.requests and says(life, "previous batch", "do not average")


def step_rate(life: Life) -> bool:
    rate = life.facts["prefill_step_tokens_per_s"].value or 0.0
    return round(rate) == 33 and says(life, "one over the step's time")


def first_event(life: Life) -> bool:
    (request,) = life.requests
    buffered = any("buffered" in warning for warning in request.warnings)
    return request.ttft_ms.value == 312072 and request.prompt_ms.how == "missing" and buffered


def steps_of_ten(life: Life) -> bool:
    return no_speed(life) and says(life, "multi-step")


def ten_seconds(life: Life) -> bool:
    return no_speed(life) and life.facts["intervals_with_prompts"].value == 2


def one_or_none(life: Life) -> bool:
    return says(life, "1 prompt token means 1 or 0") and life.requests[0].prompt.value == 3


RIGHT: dict[str, Callable[[Life], bool]] = {
    "m04": queue,
    "m06": old_metric,
    "m07": previous_batch,
    "m11": step_rate,
    "m19": first_event,
    "m20": steps_of_ten,
    "m21": ten_seconds,
    "m28": one_or_none,
}
CASES = sorted(path for path in DATA.iterdir() if path.suffix in (".log", ".json"))


def test_every_case_is_here() -> None:
    assert {path.name[:3] for path in CASES} == RIGHT.keys() | NOT_A_LOG.keys()


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.name[:3])
def test_right_reading_or_said_that_it_cannot_be_told(path: Path) -> None:
    reading = read_files([path])
    check = RIGHT.get(path.name[:3])
    if check is None:
        assert reading.lives == ()
        assert any("no known dialect" in text for text in reading.unreadable)
        assert sum(reading.unknown.values()) == reading.lines
    else:
        (life,) = reading.lives
        assert check(life)
