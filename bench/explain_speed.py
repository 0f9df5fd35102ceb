"""How fast `slotwise explain` reads a Strata log on one core, and in how much memory.

    python -m bench.explain_speed [--windows 100,300,1500] [--small 100] [--large 1000]

Makes logs from a real request of the tests' data, with other numbers in every request and as many
decode windows as asked for. Each reading is a process of its own: it reads the file (the clock
says MB/s), makes the summary, and prints the table to nowhere. The small log is read several
times, the large one once. Writes a record into bench/out.
"""

from __future__ import annotations

import json
import random
import re
import resource
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import click

from slotwise.bench.record import BenchRecord
from slotwise.bench.stats import estimate

DATA = Path(__file__).parents[1] / "tests/data/explain/strata-notmike101-P023"
START = "strata trace: request "
WANTED_MB_PER_S = 100.0
WANTED_GROWTH_MIB = 24.0
DIFFERENT = 400
"""Requests made; the log repeats them in random order."""


def real_request() -> tuple[list[str], list[str]]:
    """Lines before and after the windows of one new request of a real log."""
    text = (DATA / "engine-session.thinned.txt").read_text().replace("\r\n", "\n")
    parts = re.split(r"(?:strata trace: window \d+ \d+\n)+", text)
    for before, after in pairwise(parts):
        head = START + before.rpartition(START)[2]
        tail = after.partition(START)[0]
        if "(batched)" in head and " = 0 reused + " in tail and "capturing" not in head:
            return head.splitlines(), tail.splitlines()
    raise ValueError("no new request with all its lines in the tests' data")


def made_request(head: list[str], tail: list[str], windows: int, rng: random.Random) -> str:
    """The request with other times and sizes, and windows that fit its summary line."""
    prompt = rng.randint(200, 4000)
    read = prompt - 1 - 4
    times = {"(batched)": 250 + 0.7 * read, "refilled": 99.0, "(windows)": 42.0}
    times = {name: ms * rng.uniform(0.97, 1.03) for name, ms in times.items()}
    lines = []
    for line in head:
        line = re.sub(r"(request|policy:) \d+", rf"\1 {prompt}", line)
        line = (
            re.sub(r"start \d+ -1", f"start {prompt - 1} -1", line) if "prompt st" in line else line
        )
        line = re.sub(r"chunk 0 of \d+", f"chunk 0 of {read}", line)
        line = re.sub(r"read \d+ tokens \(batched", f"read {read} tokens (batched", line)
        for name, ms in times.items():
            if name in line:
                line = re.sub(r"[\d.]+ ms", f"{ms:.1f} ms", line)
        lines.append(line)
    position, rows, offered = prompt - 1, 1, -windows
    for _ in range(windows):
        lines.append(f"strata trace: window {position} {rows}")
        offered += rows
        position += rng.randint(1, rows)
        rows = rng.randint(1, 6)
    total = sum(times.values()) + rng.uniform(35, 55)
    for line in tail:
        line = re.sub(
            r"prompt \d+ tokens = 0 reused \+ \d+ read in \d+ ms",
            f"prompt {prompt} tokens = 0 reused + {prompt} read in {total:.0f} ms", line,
        )  # fmt: skip
        lines.append(
            re.sub(r"(drafts accepted \d+) of \d+, (\d+ ch)", rf"\1 of {offered}, \2", line)
        )
    return "".join(f"{line}\n" for line in lines)


def write_log(path: Path, nbytes: int, windows: int) -> None:
    rng = random.Random(windows)
    head, tail = real_request()
    made = [made_request(head, tail, windows, rng).encode() for _ in range(DIFFERENT)]
    written = 0
    with path.open("wb") as log:
        while written < nbytes:
            written += log.write(rng.choice(made))


def read_once(path: Path) -> dict[str, Any]:
    """What the child process does: read, sum up, render; with clocks and peak memory."""
    import os

    from rich.console import Console

    from slotwise.explain.readers import read_files
    from slotwise.explain.report import explained
    from slotwise.explain.summary import explain

    start, cpu = perf_counter(), process_time()
    reading = read_files([path])
    seconds, cpu = perf_counter() - start, process_time() - cpu
    start = perf_counter()
    result = explain(reading)
    with Path(os.devnull).open("w") as nowhere:
        Console(file=nowhere).print(explained(result))
    rest = perf_counter() - start
    return {
        "bytes": reading.bytes,
        "lines": reading.lines,
        "requests": sum(len(life.requests) for life in reading.lives),
        "unknown_lines": sum(reading.unknown.values()),
        "warnings": sum(len(r.warnings) for r in reading.lives[0].requests[:500]),
        "mb_per_s": reading.bytes / seconds / 1e6,
        "mb_per_cpu_s": reading.bytes / cpu / 1e6,
        "summary_and_table_s": rest,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def measure(path: Path) -> dict[str, Any]:
    """`read_once` in a fresh process, so that peaks do not mix."""
    command = [sys.executable, "-W", "ignore", "-m", "bench.explain_speed", "--read", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def measure_windows(record: BenchRecord, windows: int, *, mb: tuple[int, int], runs: int) -> None:
    """Both logs of one window count: samples, results and checks into the record."""
    for size, times in zip(mb, (runs, 1), strict=True):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "engine.log"
            write_log(path, size * 1_000_000, windows)
            found = [measure(path) for _ in range(times)]
        record.samples += [{"windows": windows, "mb": size, **sample} for sample in found]
        for key in ("mb_per_s", "mb_per_cpu_s", "summary_and_table_s", "peak_rss_mib"):
            record.results[f"{windows} windows, {size} MB, {key}"] = estimate(
                [sample[key] for sample in found]
            )
    peaks = [record.results[f"{windows} windows, {size} MB, peak_rss_mib"].median for size in mb]
    speed = record.results[f"{windows} windows, {mb[1]} MB, mb_per_cpu_s"].median
    record.check(
        f"{windows} windows: speed", wanted=f"{WANTED_MB_PER_S:.0f} MB/s",
        found=f"{speed:.1f} MB/s", passed=speed >= WANTED_MB_PER_S,
    )  # fmt: skip
    record.check(
        f"{windows} windows: memory", wanted=f"within {WANTED_GROWTH_MIB:.0f} MiB of the small log",
        found=f"{peaks[0]:.1f} and {peaks[1]:.1f} MiB",
        passed=peaks[1] - peaks[0] <= WANTED_GROWTH_MIB,
    )  # fmt: skip


@click.command()
@click.option("--windows", default="100,300,1500", show_default=True, help="Per request.")
@click.option("--small", default=100, show_default=True, help="10^6 bytes; read `--runs` times.")
@click.option("--large", default=1000, show_default=True, help="10^6 bytes; read once.")
@click.option("--runs", default=5, show_default=True)
@click.option("--read", "read_path", type=click.Path(path_type=Path), hidden=True)
def main(windows: str, small: int, large: int, runs: int, read_path: Path | None) -> None:
    """Measure how fast logs are read, and in how much memory."""
    if read_path is not None:
        click.echo(json.dumps(read_once(read_path)))
        return
    settings = {"windows": windows, "small_mb": small, "large_mb": large, "runs": runs}
    record = BenchRecord(bench="explain_speed", settings=settings)
    record.how = {
        "mb_per_s": "bytes of the log / wall time of read_files, one thread",
        "mb_per_cpu_s": "the same over the process's CPU time, for machines that are not alone",
        "peak_rss_mib": "the kernel's peak of the process, summary and table included",
    }
    for count in map(int, windows.split(",")):
        measure_windows(record, count, mb=(small, large), runs=runs)
    path, data = record.write(Path(__file__).parent / "out")
    click.echo(json.dumps({"results": data["results"], "checks": data["checks"]}, indent=1))
    click.echo(f"written to {path}")
    sys.exit(0 if record.passed else 1)


if __name__ == "__main__":
    main()
