"""What libgomp is told when ggml is loaded, seen from a process that loads it afresh."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SHOW = "import os, slotwise.kernels.backend; print(os.environ.get('GOMP_SPINCOUNT'))"


def shown_by_libgomp(**extra: str) -> str:
    """Its own report of its settings, which it writes when it is loaded."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("GOMP_", "OMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", SHOW],
        env={**clean, "OMP_DISPLAY_ENV": "verbose", **extra},
        capture_output=True,
        text=True,
        check=True,
    )
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("this ggml is not built with libgomp")
    left = done.stdout.strip()
    assert left == extra.get("GOMP_SPINCOUNT", "None")  # processes we start inherit only the user's
    return next(line for line in done.stderr.splitlines() if "GOMP_SPINCOUNT" in line)


def test_its_threads_sleep_soon() -> None:
    assert "'1000'" in shown_by_libgomp()


@pytest.mark.parametrize(
    ("name", "value", "turns"),
    [("GOMP_SPINCOUNT", "77", "'77'"), ("OMP_WAIT_POLICY", "passive", "'0'")],
)
def test_what_the_user_set_stands(name: str, value: str, turns: str) -> None:
    assert turns in shown_by_libgomp(**{name: value})
