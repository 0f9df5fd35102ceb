"""Makes the helper files of the test folders importable, and shares one backend."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from slotwise.kernels.backend import Backend

sys.path.insert(0, str(Path(__file__).parents[1]))

# A busy machine may be slow; no test here depends on time.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture(scope="session")
def backend() -> Iterator[Backend]:
    """One thread: two on a busy machine wait for each other."""
    backend = Backend(1)
    yield backend
    backend.close()
