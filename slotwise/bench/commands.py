"""The verb `slotwise bench`: options in, one call of the room, a table or a record out.

Imports of the engine, numpy, scipy and rich wait until the verb runs, so that `--help` is quick.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slotwise.errors import UsageError
from slotwise.outputs import check_output
from slotwise.sizes import parse_size

if TYPE_CHECKING:
    from slotwise.bench.run import Outcome
    from slotwise.bench.show import Table
    from slotwise.bench.turns import Plan

GATE_FAILED = 4
WIDTH = 140
FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.command("bench")
@click.argument("model", type=FILE, required=False)
@click.option("--memory", multiple=True,
              help="Limit of the control group, for example 800MiB; repeatable. Everything in "
              "memory is measured as well.")  # fmt: skip
@click.option("--against", metavar="ENGINE",
              help="llama.cpp, llama.cpp:PYTHON or llama.cpp:LLAMA-SERVER.")  # fmt: skip
@click.option("--prompts", default="16,75,128,512,2048", show_default=True,
              help="Prompt sizes in tokens.")  # fmt: skip
@click.option("--decode", type=click.IntRange(0), default=64, show_default=True,
              help="Tokens to decode after one of the prompts.")  # fmt: skip
@click.option("--decode-after", type=click.IntRange(1),
              help="Which prompt.  [default: 128 if that is one, else the first]")  # fmt: skip
@click.option("--decode-seconds", type=click.FloatRange(0.1), default=30.0, show_default=True,
              help="Decode ends after this time, however slow an engine is.")  # fmt: skip
@click.option("--pairs", type=click.IntRange(1), default=5, show_default=True,
              help="Rounds; in each every engine has its turn.")  # fmt: skip
@click.option("--minutes", type=click.FloatRange(0.1),
              help="No new round begins after so long.")  # fmt: skip
@click.option("--threads", type=click.IntRange(1),
              help="Threads that compute.  [default: all that are allowed]")  # fmt: skip
@click.option("--io-lanes", type=click.IntRange(1, 64), default=4, show_default=True,
              help="Reads of the slow tier at the same time.")  # fmt: skip
@click.option("--replay", type=FILE, metavar="TRACE",
              help="Replay the policies on a routing trace (`run --routing`) instead.")  # fmt: skip
@click.option("--slots", default="25%,50%,75%", show_default=True,
              help="With --replay: expert slots, as numbers or shares of all experts.")  # fmt: skip
@click.option("--lock", type=click.Path(path_type=Path, dir_okay=False),
              help="File to lock while a turn measures, where several people do.")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False),
              help="JSON record to write.")  # fmt: skip
@click.option("--force", is_flag=True, help="Write over a record that is there.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of text.")
def bench_command(model: Path | None, replay: Path | None, **options: Any) -> int:
    """Measure MODEL in little memory: how fast, against llama.cpp, and how near to what the disk
    and the processor allow. Exit code 4 if a check of the run fails, 3 if nothing could be
    measured."""
    if replay is not None:
        if model is not None:
            raise UsageError("--replay takes no MODEL", next_step="Leave one of the two out.")
        return _replay(replay, options)
    if model is None:
        raise UsageError("no MODEL", next_step="Give a GGUF file, or --replay TRACE.")
    return _measure(model, options)


def _measure(model: Path, options: dict[str, Any]) -> int:
    from slotwise.bench.run import run
    from slotwise.bench.show import LEGEND, gaps, table

    plan = plan_from(model, options)
    if options["out"]:
        check_output(options["out"], force=options["force"], inputs=[model])
    with _progress() as step:
        outcome = run(plan, say=lambda text: click.echo(text, err=True), step=step)
    _keep(outcome, options)
    if not options["as_json"]:
        _print_table(table(outcome.lines))
        for line in (*LEGEND, *gaps(outcome.lines), *_verdicts(outcome)):
            click.echo(line)
    return 0 if outcome.record.passed else GATE_FAILED


def plan_from(model: Path, options: dict[str, Any]) -> Plan:
    """What the options ask for. Raises UsageError, and NoPeer."""
    from slotwise.bench.peers import find_peer
    from slotwise.bench.turns import Plan

    prompts = _numbers(options["prompts"])
    after = options["decode_after"] or (128 if 128 in prompts else prompts[0])
    if after not in prompts:
        raise UsageError(
            f"--decode-after {after} is none of the prompts {options['prompts']}",
            next_step="Add it to --prompts.",
        )
    limits = tuple(parse_size(text) for text in options["memory"])
    if any(n < 1 for n in limits):
        raise UsageError("--memory is 0", next_step="Give a size, for example 800MiB.")
    return Plan(
        model=model,
        files=(),
        limits=(*limits, None),
        prompts=prompts,
        decode=options["decode"],
        decode_after=after,
        decode_seconds=options["decode_seconds"],
        pairs=options["pairs"],
        threads=options["threads"] or len(os.sched_getaffinity(0)),
        io_lanes=options["io_lanes"],
        peer=find_peer(options["against"]) if options["against"] else None,
        grouped=True,
        lock=options["lock"],
        minutes=options["minutes"],
    )


def _numbers(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1 or len(set(found)) < len(found):
        raise UsageError(
            f"--prompts {text!r} is no list of different sizes", next_step="Write 16,128,512."
        )
    return found


def _replay(trace: Path, options: dict[str, Any]) -> int:
    from slotwise.bench.replays import replay_all, replay_document, replay_table
    from slotwise.experts.routing import load_routing

    routing = load_routing(trace)
    found = replay_all(routing, options["slots"])
    document = replay_document(routing, found)
    if options["out"]:
        check_output(options["out"], force=options["force"], inputs=[trace])
        options["out"].write_text(json.dumps(document, indent=1) + "\n")
    if options["as_json"]:
        click.echo(json.dumps(document))
    else:
        _print_table(replay_table(found))
    return 0


def _keep(outcome: Outcome, options: dict[str, Any]) -> None:
    """The record, into its file and on stdout, as asked for."""
    if not (options["out"] or options["as_json"]):
        return
    data = outcome.record.to_dict()
    if options["out"]:
        options["out"].write_text(json.dumps(data, indent=1) + "\n")
        click.echo(f"record: {options['out']}", err=True)
    if options["as_json"]:
        click.echo(json.dumps(data))


def _verdicts(outcome: Outcome) -> list[str]:
    disk = outcome.record.results.get("disk, bytes/s")
    speed = [f"disk: {disk.median / 1e9:.2f} GB/s (n = {disk.n})"] if disk else []
    return speed + [
        f"{'passed' if check.passed else 'FAILED'}: {check.name}: {check.found}"
        for check in outcome.record.checks
    ]


def _print_table(table: Table) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    drawn = RichTable(box=SIMPLE_HEAD)
    for i, name in enumerate(table.columns):
        drawn.add_column(name, justify="left" if i < 2 else "right")
    for row in table.rows:
        drawn.add_row(*row)
    console.print(drawn)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Which turn it is, on stderr, where somebody watches."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns: Sequence[Any] = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=None)

        def update(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield update
    sys.stderr.flush()
