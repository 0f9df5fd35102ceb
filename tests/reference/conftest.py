"""Makes this folder importable as `reference`, and shares its models between the tests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from reference.tiny import TinyModel, build


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """`tiny(name)` builds the F32 model of an architecture once per test session."""
    folder = tmp_path_factory.mktemp("tiny")
    built: dict[str, TinyModel] = {}

    def get(name: str) -> TinyModel:
        if name not in built:
            built[name] = build(name, folder)
        return built[name]

    return get
