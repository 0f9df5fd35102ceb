"""The examples on the pages run.

In a block marked ``console`` every line that begins with ``$ slotwise`` is run, one page after the
other in a folder of its own, where the demo's files are a tiny model. Lines that begin with ``> ``
are typed to it. It must end with 0, or with what the lines ``$ echo $?`` and a number say. The
output on the page is from the real model and is not compared. A block marked ``text`` is not run.
Blocks marked ``python`` are run too (those of docs/trace.md in tests/trace; the examples of
docs/ladder.md need a server and are run in tests/ladder).
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from house.talking_model import write_talking_model
from house.tree import HOUSE, Block, blocks, pages

TESTED_ELSEWHERE = (HOUSE / "docs" / "trace.md", HOUSE / "docs" / "ladder.md")
PAGES = [page for page in pages() if page not in TESTED_ELSEWHERE]
PYTHON = [block for page in PAGES for block in blocks(page, "python")]
DEMO_FILES = ("demo/smollm2-32x4.gguf", "demo/smollm2-mirror.gguf")
PROGRAM = "from slotwise.cli import entry; entry()"
TEXT = "The keeper of the lighthouse wrote down the wind and the waves.\n" * 20


@dataclass(frozen=True)
class Call:
    """One command of a page, what is typed to it, and the exit code it should end with."""

    command: str
    typed: str
    exit_code: int

    def arguments(self) -> list[str]:
        return shlex.split(self.command, comments=True)[1:]


def calls(text: str) -> Iterator[Call]:
    """The `$ slotwise` lines of a block; a line that ends in a backslash goes on in the next."""
    lines = text.replace("\\\n", " ").splitlines()
    for number, line in enumerate(lines):
        if line.startswith("$ slotwise"):
            after = list(_until_next_command(lines[number + 1 :]))
            typed = "".join(f"{said[2:]}\n" for said in after if said.startswith("> "))
            yield Call(line.removeprefix("$ "), typed, _exit_code(lines[number + 1 + len(after) :]))


def _until_next_command(lines: list[str]) -> Iterator[str]:
    for line in lines:
        if line.startswith("$ "):
            return
        yield line


def _exit_code(lines: list[str]) -> int:
    return int(lines[1]) if lines[:1] == ["$ echo $?"] else 0


@pytest.fixture(scope="module")
def talking_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_talking_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture
def desk(talking_model: Path, tmp_path: Path) -> Path:
    """A folder with what the pages' examples work on."""
    for name in DEMO_FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(talking_model, tmp_path / name)
    (tmp_path / "letters.txt").write_text(TEXT)
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_on_the_page_run(page: Path, desk: Path) -> None:
    for block in blocks(page, "console"):
        for call in calls(block.text):
            done = subprocess.run(
                [sys.executable, "-c", PROGRAM, *call.arguments()],
                cwd=desk, input=call.typed, capture_output=True, text=True, timeout=60,
            )  # fmt: skip
            assert done.returncode == call.exit_code, f"{block}: {call.command}\n{done.stderr}"


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_on_the_page_runs(block: Block, desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)
    exec(compile(block.text, str(block), "exec"), {"__name__": "example"})


def test_commands_are_read_as_the_page_means_them() -> None:
    text = "$ cp a b\n$ slotwise chat x \\\n    --seed 1  # why\n> Hello\nHi\n$ echo $?\n130\n"
    (call,) = calls(text)
    assert call.arguments() == ["chat", "x", "--seed", "1"]
    assert (call.typed, call.exit_code) == ("Hello\n", 130)


def test_the_pages_have_examples() -> None:
    commands = [c.command for page in PAGES for b in blocks(page, "console") for c in calls(b.text)]
    shown = {re.match(r"slotwise (trace export|\w+)", command)[1] for command in commands}  # type: ignore[index]
    assert shown >= {"check", "pack", "profile", "run", "chat", "trace export"}


def test_code_shown_from_a_file_is_what_the_file_holds() -> None:
    """A python block that begins with a path shows that file, but for its docstring."""
    shown = [(found[1], b) for b in PYTHON if (found := re.match(r"# ([\w/]+\.py)\n", b.text))]
    assert shown
    for path, block in shown:
        assert block.text.partition("\n")[2].strip() in (HOUSE / path).read_text(), block
