"""Imports point downwards only, and only `kernels/` sees ggml.

The table says for every room what it may import: other rooms, then libraries. The modules beside
the rooms (errors, outputs, sizes, the version) are open to all; the command line may import every
room.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from house.tree import in_package, modules, parsed

OPEN = {"errors", "outputs", "sizes", "__version__"}
TRACE = {"trace"}
BELOW_ENGINE = {"experts", "kernels", "models", "trace", "weights"}

ROOMS: dict[str, tuple[set[str], set[str]]] = {
    "weights": (set(), {"gguf", "jinja2", "numpy", "tokenizers", "zlib_ng"}),
    "kernels": (set(), {"ggml", "numpy", "threadpoolctl"}),
    "trace": (set(), {"rich"}),
    "models": ({"kernels"}, {"numpy"}),
    "experts": ({"weights"}, {"numpy"}),
    "engine": (BELOW_ENGINE, {"numpy", "rich"}),
    "demo": ({"engine", "trace", "weights"}, {"gguf", "numpy", "rich"}),
    "explain": (TRACE, {"click", "jinja2", "numpy", "rich", "scipy"}),
    "findings": (TRACE, {"click"}),
    "ladder": (TRACE | {"explain", "findings"}, {"click", "httpcore2", "jinja2", "rich"}),
    "bench": (BELOW_ENGINE | {"engine", "explain"}, {"click", "numpy", "rich", "scipy"}),
    "serve": (
        BELOW_ENGINE | {"engine"},
        {"h11", "prometheus_client", "pydantic", "pydantic_core", "starlette", "uvicorn"},
    ),
}
KIT = ("trace", "explain", "findings", "ladder")
"""Runs where there is no ggml."""

DOORS = {"cli", "cli_support"}
DOOR_LIBRARIES = {"click", "rich"}


def room_of(path: Path) -> str:
    first, *rest = in_package(path).split("/")
    return first if rest else path.stem


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, full name) of everything a module imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.level or node.module == "slotwise":
                prefix = "slotwise" if node.module == "slotwise" else f"relative.{node.module}"
                yield from ((node.lineno, f"{prefix}.{name.name}") for name in node.names)
            else:
                yield node.lineno, node.module


def offences(room: str, tree: ast.Module) -> list[str]:
    """Imports that `room` must not have."""
    rooms, libraries = ROOMS.get(room, (set(), set()))
    if room in DOORS:
        rooms, libraries = {*ROOMS, *DOORS}, DOOR_LIBRARIES
    allowed = rooms | OPEN | {room}
    wrong = []
    for line, name in imported(tree):
        first, *rest = name.split(".")
        ours = first == "slotwise" and bool(rest)
        if ours and rest[0] in allowed:
            continue
        if not ours and (first in libraries or first in sys.stdlib_module_names):
            continue
        wrong.append(f"line {line}: {room} must not import {name}")
    return wrong


@pytest.mark.parametrize("path", modules(), ids=in_package)
def test_a_room_imports_only_what_it_may(path: Path) -> None:
    assert offences(room_of(path), parsed(path)) == []


def test_every_room_is_in_the_table() -> None:
    rooms = {room_of(path) for path in modules() if "/" in in_package(path)}
    assert rooms <= set(ROOMS)


def test_the_table_has_no_circle_and_keeps_the_kit_free_of_the_engine() -> None:
    def below(room: str) -> set[str]:
        rooms = ROOMS[room][0]
        return rooms.union(*(below(other) for other in rooms))

    for room in ROOMS:  # a circle would end in a RecursionError
        assert room not in below(room)
    for room in KIT:
        assert not below(room) & {"engine", "kernels", "models"}
    assert [room for room, (_, libraries) in ROOMS.items() if "ggml" in libraries] == ["kernels"]


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("models", "import ggml"),
        ("experts", "def f():\n    from slotwise.kernels.backend import Buffer"),
        ("weights", "from slotwise import experts"),
        ("trace", "import numpy as np"),
        ("explain", "import slotwise.engine.engine"),
        ("engine", "from slotwise.cli import main"),
        ("engine", "from .cli import main"),
    ],
)
def test_an_import_upwards_is_noticed(room: str, source: str) -> None:
    assert len(offences(room, ast.parse(source))) == 1
