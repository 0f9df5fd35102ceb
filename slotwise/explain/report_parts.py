"""The pieces the terminal reports are made of: headings, tables, bullets, sentences."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text


def heading(text: str) -> Text:
    return Text(text, style="bold")


def sentence(text: str, *, style: str = "") -> Text:
    return Text(text, style=style)


def plain_table(*columns: str) -> Table:
    """A table with one rule under its head; rich draws it in ASCII where it has to."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def bullets(texts: Sequence[str], *, style: str = "") -> list[RenderableType]:
    """One line each under a hanging dash; repeated texts once."""
    rows: list[RenderableType] = []
    for text in dict.fromkeys(texts):
        grid = Table.grid(padding=(0, 1))
        grid.add_row("-", Text(text, style=style))
        rows.append(Padding(grid, (0, 0, 0, 1), expand=False))
    return rows
