"""What goes wrong around a ladder: damaged records, places that cannot be written, bad servers."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ladder.driving import run, with_mode
from ladder.place import PATIENCE, PROGRAM, eventually, free_port
from ladder.small_server import WRONG, SmallServer

from slotwise.cli import main
from slotwise.errors import Refused, UsageError
from slotwise.ladder.client import Client
from slotwise.ladder.identity import answers
from slotwise.ladder.record import new_record, read_record


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with SmallServer() as server:
        return run(tmp_path_factory.mktemp("whole") / "run.json", url=server.url, samples=1)


def written(folder: Path, record: dict[str, Any]) -> Path:
    path = folder / "run.json"
    path.write_text(json.dumps(record))
    return path


@pytest.mark.parametrize(
    "damage",
    [lambda text: "", lambda text: text[:900], lambda text: "[]", lambda text: "null",
     lambda text: "\x00\xff" * 500, lambda text: "[" * 100_000,
     lambda text: text.replace('"index": 0', '"index": ' + "9" * 5000),
     lambda text: text.replace("ladder/v1", "ladder/v2")],
)  # fmt: skip
def test_a_file_that_is_no_record(
    whole: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    damage: Callable[[str], str],
) -> None:  # fmt: skip
    path = tmp_path / "run.json"
    path.write_text(damage(json.dumps(whole)))
    assert main(["ladder", "report", str(path)]) == 4
    assert "internal error" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r["samples"][0].update(engaged=[1]), "does not answer to its arm's counters"),
        (lambda r: r["samples"][0].update(arm="nobody"), "of no arm"),
        (lambda r: r["arms"].append(r["arms"][0]), "two of one name"),
        (lambda r: r["samples"][0].update(token_ms=[1e308]), "a time that is none"),
        (lambda r: r["samples"][0]["edges_ms"].update(first_token=-1.0), "a time that is none"),
    ],
)
def test_a_record_that_contradicts_itself(
    whole: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    change: Callable[[dict[str, Any]], None], message: str,
) -> None:  # fmt: skip
    record = json.loads(json.dumps(whole))
    change(record)
    assert main(["ladder", "report", str(written(tmp_path, record))]) == 4
    assert message in capsys.readouterr().err


def test_a_record_without_facts_of_the_machine(whole: dict[str, Any], tmp_path: Path) -> None:
    path = written(tmp_path, {**whole, "machine": {}})
    assert main(["ladder", "report", str(path), "--html", str(tmp_path / "r.html")]) == 0


def test_a_record_does_not_command_the_terminal(whole: dict[str, Any], tmp_path: Path) -> None:
    machine = {"processor": "\x1b[2J\x9b31m[red]<script>"}
    path = written(tmp_path, {**whole, "machine": machine})
    said = shown("report", str(path), "--html", str(tmp_path / "r.html"))
    assert said.returncode == 0
    assert "<script>" not in (tmp_path / "r.html").read_text()
    text = shown("report", str(path)).stdout
    assert b"\x1b" not in text
    assert b"\x9b" not in text
    assert b"[red]<script>" in text


def shown(*arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*PROGRAM, "ladder", *arguments], capture_output=True, check=False, timeout=PATIENCE,
        env={**os.environ, **environment},
    )  # fmt: skip


@pytest.mark.parametrize(
    "locale",
    [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
     {"LC_ALL": "no_SUCH.locale", "TERM": "dumb", "COLUMNS": "70"}],
)  # fmt: skip
def test_terminals_that_can_do_little(
    whole: dict[str, Any], tmp_path: Path, locale: dict[str, str]
) -> None:
    said = shown("report", str(written(tmp_path, whole)), **locale)
    assert (said.returncode, said.stderr) == (0, b"")
    assert b"first token" in b" ".join(said.stdout.split())


def test_a_pipe_or_a_device_is_never_replaced(tmp_path: Path) -> None:
    """As root, a record moved to /dev/null would take that away from the whole machine."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    call = ["ladder", "--url", "http://127.0.0.1:9", "--out", str(pipe), "--force"]
    assert main(call) == 2
    with pytest.raises(UsageError, match="no ordinary file"):
        new_record(pipe, plan={}, machine={}, key="").save()
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert [p.name for p in tmp_path.iterdir() if p.name != "state"] == ["pipe"]


def test_a_link_stays_a_link(server: SmallServer, tmp_path: Path) -> None:
    link, target = tmp_path / "link.json", tmp_path / "target.json"
    link.symlink_to(target)
    run(link, url=server.url, samples=1, sizes=(50,))
    assert link.is_symlink()
    assert read_record(target)["status"] == "done"


def test_a_page_on_a_full_disk_leaves_no_half(whole: dict[str, Any], tmp_path: Path) -> None:
    path, html = written(tmp_path, whole), tmp_path / "r.html"
    said = subprocess.run(
        ["sh", "-c", 'ulimit -f 4; trap "" XFSZ; exec "$@"', "sh", *PROGRAM, "ladder", "report",
         str(path), "--html", str(html)],
        capture_output=True, check=False, timeout=PATIENCE,
    )  # fmt: skip
    assert said.returncode == 1, said.stderr
    assert b"internal error" not in said.stderr
    assert not html.exists()


@pytest.mark.parametrize(
    ("mode", "status", "why"),
    [
        ("empty stream", "error", "no event came"),
        ("silent", "error", "nothing came in time"),
        ("not streamed", "error", "did not stream"),
        *((mode, "refused", "how many tokens the prompt has") for mode in WRONG),
    ],
)
def test_servers_that_answer_badly(
    server: SmallServer, tmp_path: Path, mode: str, status: str, why: str
) -> None:
    out = tmp_path / "run.json"
    with pytest.raises(Refused, match="no usable sample"):
        run(out, url=server.url, arms=with_mode(mode), sizes=(50,), samples=1, timeout=1.0)
    samples = read_record(out)["samples"]
    assert {s["status"] for s in samples} == {status}
    assert all(why in s["why"] for s in samples)


def test_a_server_that_dies_in_the_middle(tmp_path: Path) -> None:
    """A process killed by its first request; nothing answers after that."""
    out, port = tmp_path / "run.json", free_port()
    program = [str(Path(__file__).with_name("small_server.py")), str(port), "/m.gguf", "v1"]
    server = subprocess.Popen([sys.executable, *program])
    client = Client(f"http://127.0.0.1:{port}")
    try:
        eventually(lambda: answers(client) == 200)
        with pytest.raises(Refused, match="no usable sample"):
            run(out, url=client.url, arms=with_mode("die"), samples=50, sizes=(50,))
    finally:
        client.close()
        server.kill()
        server.wait()
    record = read_record(out)
    reasons = [s["why"] for s in record["samples"]]
    assert reasons == ["the connection broke off", "no connection", "no connection"]
    assert "given up after 3 errors in a row" in record["warnings"][0]
    assert main(["ladder", "report", str(out)]) == 3
