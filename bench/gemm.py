"""From how many rows of one expert on do products by tiles pay, repacked or dequantised?

    python -m bench.gemm MODEL [--sizes 128,512,2048] [--from-rows 16,32,40,64] [--rounds N]

One engine, everything resident. Each prompt is read in turns A B C C B A with ggml's quantised
products only, and by tiles from so many rows on. What counts is the ratio of each arm to the
quantised one of the same round. `slotwise.engine.expert_gemm.FROM_ROWS` rests on this.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter_ns

import click

from bench.report import finish, interval, options
from slotwise.bench.prose import cut, prose
from slotwise.bench.record import BenchRecord
from slotwise.bench.stats import alternating, estimate, ratio
from slotwise.engine.engine import Engine
from slotwise.engine.expert_gemm import GemmUse
from slotwise.engine.prompt import PromptReader
from slotwise.engine.settings import EngineSettings
from slotwise.trace.ledger import Ledger
from slotwise.weights.tokenizer import Tokenizer

NEVER = "quantised"
HOW = {
    "ns": "measured by perf_counter around PromptReader.read, empty state, all tokens",
    "results": "derived: the quantised arm's time over each arm's, round by round, the median of "
    "the ratios and the interval of their geometric mean",
}


class Reader:
    """Reads prompts with one rule for the products."""

    def __init__(self, engine: Engine, from_rows: int | None) -> None:
        loaded = engine.loaded
        gemm = GemmUse(loaded.settings.n_threads, from_rows, from_rows) if from_rows else None
        self._state = loaded.state
        self._reader = PromptReader(
            loaded.network,
            backend=loaded.backend,
            experts=loaded.experts,
            arena=loaded.arena,
            chunk=loaded.settings.chunk,
            gemm=gemm,
            crew=loaded.crew if gemm else None,
        )

    def time_ns(self, tokens: list[int]) -> int:
        self._state.clear()
        begin = perf_counter_ns()
        self._reader.read(tokens, 0, ledger=Ledger(), check=lambda: None, done=self._state.advance)
        return perf_counter_ns() - begin


@click.command()
@options
@click.option("--sizes", default="128,512,2048", show_default=True, help="Tokens, with commas.")
@click.option("--from-rows", default="16,32,40,64", show_default=True, help="Rows, with commas.")
@click.option("--rounds", type=click.IntRange(min=2), default=4, show_default=True)
def main(
    model: Path, threads: int, out: Path, as_json: bool, sizes: str, from_rows: str, rounds: int
) -> None:
    """Compare the two kinds of product on MODEL."""
    prompts = [int(size) for size in sizes.split(",")]
    arms = {NEVER: None} | {f"from {n} rows": int(n) for n in from_rows.split(",")}
    record = BenchRecord(
        bench="gemm",
        settings={"model": model.name, "threads": threads, "sizes": prompts, "rounds": rounds},
        how=HOW,
    )
    settings = EngineSettings(
        memory=1 << 42, threads=threads, context=max(prompts) + 1, chunk=max(prompts)
    )
    with Engine.open(model, settings) as engine:
        text = Tokenizer.from_metadata(engine.model.metadata).encode(prose(), special=False)
        readers = {name: Reader(engine, rows) for name, rows in arms.items()}
        for size in prompts:
            for name in alternating(rounds, list(arms)):
                ns = readers[name].time_ns(cut(text, size))
                record.samples.append({"tokens": size, "arm": name, "ns": ns})
    rows = [_row(record, size, name) for size in prompts for name in arms]
    columns = ["tokens", "products", "ms", "tok/s", "faster by", "95 % interval"]
    finish(record, columns=columns, rows=rows, out=out, as_json=as_json)


def _row(record: BenchRecord, size: int, arm: str) -> list[str]:
    def took(name: str) -> list[float]:
        return [s["ns"] for s in record.samples if (s["tokens"], s["arm"]) == (size, name)]

    times, faster = estimate(took(arm)), ratio(took(NEVER), took(arm))
    record.results[f"{size} tokens, {arm}"] = faster
    ms = times.median / 1e6
    return [
        str(size),
        arm,
        f"{ms:,.0f}",
        f"{size / ms * 1e3:.1f}",
        f"{faster.median:.2f}",
        interval(faster),
    ]


if __name__ == "__main__":
    main()
