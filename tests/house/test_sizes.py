"""Functions of at most 60 lines, nine in ten of at most 40; modules of at most 600."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from house.tree import Function, functions, in_package, lines, modules, ninetieth, package_sizes

FUNCTION_LINES, USUAL_FUNCTION_LINES, MODULE_LINES = 60, 40, 600


@pytest.mark.parametrize("path", modules(), ids=in_package)
def test_nothing_is_too_long(path: Path) -> None:
    long = {name: lines(node) for name, node in functions(path) if lines(node) > FUNCTION_LINES}
    assert long == {}
    assert len(path.read_text().splitlines()) <= MODULE_LINES


def test_most_functions_are_short() -> None:
    assert ninetieth(package_sizes().functions) <= USUAL_FUNCTION_LINES


def test_lines_are_counted_from_the_name_to_the_end() -> None:
    source = "@decorated\ndef f(\n    x,\n):\n    def inner(): ...\n    return x\n"
    (node,) = (n for n in ast.parse(source).body if isinstance(n, Function))
    assert lines(node) == 5
