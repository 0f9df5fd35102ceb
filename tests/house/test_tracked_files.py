"""What is in the repository holds on every machine, and is small."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from house.tree import HOUSE

LOCAL = re.compile(
    r"/(work|farm|root|home)/|/opt/[a-z]|pypi\.or[g]|python[h]osted|registry\.npmj[s]|deb\.debia[n]"
)
LARGEST = 2_000_000
PUBLIC_LOGS = "tests/data/explain/"
"""Copies of logs that others published, and tests that write logs like them, hold the paths of
others' machines."""
STRICT = re.compile(
    r"/(work|farm|root)/|pypi\.or[g]|python[h]osted|registry\.npmj[s]|deb\.debia[n]"
)


def tracked() -> list[Path]:
    if not (HOUSE / ".git").exists():
        pytest.skip("not a clone")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=HOUSE, capture_output=True, text=True, check=True
    ).stdout
    return [HOUSE / name for name in listed.split("\0") if name and (HOUSE / name).is_file()]


def local_places(text: str, pattern: re.Pattern[str] = LOCAL) -> list[str]:
    return [line.strip()[:120] for line in text.splitlines() if pattern.search(line)]


def pattern_for(name: str) -> re.Pattern[str]:
    return STRICT if name.startswith((PUBLIC_LOGS, "tests/explain/")) else LOCAL


def test_no_machine_s_paths_and_no_registry_hosts() -> None:
    named = {path.relative_to(HOUSE).as_posix(): path for path in tracked()}
    found = {
        name: places
        for name, path in named.items()
        if (places := local_places(path.read_text(errors="ignore"), pattern_for(name)))
    }
    assert found == {}


def test_files_are_small() -> None:
    assert [path.name for path in tracked() if path.stat().st_size > LARGEST] == []


@pytest.mark.parametrize("line", ["cd /ro" + "ot/x", "https://pypi" + ".org/simple"])
def test_a_local_place_is_noticed(line: str) -> None:
    assert local_places(f"fine\n{line}\n") == [line]
