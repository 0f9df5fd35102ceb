"""What the verbs of the command line share: options, progress, output, and errors."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import click

from slotwise.errors import Interrupted, Refused, SlotwiseError, UsageError
from slotwise.sizes import parse_size

Command = TypeVar("Command", bound=Callable[..., Any])
PROGRESS_AFTER_SECONDS = 2.0
MODEL = click.argument("model", type=click.Path(path_type=Path, exists=True, dir_okay=False))


class Size(click.ParamType):
    """Bytes, or None for `auto`."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int | None:
        if value is None or isinstance(value, int) or value == "auto":
            return None if value == "auto" else value
        try:
            return parse_size(value)
        except UsageError as error:
            self.fail(f"{error}. {error.next_step}", param, ctx)


def engine_options(command: Command) -> Command:
    """--memory, --threads and what else decides how the engine runs."""
    path = click.Path(path_type=Path, dir_okay=False)
    options = [
        click.option("--memory", type=Size(), default="auto", show_default=True,
                     help="What expert slots, weights, keys and values and buffers may take."),
        click.option("--threads", type=click.IntRange(1),
                     help="Threads that compute.  [default: all that are allowed]"),
        click.option("--context", type=click.IntRange(2), default=4096, show_default=True,
                     help="Tokens of a conversation, prompt and answer together."),
        click.option("--chunk", type=click.IntRange(1), default=2048, show_default=True,
                     help="Prompt tokens read at once."),
        click.option("--exact", is_flag=True,
                     help="Round the same way whatever the chunk; long prompts read slower."),
        click.option("--kv-type", type=click.Choice(["f16", "f32"]), default="f16",
                     show_default=True, help="Type of keys and values."),
        click.option("--refill", type=click.Choice(["deferred", "blocking", "lazy"]),
                     default="deferred", show_default=True,
                     help="When lent expert slots are filled again."),
        click.option("--policy", type=click.Choice(["two-rate", "lfu", "lru"]), default="two-rate",
                     show_default=True, help="Which experts stay."),
        click.option("--lookahead", type=click.Choice(["auto", "on", "off"]), default="auto",
                     show_default=True, help="Read what the next layer will probably want."),
        click.option("--profile", type=path, help="Hotness ranking that fills the slots."),
        click.option("--pack", type=click.Path(path_type=Path, file_okay=False),
                     help="Folder of the pack.  [default: beside the model]"),
        click.option("--io-lanes", type=click.IntRange(1, 64), default=4, show_default=True,
                     help="Reads of the slow tier at the same time."),
        click.option("--mirror", type=Size(),
                     help="Host memory beside --memory for copies of experts without a slot."),
        click.option("--read-limit", type=float, default=60.0, show_default=True,
                     help="Seconds the slow tier may take for one expert."),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def conversation_options(command: Command) -> Command:
    """--conversations, and where those wait that are not being answered."""
    options = [
        click.option("--conversations", type=click.Choice(["off", "shadow", "on"]), default="on",
                     show_default=True,
                     help="Reuse what was read before; `shadow` pays for it and does not use it."),
        click.option("--park-memory", type=Size(), default="512MiB", show_default=True,
                     help="RAM for parked conversations, beside --memory; 0 for none."),
        click.option("--park-disk", type=Size(), default="2GiB", show_default=True,
                     help="Disk for those beyond it; 0 for none."),
        click.option("--park-folder", type=click.Path(path_type=Path, file_okay=False),
                     help="Where their file lies.  [default: slotwise's cache folder]"),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def trace_options(command: Command) -> Command:
    """--trace and --routing, and --force to write over one that is there."""
    path = click.Path(path_type=Path, dir_okay=False)
    options = [
        click.option("--trace", type=path, help="Write a trace."),
        click.option("--routing", type=path,
                     help="Write which experts were chosen, to replay policies on."),
        click.option("--force", is_flag=True, help="Write over a trace that is there."),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def learning_options(command: Command) -> Command:
    """--save-profile."""
    return click.option(
        "--save-profile",
        type=click.Path(path_type=Path, dir_okay=False),
        help="Write a profile of the experts these answers made hot.",
    )(command)


def sampling_options(command: Command) -> Command:
    options = [
        click.option("-n", "--max-tokens", type=click.IntRange(1), default=512, show_default=True,
                     help="Longest answer."),
        click.option("--temp", type=float, default=0.8, show_default=True,
                     help="Temperature; 0 takes the most probable token."),
        click.option("--top-k", type=int, default=40, show_default=True,
                     help="Keep so many of the most probable tokens; 0 keeps all."),
        click.option("--top-p", type=float, default=0.95, show_default=True,
                     help="Keep the most probable tokens up to this probability together."),
        click.option("--min-p", type=float, default=0.05, show_default=True,
                     help="Keep tokens with at least this part of the best one's probability."),
        click.option("--seed", type=int, help="Makes sampling repeatable."),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr for what takes over two seconds; silent where nobody watches."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn(),
        console=console, transient=True,
    )  # fmt: skip
    begun = time.monotonic()
    tasks: dict[str, Any] = {}

    def update(what: str, done: int, total: int) -> None:
        if not console.is_terminal or time.monotonic() - begun < PROGRESS_AFTER_SECONDS:
            return
        if not tasks:
            bar.start()
        if what not in tasks:
            tasks[what] = bar.add_task(what, total=total)
        bar.update(tasks[what], completed=done, total=total)

    try:
        yield update
    finally:
        if tasks:  # a bar that never started would print an empty line
            bar.stop()


@contextmanager
def ctrl_c_cancels() -> Iterator[threading.Event]:
    """The first Ctrl-C sets the event (the answer ends in order), the second interrupts."""
    cancel = threading.Event()

    def interrupt(_signal: int, _frame: Any) -> None:
        if cancel.is_set():
            raise KeyboardInterrupt
        cancel.set()

    if threading.current_thread() is not threading.main_thread():
        yield cancel
        return
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield cancel
    finally:
        signal.signal(signal.SIGINT, before)


def write(text: str) -> None:
    """Text to stdout at once; what the terminal cannot show is replaced, never an error."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.buffer.write(text.encode(encoding, errors="replace"))
    sys.stdout.buffer.flush()


def _prepare_streams() -> None:
    """Closed streams become empty ones; input that is not text is read as if it were."""
    if sys.stdout is None:
        raise SlotwiseError("standard output is closed", next_step="Send it to a file instead.")
    for name, mode in (("stdin", "r"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, closefd=False))
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")


def _end_in_order_on_sigterm() -> None:
    """A polite kill unwinds like Ctrl-C, so that files are closed; exit code 143, as shells say."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def _drop_output() -> None:
    """What could not be written to stdout is not tried again when Python ends."""
    with suppress(OSError):
        sys.stdout.flush()
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(error: SlotwiseError) -> int:
    """Prints an error on stderr; returns its exit code."""
    if isinstance(error, Interrupted):
        click.echo(f"interrupted: {error}", err=True)
    elif isinstance(error, Refused):
        for finding in error.findings:
            click.echo(f"{finding.level}: {finding}", err=True)
    else:
        click.echo(f"error: {error}", err=True)
        if error.next_step:
            click.echo(f"       {error.next_step}", err=True)
    return error.exit_code


def run_guarded(app: click.Command, arguments: list[str] | None) -> int:
    """Runs the app; every way it can end becomes an exit code and at most a short message."""
    try:
        _prepare_streams()
        _end_in_order_on_sigterm()
        result = app.main(args=arguments, standalone_mode=False, prog_name="slotwise")
        sys.stdout.flush()
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except SlotwiseError as error:
        return fail(error)
    except SystemExit as stop:
        click.echo("terminated", err=True)
        return stop.code if isinstance(stop.code, int) else 1
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        return 130
    except BrokenPipeError:
        _drop_output()
        return 1
    except MemoryError:
        return fail(SlotwiseError("out of memory", next_step="Give a smaller --memory."))
    except OSError as error:
        _drop_output()
        where = f"{error.filename}: " if error.filename else ""
        return fail(SlotwiseError(f"{where}{error.strerror or error}"))
    except ModuleNotFoundError as error:
        step = "The engine needs it: pip install 'slotwise[engine]'"
        return fail(SlotwiseError(f"{error.name} is not installed", next_step=step))
    except Exception as error:
        if os.environ.get("SLOTWISE_DEBUG"):
            raise
        return fail(
            SlotwiseError(
                f"internal error: {type(error).__name__}: {error}",
                next_step="This is a defect of slotwise. SLOTWISE_DEBUG=1 shows where it is.",
            )
        )
    return result if isinstance(result, int) else 0
