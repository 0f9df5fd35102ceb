"""Links between pages lead somewhere, and what pages say about the code is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from house.tree import HOUSE, PACKAGE, in_package, modules, names, pages, prose

WEB = ("http://", "https://")
CODE_SPAN = re.compile(r"`([^`\n]+)`")


def page_id(page: Path) -> str:
    return page.relative_to(HOUSE).as_posix()


def anchors(page: Path) -> set[str]:
    """As GitHub makes them from headings."""
    headings = re.findall(r"^#+ +(.+)$", prose(page), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in kept}


def broken_links(page: Path, text: str) -> list[str]:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(WEB):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        if not linked.exists() or (anchor and anchor not in anchors(linked)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", pages(), ids=page_id)
def test_links_resolve(page: Path) -> None:
    assert broken_links(page, prose(page)) == []


def test_a_broken_link_is_noticed() -> None:
    page = HOUSE / "README.md"
    assert broken_links(page, "[a](docs/none.md) [b](#no-such-heading)") == [
        "docs/none.md",
        "#no-such-heading",
    ]


def file_exists(name: str) -> bool:
    return any((root / name).is_file() for root in (HOUSE, PACKAGE)) or any(
        path.name == name for path in modules()
    )


@pytest.mark.parametrize("page", pages(), ids=page_id)
def test_python_files_that_a_page_names_exist(page: Path) -> None:
    spans = CODE_SPAN.findall(prose(page))
    named = [span for span in spans if re.fullmatch(r"[\w/]+\.py", span)]
    assert [name for name in named if not file_exists(name)] == []


@pytest.mark.parametrize("page", pages(), ids=page_id)
def test_names_that_a_page_takes_from_the_code_exist(page: Path) -> None:
    """Spans like `Pool.make_room` and `widen_q2_0()`."""
    defined = names()
    classes = {name for name in defined if name.lstrip("_")[0].isupper()}
    spans = [span.removesuffix("()") for span in CODE_SPAN.findall(prose(page)) if span[-1] != "."]
    dotted = [s for s in spans if re.fullmatch(r"\w+\.\w+", s) and s.split(".")[0] in classes]
    called = re.findall(r"`([A-Za-z_][\w.]*)\(\)`", prose(page))
    assert [name for name in [*dotted, *called] if name not in defined] == []


def test_the_map_of_the_house_has_every_module() -> None:
    """By its own row, or by its folder's."""
    page = (HOUSE / "CONTRIBUTING.md").read_text()
    house_map = page.partition("## The map of the house")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `([\w/]+(?:\.py|/))` \| \S", house_map, re.MULTILINE)
    present = [in_package(path) for path in modules() if path.name != "__init__.py"]
    folders = tuple(name for name in listed if name.endswith("/"))
    assert [m for m in present if m not in listed and not m.startswith(folders)] == []
    assert [name for name in listed if not (PACKAGE / name).exists()] == []
