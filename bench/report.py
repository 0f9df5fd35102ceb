"""What every benchmark's command line shares: options, prompts, the table at the end."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from slotwise.bench.record import BenchRecord
from slotwise.bench.stats import Estimate

HERE = Path(__file__).parent
GATE_FAILED = 4

F = TypeVar("F", bound=Callable[..., Any])


def options(function: F) -> F:
    """MODEL, --threads, --out and --json."""
    for decorate in (
        click.option("--json", "as_json", is_flag=True, help="Print the record, not the table."),
        click.option("--out", type=click.Path(path_type=Path), default=HERE / "out"),
        click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True),
        click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path)),
    ):
        function = decorate(function)
    return function


def finish(
    record: BenchRecord,
    *,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    out: Path,
    as_json: bool,
) -> None:
    """Writes the record, prints it or its table, and exits with 4 if a check failed."""
    path, data = record.write(out)
    if as_json:
        click.echo(json.dumps(data))
    else:
        _print_table(record, columns, rows, path)
    if not record.passed:
        sys.exit(GATE_FAILED)


def _print_table(
    record: BenchRecord, columns: Sequence[str], rows: Sequence[Sequence[str]], path: Path
) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = 120
    table = Table(title=record.bench.replace("_", " "), title_justify="left", box=SIMPLE_HEAD)
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for check in record.checks:
        verdict = "passed" if check.passed else "FAILED"
        console.print(f"{verdict}: {check.name}: {check.found}, wanted {check.wanted}")
    console.print(f"record: {path}", highlight=False)


def interval(estimate: Estimate, form: str = "{:.3f}") -> str:
    """`low .. high`, or a dash."""
    if estimate.low is None or estimate.high is None:
        return "-"
    return f"{form.format(estimate.low)} .. {form.format(estimate.high)}"
