"""Whatever bytes a model's header holds, it is refused with a message or runs; the process lives,
and `check` and `run` are of one opinion."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from engine.damaged_models import damage

SCRIPT = Path(__file__).with_name("damaged_models.py")
ROOT = Path(__file__).parents[2]


def check_seeds(model: Path, first: int, count: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, str(SCRIPT), str(model), str(first), str(count)],
        capture_output=True,
        text=True,
        errors="replace",
        env={**environment, "GGML_NO_BACKTRACE": "1"},
    )
    lines = [line.split() for line in result.stdout.splitlines()]
    assert result.returncode == 0, f"ended in the middle of {lines[-1:]}: {result.stderr[-2000:]}"
    assert len(lines) == count
    assert "Traceback" not in result.stderr
    assert "internal error" not in result.stderr
    for seed, check, run in lines:
        assert run in ("0", "1", "2", "3"), seed
        assert (check == "3") == (run == "3"), f"seed {seed}: check says {check}, run {run}"
    assert {run for _, _, run in lines} >= {"0", "3"}, "all the same: the damage is no test"


def test_damaged_models_end_in_a_message(talking: Path) -> None:
    check_seeds(talking, 0, 60)


@pytest.mark.deep
def test_many_damaged_models_end_in_a_message(talking: Path) -> None:
    for first in range(1000, 4000, 500):
        check_seeds(talking, first, 500)


def test_damage_is_repeatable_and_real(talking: Path) -> None:
    data = talking.read_bytes()
    one, again, other = (damage(data, random.Random(seed)) for seed in (1, 1, 2))
    assert one == again
    assert len({data, one, other}) == 3
