"""The verbs of `slotwise explain`: logs (the default), compare, levers.

Options in, one call of the room, text or a file out; exit code 3 when nothing could be measured.
Imports of numpy, scipy, rich and jinja2 wait until a verb runs, so that `--help` is quick.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slotwise.errors import SlotwiseError, UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from slotwise.explain.record import Reading

NOTHING = 3
FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
HTML = click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    help="Write one self-contained page with pictures.",
)
FORCE = click.option("--force", is_flag=True, help="Write over a file that is there.")
JSON = click.option("--json", "as_json", is_flag=True, help="One JSON document instead of text.")


class WithDefault(click.Group):
    """A group whose first argument may be left out when it is the default verb."""

    default = "logs"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, *ctx.help_option_names}:
            args = [self.default, *args]
        return super().parse_args(ctx, args)


@click.group("explain", cls=WithDefault)
def explain_group() -> None:
    """Say where the time to the first token went, from logs of this and of other engines.

    `slotwise explain LOG...` is short for `slotwise explain logs LOG...`.
    """


@explain_group.command("logs")
@click.argument("logs", type=FILE, nargs=-1, required=True)
@click.option("--join", "join_file", type=FILE, help="Benchmark results (JSON) to pair with.")
@JSON
@HTML
@FORCE
@click.option("--per-request", is_flag=True, help="Every phase of every request.")
@click.option("--unknown", is_flag=True, help="The shapes of the lines that were not understood.")
@click.option("--follow", is_flag=True, help="Go on reading logs that are still being written.")
@click.option("--redact", is_flag=True, default=True,
              help="Show nothing of a log but known names and numbers. Always on.")  # fmt: skip
def logs_command(logs: tuple[Path, ...], **options: Any) -> int:
    """Where the time to the first token went, request by request, and what it costs."""
    if options["follow"]:
        return _follow(logs, options)
    return _show(_read(logs), options)


@explain_group.command("compare")
@click.argument("arm_a", metavar="A")
@click.argument("arm_b", metavar="[B]", required=False)
@click.option(
    "--force-compare",
    is_flag=True,
    help="Compare although model, sizes or engine revision differ, and say so.",
)
@click.option(
    "--margin",
    default="5%",
    show_default=True,
    help="A change whose interval is within this of zero is none: per cent of A's mean time, or "
    "milliseconds (20ms).",
)
@HTML
@FORCE
@JSON
def compare_command(arm_a: str, arm_b: str | None, **options: Any) -> None:
    """Which phases moved from A to B, by how much, which did not, and what stays unexplained.

    A and B are logs, folders of logs of one arm each, or arms of ladder records, as RECORD:ARM. A
    record alone stands for its only arm, or, without B, for its two.
    """
    from slotwise.explain import arms, json_out, report
    from slotwise.explain.compare import compare
    from slotwise.explain.margin import Margin

    margin = Margin.parse(options["margin"])
    (name_a, a), (name_b, b) = arms.two_arms(arm_a, arm_b)
    result = compare(a, b, names=(name_a, name_b), force=options["force_compare"], margin=margin)
    if options["html"] is not None:
        from slotwise.explain.html import comparison_page

        _write_page(comparison_page(result), options["html"], force=options["force"])
    if options["as_json"]:
        _write(json_out.dumps(json_out.comparison_document(result)))
    elif options["html"] is None:
        _print(report.comparison(result))


@explain_group.command("levers")
@click.argument("logs", nargs=-1, required=True)
@click.option(
    "--with",
    "with_arm",
    metavar="ARM",
    help="Log, folder or RECORD:ARM of an arm that has the lever on: predicted against measured.",
)
@click.option(
    "--lever",
    "lever_key",
    default="",
    help="Only this lever: deferred-refill, no-checkpoint, one-part or off:PHASE.",
)
@click.option("--off", multiple=True, metavar="PHASE", help="Also predict without this phase.")
@HTML
@FORCE
@JSON
def levers_command(
    logs: tuple[str, ...], with_arm: str | None, lever_key: str, off: tuple[str, ...],
    **options: Any,
) -> int:  # fmt: skip
    """What the time to the first token would have been with a phase off the path."""
    from slotwise.explain import arms, json_out, report
    from slotwise.explain.levers import LEVERS, predict_levers

    known = {lever.key for lever in LEVERS} | {f"off:{phase}" for phase in off}
    if lever_key.startswith("off:"):
        off, known = (*off, lever_key.removeprefix("off:")), known | {lever_key}
    if lever_key and lever_key not in known:
        raise UsageError(
            f"no lever {lever_key}", next_step=f"There are: {', '.join(sorted(known))}"
        )
    if with_arm is not None and not lever_key:
        raise UsageError(
            "--with needs to know which lever that arm has on", next_step="Add --lever."
        )
    name, with_lever = ("", None) if with_arm is None else arms.one_arm(with_arm)
    result = predict_levers(
        arms.together([reading for log in logs for _, reading in [arms.one_arm(log)]]),
        off=tuple(dict.fromkeys(off)),
        with_lever=with_lever,
        lever_key=lever_key,
        arm=name,
    )
    if options["html"] is not None:
        from slotwise.explain.html import levers_page

        _write_page(levers_page(result), options["html"], force=options["force"])
    if options["as_json"]:
        _write(json_out.dumps(json_out.levers_document(result)))
    elif options["html"] is None:
        _print(report.levers(result))
    return 0 if result.predictions else NOTHING


def _show(reading: Reading, options: dict[str, Any]) -> int:
    from slotwise.explain import json_out, report
    from slotwise.explain.summary import explain

    rows = None
    if options["join_file"] is not None:
        from slotwise.explain.join import read_rows

        rows = read_rows(options["join_file"])
    result = explain(reading, rows=rows)
    if options["html"] is not None:
        from slotwise.explain.html import page

        _write_page(page(result), options["html"], force=options["force"])
    if options["as_json"]:
        sys.stdout.buffer.writelines(p.encode("utf-8") for p in json_out.explained_pieces(result))
        sys.stdout.buffer.flush()
    elif options["unknown"]:
        _print(report.unknown_lines(reading))
    elif options["html"] is None:
        _print(report.explained(result, per_request=options["per_request"]))
    if not result.anything:
        click.echo("nothing was measured: no request with a time was found", err=True)
        return NOTHING
    return 0


def _follow(logs: Sequence[Path], options: dict[str, Any]) -> int:
    """The table again whenever a log has grown; in place on a terminal, one after another piped."""
    from rich.console import Console
    from rich.live import Live

    from slotwise.explain import report
    from slotwise.explain.readers import follow_files
    from slotwise.explain.summary import explain

    if options["as_json"] or options["html"] or options["join_file"] or options["unknown"]:
        raise UsageError(
            "--follow shows a table and nothing else",
            next_step="Leave out --json, --html, --join and --unknown.",
        )
    console = Console()
    # what is taller than the terminal could not be drawn over again: cut while it changes
    live = Live(console=console, auto_refresh=False, vertical_overflow="ellipsis", transient=True)
    tables = (
        report.explained(explain(reading), per_request=options["per_request"])
        for reading in follow_files(logs)
    )
    if not console.is_terminal:
        for table in tables:
            console.print(table)
            sys.stdout.flush()
        return 0
    last: RenderableType = ""
    try:
        with live:
            for table in tables:
                last = table
                live.update(table, refresh=True)
    finally:
        console.print(last)
    return 0


def _read(logs: Sequence[Path]) -> Reading:
    from slotwise.explain import progress
    from slotwise.explain.readers import read_files

    with progress.reading(logs):
        return read_files(logs)


def _write_page(text: str, path: Path, *, force: bool) -> None:
    if str(path) == "-":
        _write(text)
        return
    if path.exists() and not force:
        raise UsageError(f"{path} is there already", next_step="Pass --force to write over it.")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        if path.is_file():
            path.unlink()  # half a page
        raise SlotwiseError(
            f"{path} cannot be written: {error.strerror}", next_step="Name another place."
        ) from error


def _print(renderable: RenderableType) -> None:
    from rich.console import Console

    Console().print(renderable)


def _write(text: str) -> None:
    sys.stdout.buffer.write(text.encode("utf-8"))
    sys.stdout.buffer.flush()
