"""Many clients at once, a third of which hang up in the middle, for as long as you like.

    python -m bench.serve_load MODEL.gguf --clients 50 --minutes 10

Starts `slotwise serve` as a process of its own and reports what it answered: it must be 200, 429
or a client's own hang-up. Every ledger must close, memory must not grow, and the server must add
little: by its own phases, the time of a request before the engine (parsing, template, tokens) and
after it (`emit`), for requests that found no queue. The last line of standard output is JSON.
Exit code 4 if anything is not as it must be.
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
from statistics import median
from typing import Any

WORDS = "the keeper of the lighthouse wrote down wind and waves each night before the lamp was lit"
SIZES = (20, 80, 300)
OWN = ("queue", "template", "tokenize", "emit")
MOST_GROWTH = 0.10
"""Of memory, between a tenth of the time and the end."""


@dataclass
class Load:
    """What the clients saw."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    own_ms: list[float] = field(default_factory=list)
    """In the server's own phases; the queue is one of them."""
    rss: list[tuple[float, int]] = field(default_factory=list)


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
    """One answer, or the beginning of one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        data = json.dumps(body).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        status = int((await reader.readline()).split()[1])
        if status != 200:
            await reader.read()
            load.outcomes[str(status)] += 1
            if status != 429:
                load.faults.append(f"status {status}")
            elif hang_up_after is None:
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


def note(record: dict[str, Any], load: Load) -> None:
    ledger = record["ledger"]
    phases = {name: phase["ns"] for name, phase in ledger["phases"].items()}
    if sum(phases.values()) != ledger["wall_ns"] or ledger["counted_twice_ns"]:
        load.faults.append(f"the ledger of {record['request']} does not add up")
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


async def watch(pid: int, end: float, load: Load) -> None:
    begun = time.monotonic()
    while time.monotonic() < end:
        load.rss.append((time.monotonic() - begun, resident_bytes(pid)))
        await asyncio.sleep(0.5)


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def one_by_one(port: int, count: int) -> list[float]:
    """Milliseconds the server itself took of each request's time to its first token."""
    load, dice = Load(), random.Random(0)
    for _ in range(count):
        body = {**body_of(dice), "max_tokens": 2}
        await request(port, body, hang_up_after=None, load=load)
    return load.own_ms


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


def growth(rss: list[tuple[float, int]]) -> float:
    """Of memory from a tenth of the time to the end, as a share; the peaks are compared."""
    if len(rss) < 20:
        return 0.0
    cut = len(rss) // 10
    early = max(value for _, value in rss[cut : 3 * cut])
    late = max(value for _, value in rss[-2 * cut :])
    return late / early - 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
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
    added = await one_by_one(port, 30)
    load = Load()
    end = time.monotonic() + 60 * chosen.minutes
    clients = (client(port, seed, end, load) for seed in range(chosen.clients))
    await asyncio.gather(watch(pid, end, load), *clients)
    grown = growth(load.rss)
    return {
        "clients": chosen.clients,
        "minutes": chosen.minutes,
        "outcomes": dict(load.outcomes),
        "faults": Counter(load.faults).most_common(5),
        "ttft_ms_median": round(median(load.ttft_ms), 1) if load.ttft_ms else None,
        "added_ms_median": round(median(added), 3) if added else None,
        "memory_growth": round(grown, 4),
        "sound": not load.faults and grown < MOST_GROWTH,
    }


if __name__ == "__main__":
    sys.exit(main())
