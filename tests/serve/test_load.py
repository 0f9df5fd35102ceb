"""Many clients at once, a third of which hang up: `bench.serve_load`, short here and long there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("clients", "minutes"),
    [(8, 0.05), pytest.param(50, 10, marks=pytest.mark.deep)],
    ids=["short", "long"],
)
def test_every_request_ends_in_order(talking: Path, clients: int, minutes: float) -> None:
    options = [f"--option={o}" for o in ("--threads=1", "--memory=64MiB", "--queue=6")]
    done = subprocess.run(
        [sys.executable, "-m", "bench.serve_load", str(talking), "--clients", str(clients),
         "--minutes", str(minutes), *options],
        cwd=HOUSE, capture_output=True, text=True, check=False, env={**os.environ},
    )  # fmt: skip
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["faults"] == []
    assert set(report["outcomes"]) <= {"200", "429", "hung up"}
    assert report["outcomes"]["200"] > 0
    assert report["sound"], report
    assert done.returncode == 0
