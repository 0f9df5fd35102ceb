"""`slotwise ladder demo` from end to end, and ended by signals: real servers, a small model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from house.talking_model import write_talking_model
from ladder.place import PATIENCE, PROGRAM, eventually
from ladder.production import alive

from slotwise.ladder.journal import read_steps, state_folder
from slotwise.ladder.processes import marked
from slotwise.ladder.record import read_record

SMALLEST = "64MiB"
"""What the model can be run in: a read has to put experts out."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 MiB of experts: a loan takes slots that are in use, and a refill has something to read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("house.talking_model.EXPERTS", 32)
        patch.setattr("house.talking_model.FF", 1024)
        return write_talking_model(tmp_path_factory.mktemp("story") / "small.gguf")


class Demo:
    """A demo as a process of its own, in a session of its own."""

    def __init__(self, model: Path, folder: Path, *, samples: int) -> None:
        self.folder = folder
        self.err = folder.parent / "demo.err"
        with self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [*PROGRAM, "ladder", "demo", str(model), "--folder", str(folder),
                 "--memory", SMALLEST, "--threads", "1", "--sizes", "60,250",
                 "--samples", str(samples)],
                stdout=subprocess.PIPE, stderr=err, start_new_session=True,
            )  # fmt: skip

    @property
    def samples(self) -> int:
        out = self.folder / "run.json"
        return len(read_record(out)["samples"]) if out.exists() else 0

    @property
    def production(self) -> int:
        return int((self.folder / "production.pid").read_text())

    def steps(self) -> list[str]:
        return [s["step"] for path in state_folder().glob("*.journal") for s in read_steps(path)]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        if (self.folder / "production.pid").exists() and alive(self.production):
            os.kill(self.production, signal.SIGKILL)


@pytest.fixture
def demo(model: Path, tmp_path: Path) -> Iterator[Demo]:
    """Running, with production stopped and an arm being measured."""
    demo = Demo(model, tmp_path / "demo", samples=10_000)
    try:
        eventually(lambda: demo.samples >= 2 or demo.process.poll() is not None)
        assert demo.process.poll() is None, demo.err.read_text()
        yield demo
    finally:
        demo.end()


@pytest.mark.parametrize(
    ("number", "code", "all_of_it"),
    [
        (signal.SIGTERM, 143, False),
        (signal.SIGINT, 130, True),
        pytest.param(signal.SIGHUP, 129, True, marks=pytest.mark.deep),
    ],
)
def test_a_signal_ends_the_ladder_inside_in_order(
    demo: Demo, number: int, code: int, all_of_it: bool
) -> None:
    """To the demo alone (`kill`), or to the terminal's whole group (Ctrl-C)."""
    mark = read_record(demo.folder / "run.json")["run"]
    send = os.killpg if all_of_it else os.kill
    send(demo.process.pid, number)
    eventually(lambda: "restoring" in demo.steps())
    send(demo.process.pid, number)  # a second one does not end what restores
    demo.process.communicate(timeout=PATIENCE)
    said = demo.err.read_text()
    assert demo.process.returncode == code, said
    assert "Traceback" not in said
    assert demo.steps()[-1] == "restored", said
    assert read_record(demo.folder / "run.json")["status"] == "interrupted"
    assert marked(mark) == []
    assert not alive(demo.production)  # the demo started it, so it takes it along


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
def test_a_kill_of_the_demo_does_not_leave_production_down(demo: Demo) -> None:
    mark = read_record(demo.folder / "run.json")["run"]
    demo.process.kill()
    demo.process.wait()
    # the record is the last thing the ladder writes
    eventually(lambda: read_record(demo.folder / "run.json")["status"] == "interrupted")
    assert demo.steps()[-1] == "restored"
    assert read_record(demo.folder / "run.json")["service"]["restored"]
    assert marked(mark) == []
    assert alive(demo.production)


@pytest.mark.deep
def test_the_whole_story_proves_its_levers(model: Path, tmp_path: Path) -> None:
    demo = Demo(model, tmp_path / "demo", samples=2)
    try:
        out, _ = demo.process.communicate(timeout=5 * PATIENCE)
        assert demo.process.returncode == 0, demo.err.read_text()
    finally:
        demo.end()
    assert b"holds; problems: 0" in out
    arms = json.loads((demo.folder / "report.json").read_text())["arms"]
    assert [arm["name"] for arm in arms] == ["blocking", "deferred", "shadow"]
    for arm in arms:
        assert len(arm["proofs"]) == 2
        for proof in arm["proofs"]:
            assert sum(proof["held"].values()) > 0
        assert any(proof["counted"] for proof in arm["proofs"])
        assert [row["lent"] for row in arm["rows"]] == sorted(row["lent"] for row in arm["rows"])
    assert "<svg" in (demo.folder / "report.html").read_text()
    assert "is ready" in (demo.folder / "production.log").read_text()
