"""Makes the helper files of the test folders importable, as `engine.models` for example."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parents[1]))

from engine.rig import Small, make
from house.talking_model import write_talking_model

# A busy machine may be slow; no test here depends on time.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Small]:
    """`small(kind)` writes one of the small models once per test session."""
    made: dict[str, Small] = {}

    def get(kind: str) -> Small:
        if kind not in made:
            made[kind] = make(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return get


@pytest.fixture(scope="session")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that can be talked to, in a folder whose name no trace may hold."""
    return write_talking_model(tmp_path_factory.mktemp("Secretfolder") / "talking.gguf")
