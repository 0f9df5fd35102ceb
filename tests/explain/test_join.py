"""Pairing with benchmark rows: by counts and order, checked, with what stayed alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slotwise.errors import SlotwiseError
from slotwise.explain.join import Row, join, read_rows, row_of
from slotwise.explain.readers.strata import StrataReader
from slotwise.explain.record import Request


def requests(*sizes: tuple[int, int, float]) -> tuple[Request, ...]:
    """Requests of (prompt, reused, prompt_ms)."""
    reader = StrataReader("engine.log")
    for number, (prompt, reused, ms) in enumerate(sizes, 1):
        reader.feed(
            number,
            f"strata serve: prompt {prompt} tokens = {reused} reused + {prompt - reused} read in "
            f"{ms:.0f} ms (1.0 tok/s), 8 generated in 100 ms (80.0 tok/s)",
        )
    (life,) = reader.finish()
    return life.requests


def rows(*fields: dict[str, Any]) -> list[Row]:
    return [row_of(row, i) for i, row in enumerate(fields)]


def test_rows_are_paired_past_what_is_missing_on_either_side() -> None:
    log = requests((19, 0, 400), (100, 0, 500), (200, 0, 600), (100, 90, 60))
    bench = rows(
        {"prompt_tokens": 100, "cached_tokens": 0, "ttft_ms": 540.0},
        {"prompt_tokens": 150, "cached_tokens": 0, "ttft_ms": 550.0},
        {"prompt_tokens": 200, "cached_tokens": 0, "ttft_ms": 640.0},
        {"prompt_tokens": 100, "cached_tokens": 90, "ttft_ms": 85.0},
    )
    joined = join(log, bench)
    assert joined.pairs == ((1, 0), (2, 2), (3, 3))
    assert joined.unpaired_requests == (0,)
    assert joined.unpaired_rows == (1,)
    assert joined.requests[1].ttft_ms.value == 540
    assert joined.requests[1].ttft_ms.how == "measured"
    assert joined.requests[1].facts["outside prompt_ms"].value == 40
    assert joined.requests[0].ttft_ms.value is None
    assert "same order" in joined.method
    assert not joined.warnings


def test_equal_counts_out_of_order_are_not_paired_twice() -> None:
    log = requests((100, 0, 500), (100, 0, 510))
    joined = join(log, rows({"prompt_tokens": 100, "ttft_ms": 700.0}))
    assert joined.pairs == ((0, 0),)
    assert joined.unpaired_requests == (1,)


def test_another_cached_count_is_not_a_pair() -> None:
    joined = join(
        requests((100, 0, 500)), rows({"prompt_tokens": 100, "cached_tokens": 90, "ttft_ms": 600})
    )
    assert joined.pairs == ()
    assert joined.unpaired_rows == (0,)


def test_times_that_contradict_are_a_warning() -> None:
    log = requests((100, 0, 500), (200, 0, 800))
    joined = join(
        log,
        rows(
            {"prompt_tokens": 100, "ttft_ms": 300.0},
            {"prompt_tokens": 200, "server_prompt_ms": 900.0, "ttft_ms": 950.0},
        ),
    )
    assert len(joined.pairs) == 2
    assert len(joined.warnings) == 2
    assert all("may be wrong" in warning for warning in joined.warnings)


@pytest.mark.parametrize(
    "fields",
    [
        {"reused_tokens": 161, "read_tokens": 5, "prompt_ms": 61.4, "ttft_s": 0.083},
        {"timings": {"cache_n": 161, "prompt_n": 5, "prompt_ms": 61.4}, "ttft_seconds": 0.083},
        {"usage": {"prompt_tokens": 166}, "cached": 161, "ttft": 0.083, "server_prompt_ms": 61.4},
        {"prompt_tokens": 166, "cached": 161, "ttft": 83.0, "server_prompt_ms": 61.4},
    ],
)
def test_common_names_are_understood(fields: dict[str, Any]) -> None:
    row = row_of(fields, 0)
    assert (row.prompt, row.cached, row.read) == (166, 161, 5)
    assert row.ttft_ms == pytest.approx(83.0)
    assert row.prompt_ms == 61.4


def test_rows_are_found_at_any_depth_and_in_json_lines(tmp_path: Path) -> None:
    row = {"prompt_tokens": 100, "ttft_ms": 5.0, "answer": "secret"}
    nested, lines = tmp_path / "a.json", tmp_path / "b.jsonl"
    nested.write_text(json.dumps({"runs": {"0": [{"turns": [row, row]}]}, "note": [1]}))
    lines.write_text("\n".join(json.dumps(row) for _ in range(3)) + "\n")
    assert len(read_rows(nested)) == 2
    assert len(read_rows(lines)) == 3
    assert "secret" not in str(read_rows(nested))


@pytest.mark.parametrize("text", ["", "{}", "[1, 2", "[" * 100_000, '{"prompt_tokens": true}'])
def test_a_file_without_rows_is_an_error_with_a_next_step(tmp_path: Path, text: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(SlotwiseError) as caught:
        read_rows(path)
    assert "results.json" in str(caught.value)
    assert caught.value.next_step
