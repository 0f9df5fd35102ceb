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


def tracked() -> list[Path]:
    if not (HOUSE / ".git").exists():
        pytest.skip("not a clone")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=HOUSE, capture_output=True, text=True, check=True
    ).stdout
    return [HOUSE / name for name in listed.split("\0") if name and (HOUSE / name).is_file()]


def local_places(text: str) -> list[str]:
    return [line.strip()[:120] for line in text.splitlines() if LOCAL.search(line)]


def test_no_machine_s_paths_and_no_registry_hosts() -> None:
    found = {
        path.relative_to(HOUSE).as_posix(): places
        for path in tracked()
        if (places := local_places(path.read_text(errors="ignore")))
    }
    assert found == {}


def test_files_are_small() -> None:
    assert [path.name for path in tracked() if path.stat().st_size > LARGEST] == []


@pytest.mark.parametrize("line", ["cd /ro" + "ot/x", "https://pypi" + ".org/simple"])
def test_a_local_place_is_noticed(line: str) -> None:
    assert local_places(f"fine\n{line}\n") == [line]
