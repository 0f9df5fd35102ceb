"""What `slotwise run` and `slotwise chat` do, without knowing they are a command line."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from slotwise.engine.engine import Engine
from slotwise.engine.loading import Progress
from slotwise.engine.preflight import check_model
from slotwise.engine.sampling import Sampling
from slotwise.engine.settings import EngineSettings
from slotwise.engine.text import Answerer, AnswerOptions, Message
from slotwise.errors import SlotwiseError, UsageError
from slotwise.experts.profile import ProfileRecorder, save_profile
from slotwise.experts.routing import RoutingRecorder, save_routing
from slotwise.outputs import check_output
from slotwise.trace.record import ExpertCounts, RequestRecord
from slotwise.trace.report import where_time_went
from slotwise.weights.shard_set import sibling_files

Write = Callable[[str], None]
Cancelling = Callable[[], AbstractContextManager[threading.Event]]
"""While it is entered, the user's wish to stop sets the event."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where an answer goes and what accompanies it."""

    write: Write
    as_json: bool = False
    quiet: bool = False


def settings_from(options: Mapping[str, Any]) -> EngineSettings:
    """Engine settings out of a verb's options."""
    names = {f.name for f in fields(EngineSettings)}
    return EngineSettings(**{k: v for k, v in options.items() if k in names})


def answer_options(options: Mapping[str, Any]) -> AnswerOptions:
    sampling = Sampling(
        temperature=options["temp"],
        top_k=options["top_k"],
        top_p=options["top_p"],
        min_p=options["min_p"],
        seed=options["seed"],
    )
    return AnswerOptions(max_tokens=options["max_tokens"], sampling=sampling)


@contextmanager
def open_answerer(
    model: Path, options: Mapping[str, Any], progress: Progress | None
) -> Iterator[Answerer]:
    """An engine with its tokenizer. Raises Refused with all that `slotwise check` would refuse;
    its warnings go to stderr."""
    settings = settings_from(options)
    trace, overwrite = options.get("trace"), bool(options.get("force"))
    folder = settings.pack or model.with_suffix(".slotpack")
    inputs = [*sibling_files(model), *folder.glob("*"), *filter(None, [settings.profile])]
    for written in filter(None, (trace, options.get("routing"), options.get("save_profile"))):
        check_output(written, force=overwrite, inputs=inputs)
    report = check_model(
        model,
        memory=settings.memory,
        profile=settings.profile,
        pack=settings.pack,
        context=settings.context,
        chunk=settings.chunk,
        kv_type=settings.kv_type,
    )
    report.raise_if_refused()
    for finding in report.findings:
        _say(f"{finding.level}: {finding}")
    with Engine.open(
        model, settings, trace=trace, overwrite=overwrite, progress=progress
    ) as engine:
        with (
            recorded_routing(engine, options.get("routing")),
            recorded_profile(engine, options.get("save_profile")),
        ):
            yield Answerer(engine)
        if engine.tracing.stopped:
            raise SlotwiseError(
                f"{trace}: the trace is incomplete: {engine.tracing.stopped}",
                next_step="The answer is not affected. Free some room and run it again.",
            )


@contextmanager
def recorded_profile(engine: Engine, path: Path | None) -> Iterator[None]:
    """Learns inside which experts are hot and saves the profile to `path` at the end, however that
    comes. Raises UsageError for a model without experts."""
    if path is None:
        yield
        return
    layout, experts = engine.loaded.blueprint.layout, engine.loaded.experts
    if layout is None or experts is None:
        name = engine.model.path.name
        raise UsageError(f"{name} has no experts", next_step="Leave out --save-profile.")
    experts.recorder = recorder = ProfileRecorder(layout)
    try:
        yield
    finally:
        experts.recorder = None
        learnt = recorder.profile(
            model_name=engine.model.path.name, model_digest=engine.model.digest
        )
        if learnt.counts.any():
            save_profile(path, learnt)


@contextmanager
def recorded_routing(engine: Engine, path: Path | None) -> Iterator[None]:
    """Notes which experts are chosen inside and writes them to `path` at its end, however that
    comes. Raises UsageError for a model without experts."""
    if path is None:
        yield
        return
    layout, experts = engine.loaded.blueprint.layout, engine.loaded.experts
    if layout is None or experts is None:
        raise UsageError(
            f"{engine.model.path.name} has no experts", next_step="Leave out --routing."
        )
    experts.routing = recorder = RoutingRecorder(layout)
    try:
        yield
    finally:
        experts.routing = None
        name, digest = engine.model.path.name, engine.model.digest
        save_routing(path, recorder.routing(model_name=name, model_digest=digest))


def answer_once(
    model: Path,
    prompt: str,
    *,
    system: str | None,
    raw: bool,
    options: Mapping[str, Any],
    output: Output,
    progress: Progress | None,
    cancelling: Cancelling,
) -> bool:
    """Answers one prompt; the answer is written as it comes, the table goes to stderr.

    Returns whether it was cancelled.
    """
    chosen = answer_options(options)
    with open_answerer(model, options, progress) as answerer, cancelling() as cancel:
        if raw or (answerer.template is None and system is None):
            pieces = answerer.continue_text(prompt, chosen, cancel=cancel)
        else:
            pieces = answerer.reply(_conversation(system, prompt), chosen, cancel=cancel)
        text = []
        for piece in pieces:
            text.append(piece)
            if not output.as_json:
                output.write(piece)
        record = answerer.last_record
        if output.as_json:
            answer = {"text": "".join(text), "record": record.to_dict() if record else None}
            output.write(json.dumps(answer) + "\n")
        else:
            output.write("\n")
            if record is not None and not output.quiet:
                Console(stderr=True).print(where_time_went(record))
                _say(summary_line(record))
        return cancel.is_set()


def _conversation(system: str | None, prompt: str) -> list[Message]:
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": prompt}]


def hold_conversation(
    model: Path,
    *,
    system: str | None,
    quiet: bool,
    options: Mapping[str, Any],
    write: Write,
    progress: Progress | None,
    cancelling: Cancelling,
) -> None:
    """Reads messages from standard input until it ends; keeps what was read of the conversation.

    A cancelled answer stays in the conversation as far as it came.
    """
    chosen = answer_options(options)
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    with open_answerer(model, options, progress) as answerer:
        for line in _lines():
            messages.append({"role": "user", "content": line})
            answer = []
            with cancelling() as cancel:
                for piece in answerer.reply(messages, chosen, cancel=cancel):
                    answer.append(piece)
                    write(piece)
            write("\n")
            messages.append({"role": "assistant", "content": "".join(answer)})
            if answerer.last_record is not None and not quiet:
                _say(summary_line(answerer.last_record))


def _lines() -> Iterator[str]:
    """Non-empty lines of standard input, with a prompt where somebody types."""
    interactive = sys.stdin.isatty()
    while True:
        try:
            line = input("> ") if interactive else sys.stdin.readline()
        except EOFError:
            return
        if not interactive and not line:
            return
        if line.strip():
            yield line.strip()


def summary_line(record: RequestRecord) -> str:
    """One line on an answer: what was reused and read, and how long it took."""
    first = record.time_to_first_token_ns
    shown = f"{first / 1e6:,.0f} ms" if first is not None else f"none ({record.status})"
    t = record.tokens
    line = f"[first token: {shown}; prompt {t.prompt} = {t.reused} reused + {t.read} read + 1"
    if record.decode and record.decode.wall_ns:
        line += f"; {record.decode.tokens / (record.decode.wall_ns / 1e9):.1f} tokens/s"
    if rate := hit_rate(record.decode_experts):
        line += f"; {rate:.0%} of decode's experts were in the {record.settings.expert_slots} slots"
    return line + "]"


def hit_rate(counts: ExpertCounts) -> float | None:
    """Share of routed experts that needed no read; None where nothing was routed."""
    hits, misses = counts.hits or 0, counts.misses or 0
    return hits / (hits + misses) if hits + misses else None


def _say(line: str) -> None:
    """On stderr, without markup (the lines have brackets) and not cut into several lines."""
    Console(stderr=True).print(Text(line, style="dim"), soft_wrap=True)
