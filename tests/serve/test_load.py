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
def test_every_request_ends_in_order(
    talking: Path, clients: int, minutes: float, tmp_path: Path
) -> None:
    parked = ("--park-memory=16MiB", "--park-disk=32MiB", f"--park-folder={tmp_path}")
    options = [f"--option={o}" for o in ("--threads=1", "--memory=64MiB", "--queue=6", *parked)]
    done = subprocess.run(
        [sys.executable, "-m", "bench.serve_load", str(talking), "--clients", str(clients),
         "--minutes", str(minutes), *options],
        cwd=HOUSE, capture_output=True, text=True, check=False, env={**os.environ},
    )  # fmt: skip
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["faults"] == []
    assert set(report["outcomes"]) <= {"200", "429", "hung up", "left unread"}
    assert report["outcomes"]["200"] > 0
    assert set(report["ended"]) <= {"done", "cancelled", "refused"}
    assert report["ledgers_that_add_up"]["done"] > 0
    for _, resident, in_memory, in_file in report["memory"]["samples"]:
        assert in_memory < resident
        assert in_memory <= 17  # the budget, and what the latest request left
        assert in_file <= 32
    if minutes > 1:
        assert report["memory"]["growth"] is not None
        assert max(sample[2] for sample in report["memory"]["samples"]) > 15
    assert report["sound"], report
    assert done.returncode == 0
