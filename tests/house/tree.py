"""The source tree and the pages as data, for the tests of the house's own rules."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HOUSE = Path(__file__).parents[2]
PACKAGE = HOUSE / "slotwise"
Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def pages() -> list[Path]:
    """Every Markdown page of the repository."""
    return [*sorted(HOUSE.glob("*.md")), *sorted(HOUSE.glob("docs/**/*.md"))]


def in_package(path: Path) -> str:
    """`engine/prompt.py`"""
    return path.relative_to(PACKAGE).as_posix()


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def functions(path: Path) -> Iterator[tuple[str, Function]]:
    """(`Class.name` or `name`, node) of every function and method; nested ones by their name."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function):
                yield prefix + child.name, child
                yield from walk(child, "")
            elif isinstance(child, ast.ClassDef):
                yield from walk(child, f"{child.name}.")
            else:
                yield from walk(child, prefix)

    yield from walk(parsed(path), "")


@cache
def names() -> set[str]:
    """Everything the package defines: functions, classes, methods, fields and constants."""
    found: set[str] = set()
    for path in modules():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                found.add(node.name)
                found |= {f"{node.name}.{name}" for name in _members(node)}
        found |= {name for name, _ in functions(path)}
        found |= set(_members(parsed(path)))
    return found


def _members(node: ast.ClassDef | ast.Module) -> Iterator[str]:
    for child in node.body:
        if isinstance(child, Function | ast.ClassDef):
            yield child.name
        targets = child.targets if isinstance(child, ast.Assign) else [getattr(child, "target", 0)]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def lines(node: Function) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


@dataclass(frozen=True)
class Sizes:
    """Lines of the package's modules and functions, in ascending order."""

    modules: list[int]
    functions: list[int]

    def __str__(self) -> str:
        return (
            f"slotwise: {len(self.modules)} modules, {sum(self.modules):,} lines; "
            f"modules {_spread(self.modules)}; functions {_spread(self.functions)}"
        )


def package_sizes() -> Sizes:
    return Sizes(
        sorted(len(path.read_text().splitlines()) for path in modules()),
        sorted(lines(node) for path in modules() for _, node in functions(path)),
    )


def ninetieth(ordered: list[int]) -> int:
    """Nine in ten are no longer than this."""
    return ordered[len(ordered) * 9 // 10]


def _spread(ordered: list[int]) -> str:
    return f"median {ordered[len(ordered) // 2]}, p90 {ninetieth(ordered)}, longest {ordered[-1]}"


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(HOUSE)}:{self.line}"


def blocks(page: Path, language: str) -> list[Block]:
    text = page.read_text()
    return [
        Block(page, text[: found.start()].count("\n") + 1, language, found[1])
        for found in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    ]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
