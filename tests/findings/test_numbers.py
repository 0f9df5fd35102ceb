"""Which digits of a text are numbers, and when two numbers are the same."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slotwise.findings.numbers import (
    Found,
    agrees,
    evaluate,
    numbers_in_text,
    stated_numbers,
    stated_value,
    unit_of_key,
)


def stated(text: str) -> list[tuple[str, str]]:
    return [(number.text, number.unit) for number in stated_numbers(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It took 12,532 ms.", [("12,532", "ms")]),
        ("at 7 to 9 ms (7,410 tokens: wall 12,532, after-chunk 9; 7,412: 10,285, 7)",
         [("7", ""), ("9", "ms"), ("7,410", "tokens"), ("12,532", ""), ("9", ""), ("7,412", ""),
          ("10,285", ""), ("7", "")]),
        ("109 ms + 0.706 ms/token", [("109", "ms"), ("0.706", "ms/token")]),
        ("about 12s, 22%, 1.2e3 us", [("12", "s"), ("22", "%"), ("1.2e3", "us")]),
        ("by 148 / 207/234 ms", [("148", ""), ("207", ""), ("234", "ms")]),
        ("48 x 512 and 48x256", [("48", ""), ("512", ""), ("48", ""), ("256", "")]),
        ("7-9 ms, 3–4 s", [("7", ""), ("9", "ms"), ("3", ""), ("4", "s")]),
        ("12ms-15ms, 1s–2s, 10%-20%, 10× that", [
            ("12", "ms"), ("15", "ms"), ("1", "s"), ("2", "s"), ("10", "%"), ("20", "%"),
            ("10", ""),
        ]),
        ("changed by -3.5 % (−2)", [("-3.5", "%"), ("−2", "")]),
        ("n=5, x: 1,2,3 at 1.6k tokens", [("5", ""), ("1", ""), ("2", ""), ("3", ""),
                                          ("1.6k", "tokens")]),
        ("a 30-layer model, 2-bit", [("30", ""), ("2", "")]),
        ("~$5, **17** and `42`.", [("5", ""), ("17", ""), ("42", "")]),
        ("FP16, Q8_0, IQ1_M, 0.1.41, v2, 2026-07-31, the 3rd, sm_80", []),
        ("as in `src/a.cpp:10-20` and `b.py:7`", []),
        ("a share of .5", [(".5", "")]),
        ("12'532 ms", [("12'532", "")]),
        ("no numbers; two arms", []),
    ],
)  # fmt: skip
def test_numbers_of_a_statement(text: str, expected: list[tuple[str, str]]) -> None:
    assert stated(text) == expected


@pytest.mark.parametrize(
    ("text", "value", "unit", "same"),
    [
        ("12 s", 11_976, "ms", True),
        ("12.0 s", 11_976, "ms", True),
        ("11.9 s", 11_976, "ms", False),
        ("12 s", 12_532, "ms", False),
        ("12 s", 12, "tokens", False),
        ("12 s", 12, "", True),
        ("12,532", 12_532.4, "ms", True),
        ("12,532", 12_532.6, "ms", False),
        ("0.32 ms", 319_000, "ns", True),
        ("1.5 GiB", 1_592_524_800, "bytes", True),
        ("1.5 GB", 1_592_524_800, "bytes", False),
        ("1.6k", 1_609, "", True),
        ("25 %", 0.25, "ratio", True),
        ("3 ms less", -3, "ms", True),
        ("-3 ms", 3, "ms", False),
        ("7", 70, "", False),
    ],
)
def test_when_numbers_agree(text: str, value: float, unit: str, same: bool) -> None:
    (number,) = stated_numbers(text)
    assert agrees(number, Found(value, unit, "")) is same


def test_powers_beyond_a_float_are_survived() -> None:
    for text in ("1e999 ms", ".1e-999", "-9e300k"):
        (number,) = stated_numbers(text)
        assert not agrees(number, Found(1.0, "", ""))


def test_what_cannot_be_read_agrees_with_nothing() -> None:
    (number,) = stated_numbers("12'532 ms")
    assert not agrees(number, Found(12_532, "ms", ""))


def test_numbers_of_a_log_line() -> None:
    line = "lent 225 slots in 0.9ms, slot12 v0.1.41 1,371 a=-5 252,432"
    found = [(n.value, n.unit) for n in numbers_in_text(line, "")]
    assert found[:2] == [(225, "slots"), (0.9, "ms")]
    assert {value for value, _ in found[2:]} == {1371, 1, 371, -5, 252_432, 252, 432}


def test_what_was_seen_is_left_out() -> None:
    seen: set[object] = set()
    lines = ("a 1 ms", "b 1 ms 1", "c 1")
    found = [(n.value, n.unit, n.place) for at in lines for n in numbers_in_text(at, at, seen=seen)]
    assert found == [(1, "ms", "a 1 ms"), (1, "", "b 1 ms 1")]


@pytest.mark.parametrize(
    ("key", "unit"),
    [("wall_ms", "ms"), ("ns", "ns"), ("bytes", "bytes"), ("size_mib", "MiB"),
     ("prompt_tokens", "tokens"), ("tok_s", ""), ("tokens_per_s", ""), ("name", "")],
)  # fmt: skip
def test_a_key_names_its_unit(key: str, unit: str) -> None:
    assert unit_of_key(key) == unit


def test_formulas() -> None:
    assert evaluate("71.7 / 225")[0] == pytest.approx(0.31867, abs=1e-5)
    assert evaluate("-(1,245 - 252) * 2") == (-1986, ["1245", "252", "2"])
    assert evaluate("0.1 + 0.2")[0] == 0.3


@pytest.mark.parametrize(
    "formula", ["", "1 / 0", "2 ** 9", "f(1)", "a + 1", "1 +", "True", "'x'", "1" * 300, "1j",
                "(" * 150, "1e999999 * 1e999999", "\0"],
)  # fmt: skip
def test_what_is_no_formula(formula: str) -> None:
    with pytest.raises(ValueError):
        evaluate(formula)


@settings(deadline=None)
@given(st.text() | st.text(alphabet="0123456789.,-+eEkx×/ %ms_:`()"))
def test_any_text_is_survived(text: str) -> None:
    for number in stated_numbers(text):
        agrees(number, Found(1.0, "ms", ""))
    list(numbers_in_text(text, ""))
    with suppress(ValueError):
        evaluate(text)


@settings(deadline=None)
@given(st.integers(0, 10**12), st.integers(0, 3))
def test_a_written_number_agrees_with_its_value(value: int, decimals: int) -> None:
    scaled = value / 10**decimals
    (number,) = stated_numbers(f"about {scaled:,.{decimals}f} ms")
    assert agrees(number, Found(scaled, "ms", ""))
    assert not agrees(number, Found(scaled + 2.0 * 10**-decimals + 1e-8 * scaled, "ms", ""))
    assert agrees(stated_value(scaled, "ms"), Found(scaled / 1000, "s", ""))
