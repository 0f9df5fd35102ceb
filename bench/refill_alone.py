"""What a refill policy costs the first 64 tokens, without a prompt read around it.

    python -m bench.refill_alone MODEL [--memory BYTES] [--threads N] [--rounds N]

One engine, one conversation of 128 tokens. In turns A B C C B A: take a loan as large as a
512-token read takes, give it back, then decode 64 tokens from the same place; `blocking` waits for
its refill first, inside the clock. Prints each sample and the paired difference, as JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter_ns

import click
import numpy as np

from slotwise.engine.engine import Engine
from slotwise.engine.settings import EngineSettings
from slotwise.errors import UsageError

POLICIES = ("deferred", "blocking", "lazy")
TOKENS = 64
CONTEXT = 128


def decode_after_loan(engine: Engine, policy: str, tokens: list[int], nbytes: int) -> int:
    """Nanoseconds of a blocking refill, if any, and of 64 tokens after a loan."""
    experts = engine.loaded.experts
    if experts is None:
        raise UsageError("the model has no experts")
    experts.refill_mode = policy
    experts.give_back(experts.lend(nbytes))
    del engine.loaded.state.tokens[CONTEXT:]
    begin = perf_counter_ns()
    if policy == "blocking":
        experts.refill()
    for index, token in enumerate(tokens):
        engine.window(token, CONTEXT + index)
        if policy == "deferred" and index == 0:
            experts.refill()
    return perf_counter_ns() - begin


@click.command()
@click.argument("model", type=click.Path(path_type=Path, exists=True))
@click.option("--memory", type=int, default=1000 << 20, show_default=True)
@click.option("--loan", type=int, default=46 << 20, show_default=True)
@click.option("--threads", type=int, default=1, show_default=True)
@click.option("--rounds", type=int, default=4, show_default=True)
def main(model: Path, memory: int, loan: int, threads: int, rounds: int) -> None:
    """Compare refill policies on MODEL."""
    settings = EngineSettings(memory=memory, threads=threads, context=1024)
    samples: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    with Engine.open(model, settings) as engine:
        n_vocab = engine.loaded.blueprint.architecture.hyper.n_vocab
        tokens = np.random.default_rng(0).integers(n_vocab, size=CONTEXT + TOKENS).tolist()
        engine.read_only(tokens[:CONTEXT])
        for policy in (*POLICIES, *reversed(POLICIES)) * rounds:
            took = decode_after_loan(engine, policy, tokens[CONTEXT:], loan)
            samples[policy].append(took / 1e6)
    paired = np.subtract(samples["deferred"], samples["blocking"])
    error = float(paired.std(ddof=1) / np.sqrt(paired.size)) if paired.size > 1 else None
    print(
        json.dumps(
            {
                "samples_ms": samples,
                "deferred_minus_blocking_ms": float(paired.mean()),
                "standard_error_ms": error,
                "pairs": int(paired.size),
            }
        )
    )


if __name__ == "__main__":
    main()
