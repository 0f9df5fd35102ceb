"""Emptying the page cache of files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slotwise.bench.cold import cached_bytes, drop

SIZE = 1 << 20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """On disk, and in the page cache."""
    path = tmp_path / "file"
    with path.open("wb") as out:
        out.write(b"x" * SIZE)
        out.flush()
        os.fsync(out.fileno())
    path.read_bytes()
    if cached_bytes(path) != SIZE:
        pytest.skip("this file system does not tell what is in the page cache")
    return path


def test_a_file_just_read_is_cached_and_then_is_not(file: Path, tmp_path: Path) -> None:
    found = drop([file], switch=tmp_path / "no such folder/switch")
    if found.cached_bytes:
        pytest.skip("this file system keeps its pages whatever is advised")
    assert found.how == "posix_fadvise"
    assert cached_bytes(file) == 0


def test_an_empty_file_has_nothing_cached(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert cached_bytes(tmp_path / "empty") == 0
    assert drop([tmp_path / "empty"]).cached_bytes == 0


def test_what_stays_is_dropped_with_the_switch_where_we_may(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slotwise.bench.cold._advise", lambda path: None)
    switch = tmp_path / "switch"
    switch.write_text("0")
    found = drop([file], switch=switch)
    assert switch.read_text() == "1"
    assert found.how == "posix_fadvise and drop_caches"
    assert found.cached_bytes == SIZE  # the switch is a plain file: it is said that they are there
    left = drop([file], switch=tmp_path / "no such folder/switch")
    assert (left.how, left.cached_bytes) == ("posix_fadvise", SIZE)
