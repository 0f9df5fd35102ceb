"""Profiles round-trip, and nothing but a profile is taken for one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from experts.fakes import ids, make_layout
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slotwise.errors import Refused, SlotwiseError
from slotwise.experts import Profile, ProfileRecorder, load_profile, profile_findings, save_profile
from slotwise.experts.profile import MAX_BYTES, MAX_COUNT

LAYOUT = make_layout(layers=2, experts=3)
GOOD: dict[str, Any] = {
    "schema": "slotwise.profile/v1",
    "model": {"name": "tiny.gguf", "digest": "abc"},
    "layers": 2,
    "experts": 3,
    "counts": [[1, 0, 5], [0, 2, MAX_COUNT]],
}
SAME_FOLDER = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "p.json"


def refusal_of(path: Path) -> str:
    with pytest.raises(Refused) as caught:
        load_profile(path)
    (finding,) = caught.value.findings
    assert finding.where == str(path)
    assert finding.expected
    assert finding.next_step
    return f"{finding.code}: {finding.found}"


def test_a_recorded_profile_survives_the_file(path: Path) -> None:
    recorder = ProfileRecorder(LAYOUT)
    recorder.add(0, ids(0, 2, 2))
    recorder.add(1, np.array([[1, 1], [0, 1]]))
    recorder.add(0, ids())
    saved = recorder.profile(model_name="tiny.gguf", model_digest="abc")
    recorder.add(0, ids(1))
    save_profile(path, saved)
    loaded = load_profile(path)
    assert loaded.counts.tolist() == [[1, 0, 2], [1, 3, 0]]
    assert (loaded, loaded.shape) == (saved, (2, 3))
    assert json.loads(path.read_text())["schema"] == "slotwise.profile/v1"
    assert profile_findings(path, LAYOUT, "abc") == []


def test_a_large_profile_is_a_small_file(path: Path) -> None:
    counts = np.full((48, 512), 1_000_000, np.int64)
    save_profile(path, Profile(counts=counts, model_name="m", model_digest="d"))
    assert path.stat().st_size < 250_000
    assert load_profile(path).counts.tolist() == counts.tolist()


def test_a_profile_that_cannot_be_written_leaves_the_old_one(path: Path) -> None:
    path.mkdir()
    with pytest.raises(SlotwiseError, match="cannot be written"):
        save_profile(
            path, Profile(counts=np.zeros((1, 1), np.int64), model_name="", model_digest="")
        )
    assert path.is_dir()


def test_another_shape_is_refused_and_both_are_named(path: Path) -> None:
    path.write_text(json.dumps(GOOD))
    (finding,) = profile_findings(path, make_layout(layers=48, experts=512), "abc")
    assert (finding.level, finding.code) == ("refusal", "profile-shape")
    assert "2 layers x 3 experts" in finding.found
    assert "48 layers x 512 experts" in finding.expected


def test_another_model_of_the_same_shape_is_a_warning(path: Path) -> None:
    path.write_text(json.dumps(GOOD))
    (finding,) = profile_findings(path, LAYOUT, "another")
    assert (finding.level, finding.code) == ("warning", "profile-other-model")
    assert "'tiny.gguf'" in finding.found


def test_findings_of_a_file_that_is_no_profile(path: Path) -> None:
    (finding,) = profile_findings(path, LAYOUT, "abc")
    assert (finding.level, finding.code) == ("refusal", "profile-unreadable")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"schema": "slotwise.profile/v2"}, "profile-schema: has the schema 'slotwise.profile/v2'"),
        ({"model": None}, "profile-model"),
        ({"model": {"name": "x"}}, "profile-model"),
        ({"layers": True}, "profile-shape: says 'True' layers x '3' experts"),
        ({"layers": 3}, "profile-counts: has 2 rows"),
        ({"experts": -3}, "profile-shape"),
        ({"experts": 4}, "profile-counts: has 3 counts in row 0"),
        ({"counts": {}}, "profile-counts: has no list of counts"),
        ({"counts": [[1, 2, 3], 5]}, "profile-counts: has no list in row 1"),
        ({"counts": [[1, 2, 3], [1, 2.5, 3]]}, "profile-counts: has '2.5' in row 1, expert 1"),
        ({"counts": [[1, 2, 3], [1, True, 3]]}, "profile-counts: has 'True' in row 1, expert 1"),
        ({"counts": [[1, 2, 3], [1, -1, 3]]}, "profile-counts: has '-1' in row 1, expert 1"),
        ({"counts": [[1, 2, 3], [1, 2**53 + 1, 3]]}, "profile-counts: has '9007199254740993'"),
    ],
)
def test_what_is_wrong_is_named(path: Path, change: dict[str, Any], expected: str) -> None:
    path.write_text(json.dumps(GOOD | change))
    assert refusal_of(path).startswith(expected)


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"", "profile-not-json"),
        (b"\xff\xfe\x00", "profile-not-json"),
        (b"[" * 200_000, "profile-not-json"),
        (b"1" * 10_000, "profile-not-json"),
        (b"[]", "profile-schema"),
        (b" " * (MAX_BYTES + 1), "profile-too-big"),
    ],
)
def test_bytes_that_are_no_profile(path: Path, raw: bytes, code: str) -> None:
    path.write_bytes(raw)
    assert refusal_of(path).startswith(code)


def test_paths_that_are_no_file(path: Path) -> None:
    assert refusal_of(path).startswith("profile-unreadable")
    assert refusal_of(path.parent).startswith("profile-unreadable")
    assert refusal_of(Path("a\0b")).startswith("profile-unreadable")


@SAME_FOLDER
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_with_a_finding(path: Path, raw: bytes) -> None:
    path.write_bytes(raw)
    assert refusal_of(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


def loaded_or_refused(path: Path) -> bool:
    try:
        profile = load_profile(path)
    except Refused as refused:
        return bool(str(refused))
    return profile.counts.shape == profile.shape and bool((profile.counts >= 0).all())


@SAME_FOLDER
@given(key=st.sampled_from(list(GOOD)), value=JSON)
def test_any_value_in_any_place_is_loaded_or_refused(path: Path, key: str, value: Any) -> None:
    path.write_text(json.dumps(GOOD | {key: value}))
    assert loaded_or_refused(path)


@SAME_FOLDER
@given(at=st.integers(0, 150), byte=st.integers(0, 255))
def test_a_damaged_byte_is_loaded_or_refused(path: Path, at: int, byte: int) -> None:
    raw = bytearray(json.dumps(GOOD).encode())
    raw[at % len(raw)] = byte
    path.write_bytes(raw)
    assert loaded_or_refused(path)
