"""docs/dependencies.md names every pinned package, with its version, and nothing else."""

from __future__ import annotations

import re
import tomllib

from house.tree import HOUSE


def pinned() -> set[tuple[str, str]]:
    pyproject = tomllib.loads((HOUSE / "pyproject.toml").read_text())
    project = pyproject["project"]
    groups = [
        pyproject["build-system"]["requires"],
        project["dependencies"],
        *project["optional-dependencies"].values(),
        re.findall(r"[\w-]+==[\w.]+", (HOUSE / "Makefile").read_text()),
    ]
    return {tuple(package.split("==")) for group in groups for package in group}


def test_the_page_lists_what_is_pinned() -> None:
    page = (HOUSE / "docs" / "dependencies.md").read_text()
    assert set(re.findall(r"^\| ([\w-]+) (\d[\w.]*)", page, re.MULTILINE)) == pinned()
