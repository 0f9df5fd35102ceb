"""A running server over the small talking model, and what the tests ask it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from house.talking_model import write_talking_model
from serve.served import Served, serving


@pytest.fixture(scope="session")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_talking_model(tmp_path_factory.mktemp("served") / "talking.gguf")


@pytest.fixture(scope="module")
def served(talking: Path) -> Iterator[Served]:
    """One server for the tests of a module that leave it as it was."""
    with serving(talking) as running:
        yield running


@pytest.fixture
def serve(talking: Path) -> Callable[..., object]:
    """`with serve(queue=1) as served`: a server of a test's own."""
    return lambda **chosen: serving(talking, **chosen)
