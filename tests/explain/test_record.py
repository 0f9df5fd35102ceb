"""Values say how they are known; names are harmless; the JSON form is complete."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from slotwise.explain.record import SCHEMA, Life, Phase, Reading, Request, Value, safe_name


def test_a_bound_or_a_gap_is_never_a_number() -> None:
    assert Value.measured(3.0).known
    assert Value.derived(3.0, "a - b").known
    assert not Value.bounded(0.0, 5.0, "cut").known
    assert not Value.missing("off").known
    assert Value.missing("off").to_dict() == {"value": None, "how": "missing", "why": "off"}
    bound = Value.bounded(0.0, None, "cut").to_dict()
    assert bound == {"value": None, "how": "bounded", "low": 0.0, "high": None, "why": "cut"}


@pytest.mark.parametrize(
    "name",
    ["embed+steps", "gemm gate/up", "hc0 norm/down/up", "q8+kv-idx", "setup PLE rows", "read (x)"],
)
def test_phase_names_are_kept(name: str) -> None:
    assert safe_name(f" {name} ") == name


@pytest.mark.parametrize(
    "name",
    ["", "/etc/passwd", "C:\\models", "a/b/c/d", "x" * 33, "sk-abc123456", "Zürich", "a\x00b",
     "averyveryverylongword", "user@host", "${HOME}"],
)  # fmt: skip
def test_other_text_is_not(name: str) -> None:
    assert safe_name(name) is None


def test_every_field_is_in_the_json() -> None:
    gone = Value.missing("x")
    request = Request(
        index=0,
        lines=(1, 2),
        status="done",
        prompt=gone,
        reused=gone,
        read_planned=gone,
        read=gone,
        generated=gone,
        prompt_ms=gone,
        ttft_ms=gone,
        decode_ms=gone,
        slots_lent=gone,
        slots_refilled=gone,
        phases=(Phase("lend", Value.measured(1.0), tokens=3, slots=4, bytes=5, contains="c"),),
    )
    assert set(request.to_dict()) == {f.name for f in dataclasses.fields(Request)}
    assert set(request.phases[0].to_dict()) == {f.name for f in dataclasses.fields(Phase)}
    life = Life(dialect="strata", file="a.log", first_line=1, requests=(request,))
    assert set(life.to_dict()) == {f.name for f in dataclasses.fields(Life)}
    reading = Reading(lives=(life,)).to_dict()
    assert {f.name for f in dataclasses.fields(Reading)} <= set(reading)
    assert reading["schema"] == SCHEMA
    json.dumps(reading)


def test_the_readers_import_without_the_engine() -> None:
    code = (
        "import sys, slotwise.explain.readers.strata, slotwise.explain.join\n"
        "print([m for m in ('numpy', 'scipy', 'ggml', 'slotwise.engine') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
