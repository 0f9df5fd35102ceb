"""What the engine must show when the experts do not fit, as one table with verdicts.

Runs `slotwise bench` under 900 and 500 MiB and with everything in memory, against llama.cpp, and
holds the figures against the targets. Writes the JSON record and beside it the table in Markdown.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from bench.report import HERE, finish
from slotwise.bench.commands import plan_from
from slotwise.bench.record import BenchRecord
from slotwise.bench.results import Line
from slotwise.bench.run import crowding_of, run
from slotwise.bench.show import LEGEND, gaps, table
from slotwise.bench.turns import MOST_CROWDING
from slotwise.errors import SlotwiseError

MIB = 1 << 20
TARGETS: tuple[tuple[str, str, str, float], ...] = (
    ("900 MiB", "decode", "against llama.cpp", 25),
    ("900 MiB", "decode", "of our resident speed", 0.6),
    ("500 MiB", "decode", "against llama.cpp", 15),
    *((memory, f"read {n}", "against llama.cpp", 2) for memory in ("900 MiB", "500 MiB")
      for n in ("16", "75", "128")),
    *((memory, f"read {n}", "against resident llama.cpp", 1) for memory in ("900 MiB", "500 MiB")
      for n in ("512", "2,048")),
    *((memory, "decode", "of the limit", 0.8) for memory in ("900 MiB", "500 MiB")),
    *((memory, f"read {n}", "of the limit", 0.85) for memory in ("900 MiB", "500 MiB")
      for n in ("512", "2,048")),
    ("resident", "decode", "against llama.cpp", 0.95),
    ("resident", "read 512", "against llama.cpp", 1.2),
    ("resident", "read 2,048", "against llama.cpp", 1.5),
)  # fmt: skip
"""(memory, what, figure, at least)"""


@click.command()
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--against", required=True, help="As of `slotwise bench`.")
@click.option("--memory", multiple=True, default=("900MiB", "500MiB"), show_default=True)
@click.option("--prompts", default="16,75,128,512,2048", show_default=True)
@click.option("--decode", default=64, show_default=True)
@click.option("--decode-after", default=None, type=int)
@click.option("--decode-seconds", default=20.0, show_default=True)
@click.option("--pairs", default=5, show_default=True)
@click.option("--minutes", type=float, help="No new round begins after so long.")
@click.option("--threads", default=2, show_default=True)
@click.option("--io-lanes", default=4, show_default=True)
@click.option("--lock", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), default=HERE / "out")
@click.option("--json", "as_json", is_flag=True, help="Print the record, not the table.")
def main(model: Path, out: Path, as_json: bool, **options: Any) -> None:
    """Hold MODEL's figures in little memory against what they must be."""
    try:
        outcome = run(plan_from(model, options), say=_say, step=_step)
    except SlotwiseError as error:
        raise click.ClickException(f"{error} {error.next_step}") from None
    record = outcome.record
    for memory, what, figure, least in TARGETS:
        _hold(record, outcome.lines, memory, what, figure, least)
    share, aside = crowding_of(record)
    record.check(
        "the cores were ours",
        wanted=f"a computing thread waits for a core at most {MOST_CROWDING:.0%} of the time",
        found=f"at most {share:.0%}, {aside} turns taken again",
        passed=share <= MOST_CROWDING,
    )
    shown = table(outcome.lines)
    out.mkdir(parents=True, exist_ok=True)
    page = out / f"beyond_memory-{record.started.replace(':', '').replace('-', '')[:15]}.md"
    page.write_text(_markdown(record, outcome.lines))
    finish(record, columns=shown.columns, rows=shown.rows, out=out, as_json=as_json)


def _hold(
    record: BenchRecord, lines: list[Line], memory: str, what: str, figure: str, least: float
) -> None:
    """A check for one target; one that was not measured has failed."""
    for line in lines:
        is_it = line.what == what or (what == "decode" and line.what.startswith("decode"))
        if line.where == memory and is_it:
            found = line.figures.get(figure)
            record.check(
                f"{memory}, {line.what}, {figure}",
                wanted=f"at least {least:g}",
                found=line.missing.get(figure, "missing")
                if found is None
                else _value(line, figure),
                passed=found is not None and found.median >= least,
            )


def _value(line: Line, figure: str) -> str:
    found = line.figures.get(figure)
    if found is None:
        return f"missing: {line.missing.get(figure, 'not measured')}"
    if found.low is None or found.high is None:
        return f"{found.median:.2f} (n = {found.n})"
    return f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f}, n = {found.n})"


def _markdown(record: BenchRecord, lines: list[Line]) -> str:
    verdicts = "".join(
        f"| {c.name} | {c.found} | {c.wanted} | {'yes' if c.passed else '**no**'} |\n"
        for c in record.checks
    )
    legend = "".join(f"{line}\n" for line in (*LEGEND, *gaps(lines)))
    return (
        f"{table(lines).markdown()}\n{legend}\n"
        f"| what | found | wanted | reached |\n| --- | --- | --- | --- |\n{verdicts}"
    )


def _say(text: str) -> None:
    click.echo(text, err=True)


def _step(what: str, done: int, total: int) -> None:
    click.echo(f"{done}/{total} {what}", err=True)


if __name__ == "__main__":
    main()
