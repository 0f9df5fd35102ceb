"""A tiny model to measure, and real control groups where they can be made."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from house.talking_model import write_talking_model

from slotwise.bench.cgroup import NoGroup, memory_group

LITTLE = 64 << 20


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_talking_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="session")
def real_groups() -> None:
    """Skips, with the reason, where no memory control group can be made."""
    try:
        with memory_group(LITTLE):
            pass
    except NoGroup as error:
        pytest.skip(str(error))
