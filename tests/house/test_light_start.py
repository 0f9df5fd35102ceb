"""The kit and every `--help` work where none of the engine's libraries are installed."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import click
import pytest
from house.cli_tree import commands
from house.tree import HOUSE

EXTRA = tomllib.loads((HOUSE / "pyproject.toml").read_text())["project"]["optional-dependencies"]
ENGINE_PACKAGES = {
    re.split(r"[=<>]", line)[0].removesuffix("-python").replace("-", "_")
    for line in EXTRA["engine"]
}

BLOCKED = """
import sys
from importlib.abc import MetaPathFinder

class Blocker(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in %r:
            raise ModuleNotFoundError(f"blocked: {name}", name=name)

sys.meta_path.insert(0, Blocker())
"""


def run_blocked(code: str) -> subprocess.CompletedProcess[str]:
    program = BLOCKED % sorted(ENGINE_PACKAGES) + code
    return subprocess.run(
        [sys.executable, "-c", program], cwd=HOUSE, capture_output=True, text=True, check=False
    )


def test_the_extra_names_the_libraries_that_are_imported() -> None:
    server = {"starlette", "uvicorn", "pydantic", "prometheus_client"}
    assert {"ggml", "gguf", "threadpoolctl", "tokenizers", "zlib_ng"} | server == ENGINE_PACKAGES


@pytest.mark.parametrize("library", sorted(ENGINE_PACKAGES))
def test_the_blocker_blocks(library: str) -> None:
    assert f"blocked: {library}" in run_blocked(f"import {library}").stderr


def test_the_kit_imports_without_the_engine_s_libraries() -> None:
    done = run_blocked("import slotwise, slotwise.trace, slotwise.errors, slotwise.trace.report")
    assert done.returncode == 0, done.stderr


def test_every_help_is_shown_without_the_engine_s_libraries() -> None:
    calls = [[*command.path, "--help"] for command in commands()]
    done = run_blocked(
        f"from slotwise.cli import main\nfor call in {calls!r}:\n    assert main(call) == 0, call"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: slotwise") == len(calls)


def test_the_engine_s_absence_is_an_error_with_a_next_step() -> None:
    model = HOUSE / "pyproject.toml"  # any file: the libraries are missed before it is opened
    done = run_blocked(f"from slotwise.cli import main\nsys.exit(main(['check', {str(model)!r}]))")
    assert done.returncode == 1
    assert "slotwise[engine]" in done.stderr
    assert "Traceback" not in done.stderr


def test_commands_were_found() -> None:
    assert {" ".join(c.path) for c in commands()} >= {"", "run", "trace export"}
    assert all(isinstance(c.command, click.Command) for c in commands())
