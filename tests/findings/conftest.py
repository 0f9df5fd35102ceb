"""Makes `house` importable, and gives the tests a git checkout whose revision never changes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

FIXED = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "test"), ("EMAIL", "test@example.invalid"))
} | {
    "GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z",
    "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
}


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *arguments],
        env={**os.environ, **FIXED}, check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip


def commit(folder: Path, files: dict[str, bytes]) -> str:
    """A checkout with one commit that holds `files`; its revision."""
    folder.mkdir(parents=True)
    git(folder, "init", "-q", "-b", "main", "--object-format=sha1")
    git(folder, "config", "core.autocrlf", "false")
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "files")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def checkout(tmp_path: Path) -> Callable[[dict[str, bytes]], tuple[Path, str]]:
    def make(files: dict[str, bytes]) -> tuple[Path, str]:
        return tmp_path / "engine", commit(tmp_path / "engine", files)

    return make
