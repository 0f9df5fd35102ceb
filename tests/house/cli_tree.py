"""The command line's verbs and options as data; run as a program it writes the options table.

`python tests/house/cli_tree.py` writes the table in docs/usage.md again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click

PAGE = Path(__file__).parents[2] / "docs" / "usage.md"
BEGIN, END = "<!-- options: begin -->", "<!-- options: end -->"


@dataclass(frozen=True)
class Verb:
    """A command and the words that call it; the app itself has none."""

    path: tuple[str, ...]
    command: click.Command

    def __str__(self) -> str:
        return " ".join(self.path)


def commands() -> list[Verb]:
    from slotwise.cli import app

    def walk(path: tuple[str, ...], command: click.Command) -> Iterator[Verb]:
        yield Verb(path, command)
        if isinstance(command, click.Group):
            for name, inner in command.commands.items():
                yield from walk((*path, name), inner)

    return list(walk((), app))


def verbs() -> list[Verb]:
    """The commands that do something."""
    return [c for c in commands() if not isinstance(c.command, click.Group)]


@dataclass
class Row:
    """One option as the table shows it, and the verbs that have it so."""

    names: str
    default: str
    help: str
    verbs: list[str] = field(default_factory=list)


def options(verb: Verb) -> Iterator[Row]:
    for option in verb.command.params:
        if isinstance(option, click.Option):
            text, shown = option.help or "", _default(option)
            if "  [default: " in text:
                text, _, shown = text.removesuffix("]").partition("  [default: ")
            names = f"`{'`, `'.join(option.opts)}`"
            if isinstance(option.type, click.Choice):
                text += f" One of: {', '.join(option.type.choices)}."
            yield Row(names, shown, text)


def _default(option: click.Option) -> str:
    return str(option.default) if option.show_default else ""


def table() -> str:
    rows: dict[tuple[str, str, str], Row] = {}
    for verb in verbs():
        for row in options(verb):
            kept = rows.setdefault((row.names, row.default, row.help), row)
            kept.verbs.append(str(verb))
    lines = ["| option | of | default | |", "| --- | --- | --- | --- |"]
    for row in rows.values():
        lines.append(f"| {row.names} | {', '.join(row.verbs)} | {row.default} | {row.help} |")
    return "\n".join(lines)


def written_table() -> str:
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip()


def main() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    sys.exit(main())
