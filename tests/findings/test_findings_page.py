"""The worked example of docs/findings.md, run as it stands: the page shows what comes out."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from house.tree import HOUSE, blocks

from slotwise.cli import main

PAGE = HOUSE / "docs" / "findings.md"
EXAMPLE = HOUSE / "docs" / "examples" / "prefill-phase-interpretation.json"


def block(language: str) -> str:
    (only,) = blocks(PAGE, language)
    return only.text


@pytest.fixture
def desk(checkout: Callable[..., tuple[Path, str]], monkeypatch: pytest.MonkeyPatch) -> str:
    """The page's files in a folder; the revision of its checkout."""
    folder, revision = checkout({"refill.c": block("c").encode()})
    monkeypatch.chdir(folder.parent)
    Path("window.log").write_text(block("log"))
    Path("refill.json").write_text(block("json"))
    return revision


def test_the_page_shows_what_its_commands_print(
    desk: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert json.loads(block("json"))["subject"]["revision"] == desk
    code, runs = 0, 0
    for shown in blocks(PAGE, "text"):
        for command, output in calls(shown.text):
            if command == "echo $?":
                assert output == f"{code}\n"
            elif command.startswith("slotwise "):
                code, runs = main(shlex.split(command)[1:]), runs + 1
                assert capfd.readouterr().out == output, command
            else:
                subprocess.run(command, shell=True, check=True)
    assert runs == 3


def calls(text: str) -> list[tuple[str, str]]:
    """(command, what the page shows below it)."""
    return [
        (command, output)
        for command, _, output in (part.partition("\n") for part in text.split("$ ")[1:])
    ] if text.startswith("$ ") else []  # fmt: skip


def test_new_gives_the_page_s_revision_and_checksum(
    desk: str, capfd: pytest.CaptureFixture[str]
) -> None:
    command: str = "findings new --subject-repo engine --evidence window.log"
    assert f"`slotwise {command} -o refill.json`" in PAGE.read_text()
    assert main([*command.split()]) == 0
    made, page = json.loads(capfd.readouterr().out), json.loads(block("json"))
    assert made["subject"] == page["subject"]
    assert made["evidence"][0]["sha256"] == page["evidence"][0]["sha256"]
    assert made["invocation"] == page["invocation"]


def test_the_example_is_rendered_beside_itself(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["findings", "render", str(EXAMPLE)]) == 0
    assert capfd.readouterr().out == EXAMPLE.with_suffix(".md").read_text()


def test_the_example_says_that_its_source_is_not_at_hand(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["findings", "check", str(EXAMPLE), "--json"]) == 3
    report = json.loads(capfd.readouterr().out)
    assert {issue["level"] for issue in report["issues"]} == {"note", "unchecked"}
    unchecked = [i["where"] for i in report["issues"] if i["level"] == "unchecked"]
    assert unchecked == ["subject.revision", *(f"claims[{n}].sources" for n in range(5))]
    quoted = {number["number"] for number in report["numbers"]}
    assert quoted >= {"7,410 tokens", "12,532", "10,285", "7,412", "10,581", "7,413", "12 s"}
    assert all(number["from"].startswith("quoted from") for number in report["numbers"])
