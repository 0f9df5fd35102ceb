"""docs/trace.md: its examples run, and its table lists the phases there are."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from slotwise.trace import PHASES
from slotwise.trace.events import EVENT_TYPES

PAGE = Path(__file__).parents[2] / "docs" / "trace.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("code", blocks("python"))
def test_python_examples_run(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, str(PAGE), "exec"), {})


@pytest.mark.parametrize("block", blocks("console"))
def test_console_examples_run(block: str) -> None:
    for line in block.splitlines():
        program, *arguments = shlex.split(line.removeprefix("$ "))
        assert program == "python"
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_there_are_examples() -> None:
    assert len(blocks("python")) == 2
    assert len(blocks("console")) == 1


def test_every_phase_is_explained_in_order() -> None:
    section = PAGE.read_text().split("## Phases")[1].split("##")[0]
    assert tuple(re.findall(r"^\| `([a-z_.]+)` \|", section, flags=re.MULTILINE)) == PHASES


def test_every_event_is_named() -> None:
    text = PAGE.read_text()
    for event in EVENT_TYPES:
        assert f"`{event.type}`" in text
