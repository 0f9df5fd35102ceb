"""Many clients at once, a third of which hang up early, for as long as you like.

    python -m bench.serve_load MODEL.gguf --clients 50 --minutes 10

Starts `slotwise serve` as a process of its own and looks at it from outside: what it answered
(200, 429, or a client's own hang-up, and nothing else); that every request it took left one record
whose ledger adds up, those of hang-ups too; that at the end nothing runs or waits; that the server
adds little (its own phases of requests that found no queue); and its memory, beside what it says of
parked conversations, which must stay within their budgets. Memory is judged from the moment when
the budget of RAM was full, or a tenth of the time, whichever is later: give budgets that fill up
(`--option=--park-memory=32MiB`). The last line of standard output is JSON. Exit code 4 if anything
is not as it must be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

WORDS = "the keeper of the lighthouse wrote down wind and waves each night before the lamp was lit"
SIZES = (20, 80, 300)
MIB = 1 << 20
OWN = ("queue", "template", "tokenize", "emit")
MOST_GROWTH = 0.05
"""Of memory, from the end of the warm-up to the end; fewer samples say nothing."""
FEWEST_SAMPLES = 60


@dataclass
class Load:
    """What the clients saw."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    own_ms: list[float] = field(default_factory=list)
    """In the server's own phases; the queue is one of them."""


@dataclass(frozen=True)
class Sample:
    """The server at one moment; bytes, and what it counts."""

    seconds: float
    resident: int
    threads: int
    files: int
    """Open ones, connections included."""
    parked_memory: float
    parked_file: float
    parked_blocks: float


def body_of(dice: random.Random) -> dict[str, Any]:
    words = WORDS.split()
    text = " ".join(dice.choice(words) for _ in range(dice.choice(SIZES)))
    return {
        "messages": [{"role": "user", "content": f"{dice.random()} {text}"}],
        "max_tokens": dice.choice((2, 16, 48)),
        "stream": True,
    }


async def request(
    port: int, body: dict[str, Any], *, hang_up_after: int | None, load: Load
) -> None:
    """One answer, or the beginning of one: so many events, or 0 for not even its status."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        data = json.dumps(body).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        if hang_up_after == 0:
            await asyncio.sleep(body["max_tokens"] / 20)
            load.outcomes["left unread"] += 1
            return
        status = int((await reader.readline()).split()[1])
        if status != 200:
            await reader.read()
            load.outcomes[str(status)] += 1
            if status != 429:
                load.faults.append(f"status {status}")
            await asyncio.sleep(0.2)
            return
        events = 0
        async for line in reader:
            events += line.startswith(b"data: ")
            if hang_up_after is not None and events >= hang_up_after:
                load.outcomes["hung up"] += 1
                return
            if b'"slotwise":' in line:
                note(json.loads(line[6:])["slotwise"]["record"], load)
            elif b'"error":' in line:
                load.faults.append(line.decode()[:200])
        load.outcomes["200"] += 1
    finally:
        writer.close()


def adds_up(record: dict[str, Any], load: Load) -> bool:
    ledger = record["ledger"]
    phases = sum(phase["ns"] for phase in ledger["phases"].values())
    sound = phases == ledger["wall_ns"] and not ledger["counted_twice_ns"]
    if not sound:
        load.faults.append(f"the ledger of {record['request']} does not add up")
    return sound


def note(record: dict[str, Any], load: Load) -> None:
    adds_up(record, load)
    ledger = record["ledger"]
    phases = {name: phase["ns"] for name, phase in ledger["phases"].items()}
    load.ttft_ms.append(ledger["wall_ns"] / 1e6)
    load.own_ms.append(sum(phases.get(name, 0) for name in OWN) / 1e6)


async def client(port: int, seed: int, end: float, load: Load) -> None:
    dice = random.Random(seed)
    while time.monotonic() < end:
        hang_up = dice.randrange(0, 6) if dice.random() < 1 / 3 else None
        try:
            await request(port, body_of(dice), hang_up_after=hang_up, load=load)
        except (OSError, asyncio.IncompleteReadError, IndexError) as error:
            load.faults.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(0.5)


class Watch:
    """Looks at the server while others load it."""

    def __init__(self, port: int, pid: int, load: Load) -> None:
        self._port, self._pid, self._load = port, pid, load
        self.samples: list[Sample] = []
        self.checked: Counter[str] = Counter()
        """Records that were seen to add up, by how their requests ended."""
        self._seen: set[str] = set()

    async def until(self, end: float) -> None:
        begun = time.monotonic()
        while time.monotonic() < end:
            self.samples.append(self._sample(time.monotonic() - begun, await self.metrics()))
            await self.records()
            await asyncio.sleep(1.0)

    def _sample(self, seconds: float, now: dict[str, float]) -> Sample:
        process = Path(f"/proc/{self._pid}")
        return Sample(
            seconds,
            resident=int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
            threads=len(list((process / "task").iterdir())),
            files=len(list((process / "fd").iterdir())),
            parked_memory=now['slotwise:parked_bytes{where="memory"}'],
            parked_file=now['slotwise:parked_bytes{where="file"}'],
            parked_blocks=now["slotwise:parked_blocks"],
        )

    async def metrics(self) -> dict[str, float]:
        text = (await get(self._port, "/metrics")).decode()
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

    async def records(self) -> int:
        """Checks the records that are new; returns how many requests have not ended."""
        data = json.loads(await get(self._port, "/v1/requests"))
        for entry in data["data"]:
            if entry["request"] not in self._seen:
                self._seen.add(entry["request"])
                if adds_up(entry["record"], self._load):
                    self.checked[entry["state"]] += 1
        return len(data["running"])

    async def come_to_rest(self) -> None:
        for _ in range(600):
            if not await self.records():
                return
            await asyncio.sleep(0.1)
        self._load.faults.append("requests run or wait although all clients have gone")

    def count(self, now: dict[str, float], sent: Counter[str]) -> dict[str, int]:
        """Requests by how they ended, as the server counts them; none may be missing. Of those
        that hung up before they read anything, it may never have seen some."""
        name = 'slotwise:request_success_total{finished_reason="'
        ended = {k[len(name) : -2]: int(v) for k, v in now.items() if k.startswith(name)}
        least, most = sent.total() - sent["left unread"], sent.total()
        if not least <= sum(ended.values()) <= most or ended.get("failed"):
            self._load.faults.append(f"{ended} ended, of {dict(sent)}")
        return ended


async def get(port: int, path: str) -> bytes:
    """The body of a response that must be 200."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(
            f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
        )
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        if head.split()[1] != b"200":
            raise OSError(f"{path}: {head.splitlines()[0].decode()}")
        return body
    finally:
        writer.close()


async def one_by_one(port: int, count: int) -> Load:
    """Requests that find no queue."""
    load, dice = Load(), random.Random(0)
    for _ in range(count):
        body = {**body_of(dice), "max_tokens": 2}
        await request(port, body, hang_up_after=None, load=load)
    return load


def start(model: Path, options: list[str]) -> tuple[subprocess.Popen[str], int]:
    program = [sys.executable, "-c", "from slotwise.cli import entry; entry()", "serve"]
    child = subprocess.Popen(
        [*program, str(model), "--port", "0", *options], stderr=subprocess.PIPE, text=True
    )
    assert child.stderr is not None
    for line in child.stderr:
        if found := re.search(r":(\d+) is ready", line):
            return child, int(found[1])
    raise SystemExit(f"the server did not start: exit code {child.wait()}")


def after_warm_up(samples: list[Sample]) -> list[Sample]:
    """From when as much was parked in RAM as is usual later, or a tenth of the time."""
    usual = median([sample.parked_memory for sample in samples] or [0.0])
    full = next((i for i, s in enumerate(samples) if s.parked_memory >= 0.9 * usual), 0)
    return samples[max(full, len(samples) // 10) :]


def growth(samples: list[Sample]) -> tuple[float, float] | None:
    """Of memory after the warm-up: (the last quarter's peak by the first's, less 1; MiB a minute by
    least squares). None for a run that is too short to tell."""
    rest = after_warm_up(samples)
    if len(rest) < FEWEST_SAMPLES:
        return None
    cut = len(rest) // 4
    early, late = (max(s.resident for s in part) for part in (rest[:cut], rest[-cut:]))
    slope = linear_regression([s.seconds for s in rest], [s.resident for s in rest]).slope
    return late / early - 1, slope * 60 / MIB


def memory_report(samples: list[Sample]) -> dict[str, Any]:
    rest, grown = after_warm_up(samples), growth(samples)
    shown = samples[:: max(1, len(samples) // 60)]
    names = ("resident", "parked_memory", "parked_file")
    return {
        "warm_after_s": round(rest[0].seconds, 1) if rest else None,
        "growth": round(grown[0], 4) if grown else None,
        "mib_per_minute": round(grown[1], 3) if grown else None,
        "most_threads": max((s.threads for s in samples), default=None),
        "most_files": max((s.files for s in samples), default=None),
        "most_parked_blocks": max((s.parked_blocks for s in samples), default=None),
        "columns": ["seconds", *(f"{name}_mib" for name in names)],
        "samples": [
            [round(s.seconds), *(round(getattr(s, name) / MIB, 1) for name in names)] for s in shown
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--option", action="append", default=[], help="for `slotwise serve`")
    chosen = parser.parse_args()
    child, port = start(chosen.model, chosen.option)
    try:
        report = asyncio.run(drive(chosen, child.pid, port))
    finally:
        child.send_signal(signal.SIGTERM)
        code = child.wait(60)
    report["exit_code"] = code
    report["sound"] = bool(report["sound"]) and code == 0
    print(json.dumps(report))
    return 0 if report["sound"] else 4


async def drive(chosen: argparse.Namespace, pid: int, port: int) -> dict[str, Any]:
    alone, load = await one_by_one(port, 30), Load()
    watch = Watch(port, pid, load)
    end = time.monotonic() + 60 * chosen.minutes
    clients = (client(port, seed, end, load) for seed in range(chosen.clients))
    await asyncio.gather(watch.until(end), *clients)
    await watch.come_to_rest()
    ended = watch.count(await watch.metrics(), load.outcomes + alone.outcomes)
    faults, memory = load.faults + alone.faults, memory_report(watch.samples)
    return {
        "clients": chosen.clients,
        "minutes": chosen.minutes,
        "options": chosen.option,
        "outcomes": dict(load.outcomes),
        "ended": ended,
        "ledgers_that_add_up": dict(watch.checked),
        "faults": Counter(faults).most_common(5),
        "ttft_ms_median": round(median(load.ttft_ms), 1) if load.ttft_ms else None,
        "added_ms_median": round(median(alone.own_ms), 3) if alone.own_ms else None,
        "memory": memory,
        "sound": not faults and (memory["growth"] or 0.0) < MOST_GROWTH,
    }


if __name__ == "__main__":
    sys.exit(main())
