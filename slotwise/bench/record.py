"""The JSON record of one benchmark run: where, with what, every sample, and what it adds up to."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from slotwise import __version__
from slotwise.bench.stats import Estimate

SCHEMA = "slotwise.bench/v1"
PACKAGES = ("ggml-python", "numpy", "gguf", "tokenizers", "scipy")
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Check:
    """Something the run must show."""

    name: str
    wanted: str
    found: str
    passed: bool


@dataclass(kw_only=True)
class BenchRecord:
    """Made when the run starts, filled as it goes, written by `write`."""

    bench: str
    settings: Mapping[str, Any]
    workers: dict[str, Any] = field(default_factory=dict)
    """What every measured process says of itself."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Every measurement, in the order in which it was made."""
    results: dict[str, Estimate] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    """Results that could not be had, and why."""
    how: dict[str, str] = field(default_factory=dict)
    """How the fields of `samples` and the `results` were obtained."""
    checks: list[Check] = field(default_factory=list)
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    load_at_start: Sequence[float] = field(default_factory=os.getloadavg)
    git: dict[str, Any] = field(default_factory=lambda: _git())
    """What was measured, not what the checkout holds by the end."""

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def check(self, name: str, *, wanted: str, found: str, passed: bool) -> None:
        self.checks.append(Check(name=name, wanted=wanted, found=found, passed=passed))

    def to_dict(self) -> dict[str, Any]:
        """Ends the run: the load average of now goes in."""
        return {
            "schema": SCHEMA,
            "bench": self.bench,
            "started": self.started,
            "ended": datetime.now(UTC).isoformat(timespec="seconds"),
            "slotwise": __version__,
            "git": self.git,
            "machine": {
                **_machine(),
                "load_at_start": list(self.load_at_start),
                "load_at_end": list(os.getloadavg()),
            },
            "software": _software(),
            "settings": dict(self.settings),
            "workers": self.workers,
            "samples": self.samples,
            "results": {name: asdict(estimate) for name, estimate in self.results.items()},
            "missing": self.missing,
            "how": self.how,
            "checks": [asdict(check) for check in self.checks],
        }

    def write(self, folder: Path) -> tuple[Path, dict[str, Any]]:
        """Writes the record under `folder`; its path and its content."""
        data = self.to_dict()
        folder.mkdir(parents=True, exist_ok=True)
        stamp = self.started.replace(":", "").replace("-", "")[:15]
        path = folder / f"{self.bench}-{stamp}.json"
        path.write_text(json.dumps(data, indent=1) + "\n")
        return path, data


def _machine() -> dict[str, Any]:
    cpu = Path("/proc/cpuinfo").read_text()
    model = next((ln.split(":", 1)[1].strip() for ln in cpu.splitlines() if "model name" in ln), "")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "system": platform.platform(),
    }


def _software() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _git() -> dict[str, Any]:
    """Revision and whether tracked files differ from it; nulls outside a checkout."""
    try:
        revision = _run_git("rev-parse", "HEAD")
        return {"revision": revision, "dirty": bool(_run_git("status", "-s", "-uno"))}
    except (OSError, subprocess.CalledProcessError):
        return {"revision": None, "dirty": None}


def _run_git(*args: str) -> str:
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
