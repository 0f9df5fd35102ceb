"""`slotwise findings` from the outside: files, standard streams, exit codes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from slotwise.cli import main

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "prefill-phase-interpretation.json"


@pytest.fixture(autouse=True)
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_nothing_is_written_over_without_force(capfd: pytest.CaptureFixture[str]) -> None:
    for command in (["new"], ["render", str(EXAMPLE)]):
        out = Path(f"{command[0]}.out")
        assert main(["findings", *command, "-o", str(out)]) == 0
        before = out.read_text()
        out.write_text("mine")
        assert main(["findings", *command, "-o", str(out)]) == 2
        assert "--force" in capfd.readouterr().err
        assert out.read_text() == "mine"
        assert main(["findings", *command, "-o", str(out), "--force"]) == 0
        assert out.read_text() == before


def test_a_new_record_is_valid_and_asks_to_be_filled_in(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["findings", "new", "-o", "r.json"]) == 0
    assert main(["findings", "check", "r.json", "--json"]) == 4
    issues = json.loads(capfd.readouterr().out)["issues"]
    assert {i["found"] for i in issues} == {"is still to be written"}
    assert "subject.revision" in {i["where"] for i in issues}


def test_a_new_record_takes_revision_and_remote_without_its_password(
    checkout: Callable[..., tuple[Path, str]], capfd: pytest.CaptureFixture[str]
) -> None:
    folder, revision = checkout({"a": b"1"})
    remote = ["git", "-C", str(folder), "remote", "add", "origin", "https://me:pw@example.org/x"]
    subprocess.run(remote, check=True)
    assert main(["findings", "new", "--subject-repo", str(folder)]) == 0
    subject = json.loads(capfd.readouterr().out)["subject"]
    assert subject == {"repository": "https://example.org/x", "revision": revision}


def test_new_refuses_what_it_cannot_name(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.log").write_text("1")
    assert main(["findings", "new", "--evidence", "a.log", "-o", "sub/r.json"]) == 2
    assert "does not lie in the record's folder" in capfd.readouterr().err
    assert main(["findings", "new", "--subject-repo", "sub"]) == 2
    assert "git cannot read sub" in capfd.readouterr().err


def test_a_record_comes_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(EXAMPLE.read_bytes())))
    assert main(["findings", "render", "-"]) == 0
    assert capfd.readouterr().out == EXAMPLE.with_suffix(".md").read_text()


def test_an_invalid_record_is_not_rendered(capfd: pytest.CaptureFixture[str]) -> None:
    Path("r.json").write_text('{"schema": "slotwise.findings/v1", "claim": []}')
    assert main(["findings", "render", "r.json"]) == 4
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "problem: claim: unknown key; did you mean 'claims'?" in shown.err


def test_a_record_cannot_steer_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    record = json.loads(EXAMPLE.read_text())
    record["subject"]["missing"]["revision"] = "\x1b[2J\nproblem: none \ud800"
    Path("r.json").write_text(json.dumps(record))
    assert main(["findings", "check", "r.json"]) == 3
    shown = capfd.readouterr().out
    assert "is missing: \\x1b[2J\\nproblem: none \\ud800" in shown
    assert main(["findings", "render", "r.json"]) == 0


def test_help_loads_no_library_that_computes() -> None:
    code = (
        "import sys\nfrom slotwise.cli import main\nmain(['findings', '--help'])\n"
        "main(['findings', 'check', sys.argv[1]])\n"
        "sys.exit(bool({'numpy', 'scipy', 'ggml', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(EXAMPLE)],
        cwd=Path(__file__).parents[2], capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
