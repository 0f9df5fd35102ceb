"""The verbs of `slotwise ladder`: run (the default), report, restore.

Exit codes: 3 nothing usable was measured or an arm was not proven, 4 not a run record, 5 production
was not restored, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from slotwise.errors import NotRestored, UsageError
from slotwise.explain.commands import WithDefault
from slotwise.outputs import check_output

NOTHING = 3
FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
NEW_FILE = click.Path(path_type=Path, dir_okay=False)
FORCE = click.option("--force", is_flag=True, help="Write over a file that is there.")
KEY = click.option(
    "--api-key-env", default="OPENAI_API_KEY", show_default=True, metavar="NAME",
    help="Variable of the environment that holds the server's key.",
)  # fmt: skip


class Sizes(click.ParamType):
    """`75,512,2048`"""

    name = "sizes"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            sizes = tuple(int(part) for part in value.split(","))
        except ValueError:
            sizes = ()
        if not sizes or min(sizes) < 1 or len(set(sizes)) < len(sizes):
            self.fail(f"{value!r}: expected different sizes in tokens like 75,512,2048", param, ctx)
        return sizes


class LadderGroup(WithDefault):
    default = "run"


@click.group("ladder", cls=LadderGroup)
def ladder_group() -> None:
    """Measure any OpenAI-compatible server with prompts of several sizes.

    `slotwise ladder --url URL --out RUN.json` is short for `slotwise ladder run ...`.
    """


@ladder_group.command("run")
@click.option(
    "--url", envvar="OPENAI_BASE_URL", help="Address of the server.  [default: $OPENAI_BASE_URL]"
)
@click.option(
    "--sizes",
    type=Sizes(),
    default="75,512,2048",
    show_default=True,
    help="Prompt sizes in tokens.",
)
@click.option(
    "--samples",
    type=click.IntRange(1),
    default=6,
    show_default=True,
    help="Samples per size and arm, beside the cold ones.",
)
@click.option(
    "--arm",
    "arms",
    multiple=True,
    metavar="NAME=FILE",
    help="An arm and its file; repeatable. The first is what others are compared with.",
)
@click.option("--trace", type=NEW_FILE, help="Trace or log of the server, to pair samples with.")
@click.option("--service", type=FILE, help="How production is stopped and restored (TOML).")
@click.option("--out", type=NEW_FILE, required=True, help="Run record to write.")
@FORCE
@click.option(
    "--starts",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="How often an arm that is a process is started.",
)
@click.option("--seed", type=int, help="Of order and passages.  [default: a new one]")
@click.option(
    "--endpoint",
    type=click.Choice(["chat", "completions"]),
    default="chat",
    show_default=True,
    help="What is asked.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Tokens of each answer.",
)
@click.option("--reuse", is_flag=True, help="Measure prompts that are in the server's cache.")
@click.option("--model", help="Model to ask for.  [default: the first of /v1/models]")
@click.option("--text", type=FILE, help="Text to cut prompts from.  [default: Python's library]")
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=600.0,
    show_default=True,
    help="Seconds one answer may take.",
)
@KEY
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of text.")
def run_command(**options: Any) -> int:
    """Take a ladder's samples, write them to a record, and show what they say."""
    from slotwise.ladder.run import run_ladder

    _check_out(options)
    plan = _plan(options)
    with _progress() as (progress, say), _loudly():
        run_ladder(plan, progress=progress, say=say)
    return _show(plan.out, as_json=options["as_json"], html=None, force=False)


@ladder_group.command("report")
@click.argument("record", type=FILE)
@click.option("--html", type=NEW_FILE, help="Write one self-contained page.")
@FORCE
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of text.")
def report_command(record: Path, html: Path | None, force: bool, as_json: bool) -> int:
    """What the samples of RECORD say: a table and fits per arm, arms against the first."""
    return _show(record, as_json=as_json, html=html, force=force)


@ladder_group.command("restore")
@click.argument("journals", metavar="[JOURNAL]...", type=FILE, nargs=-1)
@KEY
def restore_command(journals: tuple[Path, ...], api_key_env: str) -> None:
    """Bring production back after a run that could not.

    Without JOURNAL: every service that a run on this machine left stopped.
    """
    from slotwise.ladder.journal import Journal, state_folder
    from slotwise.ladder.signals import never_failing
    from slotwise.ladder.window import finish

    say = never_failing(_say)
    key = os.environ.get(api_key_env, "")
    found = journals or tuple(sorted(state_folder().glob("*.journal")))
    done = 0
    with _loudly():
        for path in found:
            try:
                journal = Journal(path)
            except UsageError as error:
                if journals:
                    raise
                say(f"left to the run that has it: {error}")
                continue
            try:
                if journal.unfinished:
                    finish(journal, key=key, say=say)
                    done += 1
            finally:
                journal.close()
    if not done:
        click.echo("nothing to restore", err=True)


@ladder_group.command("demo")
@click.argument("model", type=FILE)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    default="demo/ladder",
    show_default=True,
    help="Where everything is written.",
)
@click.option(
    "--memory",
    default="900MiB",
    show_default=True,
    help="Budget of the servers; less than MODEL needs, or nothing is lent for long.",
)
@click.option(
    "--threads",
    type=click.IntRange(1),
    help="Threads that compute.  [default: all that are allowed]",
)
@click.option("--sizes", default="75,512,2048", show_default=True, help="Prompt sizes in tokens.")
@click.option(
    "--samples",
    type=click.IntRange(1),
    default=6,
    show_default=True,
    help="Samples per size and arm, beside the cold ones.",
)
def demo_command(model: Path, folder: Path, **options: Any) -> int:
    """Measure the refill of MODEL on slotwise's own server: a window of service, three arms
    (blocking, deferred, shadow), a report, and a findings record that is checked."""
    from slotwise.ladder.story import tell

    return tell(model, folder, **options)


def _plan(options: dict[str, Any]) -> Any:
    from slotwise.ladder.arms import Arm, parse_arm
    from slotwise.ladder.prompts import own_corpus, standard_corpus
    from slotwise.ladder.run import Plan
    from slotwise.ladder.service import read_service

    text, service, seed = options["text"], options["service"], options["seed"]
    same = ("url", "sizes", "samples", "starts", "endpoint", "max_tokens", "reuse", "model",
            "timeout", "trace", "out")  # fmt: skip
    return Plan(
        **{name: options[name] for name in same},
        arms=tuple(map(parse_arm, options["arms"])) or (Arm(name="server"),),
        seed=secrets.randbits(31) if seed is None else seed,
        corpus=standard_corpus() if text is None else own_corpus(text),
        service=None if service is None else read_service(service),
        key=os.environ.get(options["api_key_env"], ""),
    )


def _check_out(options: dict[str, Any]) -> None:
    from slotwise.ladder.record import check_replaceable

    inputs = [p for p in (options["trace"], options["service"], options["text"]) if p is not None]
    inputs += [Path(arm.partition("=")[2]) for arm in options["arms"]]
    check_replaceable(options["out"])
    check_output(options["out"], force=options["force"], inputs=inputs)
    if not options["out"].absolute().parent.is_dir():
        raise UsageError(f"{options['out']}: its folder is not there", next_step="Make it first.")


def _show(path: Path, *, as_json: bool, html: Path | None, force: bool) -> int:
    from rich.console import Console

    from slotwise.ladder import report_text
    from slotwise.ladder.record import read_record
    from slotwise.ladder.report import ladder_report

    result = ladder_report(read_record(path), file=path.name)
    if html is not None:
        from slotwise.ladder.page import page

        check_output(html, force=force, inputs=[path])
        _write_page(html, page(result))
    if as_json:
        document = report_text.document(result)
        text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        sys.stdout.buffer.write(text.encode())
        sys.stdout.buffer.flush()
    elif html is None:
        _print(Console(), report_text.terminal(result))
    return 0 if result.anything else NOTHING


def _write_page(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError:
        if path.is_file():
            path.unlink()  # half a page
        raise


def _print(console: Any, shown: Any) -> None:
    """What the terminal's encoding cannot show is replaced, never an error."""
    with console.capture() as captured:
        console.print(shown)
    encoding = console.encoding if console.encoding else "utf-8"
    sys.stdout.buffer.write(captured.get().encode(encoding, errors="replace"))
    sys.stdout.buffer.flush()


def _say(text: str) -> None:
    click.echo(text, err=True)


@contextmanager
def _progress() -> Iterator[tuple[Callable[[int, int, str], None], Callable[[str], None]]]:
    """A bar on stderr, and lines above it; no bar where nobody watches."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = _patient_console()
    bar = Progress(
        BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    with bar:
        task = bar.add_task("", total=None)

        def update(done: int, total: int, text: str) -> None:
            bar.update(task, completed=done, total=total, description=text)

        def say(text: str) -> None:
            bar.console.print(text, markup=False, highlight=False)

        yield update, say


@contextmanager
def _loudly() -> Iterator[None]:
    """A failed restoration is the loudest thing on the screen."""
    try:
        yield
    except NotRestored as error:
        from rich.panel import Panel
        from rich.text import Text

        text = Text(f"{error}\n\n{error.next_step}", style="bold white")
        console = _patient_console()
        with suppress(OSError):
            if console.is_terminal:
                console.bell()
            console.print(Panel(text, title="PRODUCTION IS DOWN", style="bold white on red"))
        raise


def _patient_console() -> Any:
    """stderr, for what goes on when nobody listens any more: there may be production to restore."""
    from rich.console import Console

    class Patient(Console):
        def on_broken_pipe(self) -> None:  # rich would end the process
            self.quiet = True

    return Patient(stderr=True)
