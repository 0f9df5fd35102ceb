"""How fast `slotwise explain` reads a log, and how much memory it takes doing so.

    python -m bench.explain_speed [--mb 200] [--windows 300]

Writes a Strata log of that size to a temporary file (most of it decode windows, as in real
traces), reads it once in this process, and prints one JSON line: MB/s on one core, requests,
and the peak of resident memory. Nothing but the reader is inside the clock.
"""

from __future__ import annotations

import json
import random
import resource
import tempfile
from pathlib import Path
from time import perf_counter, process_time

import click

from slotwise.explain.readers import read_files


def request_lines(prompt: int, windows: int, rng: random.Random) -> str:
    """One traced request with its summary, in Strata's format."""
    read = prompt - 1
    refill, batched = 99.0 + rng.random(), 500.0 + read * 0.7
    lines = [
        f"request {prompt} 0",
        f"prompt start {read} -1",
        "lent 311 slots for 256 tokens in 0.1 ms",
        f"prompt chunk 0 of {read}",
        f"read {read} tokens (batched) in {batched:.1f} ms",
        "refill start 311 -1",
        f"refilled 311 slots on 1 stage(s) in {refill:.1f} ms",
        "prompt done (slots refilled) -1 -1",
    ]
    position, rows, offered = read, 1, -windows
    for _ in range(windows):
        lines.append(f"window {position} {rows}")
        offered += rows
        position += rng.randint(1, rows)
        rows = rng.randint(1, 6)
    trace = "".join(f"strata trace: {line}\n" for line in lines)
    return (
        f"{trace}strata serve: prompt {prompt} tokens = 0 reused + {prompt} read in "
        f"{batched + refill + 38:.0f} ms (200.0 tok/s), 512 generated in 5591 ms (91.6 tok/s), "
        f"drafts accepted 166 of {offered}, 1 checkpoints\n"
    )


def write_log(path: Path, size: int, windows: int) -> None:
    rng = random.Random(1)
    blocks = [request_lines(rng.randint(100, 4000), windows, rng) for _ in range(50)]
    written = 0
    with path.open("w", encoding="ascii", newline="\n") as log:
        while written < size:
            written += log.write(rng.choice(blocks))


@click.command()
@click.option("--mb", default=200, show_default=True, help="Size of the log in 10^6 bytes.")
@click.option("--windows", default=300, show_default=True, help="Decode windows per request.")
def main(mb: int, windows: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "engine.log"
        write_log(path, mb * 1_000_000, windows)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start, cpu = perf_counter(), process_time()
        reading = read_files([path])
        seconds, cpu = perf_counter() - start, process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    requests = sum(len(life.requests) for life in reading.lives)
    click.echo(
        json.dumps(
            {
                "bytes": reading.bytes,
                "lines": reading.lines,
                "requests": requests,
                "seconds": round(seconds, 3),
                "mb_per_s": round(reading.bytes / seconds / 1e6, 1),
                "mb_per_cpu_s": round(reading.bytes / cpu / 1e6, 1),
                "peak_growth_mb": round((peak - before) / 1024, 1),
                "warnings": sum(len(r.warnings) for life in reading.lives for r in life.requests),
                "unknown_lines": sum(reading.unknown.values()),
            }
        )
    )


if __name__ == "__main__":
    main()
