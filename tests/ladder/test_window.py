"""Windows of service with real processes: production comes back, whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ladder.driving import run
from ladder.place import PATIENCE, PROGRAM, Place, eventually, taken
from ladder.production import alive

from slotwise.errors import NotRestored, SlotwiseError, UsageError
from slotwise.ladder.journal import Journal, read_steps
from slotwise.ladder.processes import marked
from slotwise.ladder.record import read_record
from slotwise.ladder.service import read_service
from slotwise.ladder.window import finish


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.end()


def test_production_is_stopped_measured_around_and_restored(place: Place) -> None:
    record = place.run()
    assert {s["status"] for s in record["samples"]} == {"ok"}
    assert record["arms"][0]["servers"][0]["models"][0]["name"] == "arm.gguf"
    assert record["arms"][0]["servers"][0]["ready_ms"] > 0
    said = record["service"]
    assert (said["restored"], said["attempts"], said["http_status"]) == (True, 1, 200)
    assert said["before"]["version"] == said["after"]["version"] == "v7"
    steps = [step["step"] for step in said["steps"]]
    assert steps == ["begin", "stopping", "stopped", "restoring", "restored"] == place.steps()
    assert place.status() == 200
    assert marked(record["run"]) == []


def test_a_start_command_that_is_the_server_itself(place: Place) -> None:
    place.write_service(verb="serve")
    assert place.run()["service"]["restored"] is True
    assert place.status() == 200


def test_an_arm_that_does_not_start(place: Place) -> None:
    place.write_arm(command=[sys.executable, "-c", "raise SystemExit(9)"])
    with pytest.raises(SlotwiseError, match="ended before it was ready: exit code 9"):
        place.run()
    record = read_record(place.out)
    assert record["status"] == "failed"
    assert record["service"]["restored"] is True
    assert place.status() == 200


def test_an_arm_that_is_killed_while_it_is_measured(place: Place) -> None:
    place.write_arm(mode="die")  # SIGKILL, from inside its first answer
    with pytest.raises(SlotwiseError, match="ended while it was measured: SIGKILL"):
        place.run()
    record = read_record(place.out)
    assert {s["status"] for s in record["samples"]} == {"error"}
    assert record["service"]["restored"] is True
    assert place.status() == 200


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_in_the_middle(place: Place, number: int, code: int) -> None:
    ladder = place.program(samples=10_000)
    eventually(lambda: taken(place) >= 2)
    assert place.status() is None
    ladder.send_signal(number)
    eventually(lambda: "restoring" in place.steps())
    ladder.send_signal(number)  # a second one does not stop the restoration
    _, said = ladder.communicate(timeout=PATIENCE)
    assert ladder.returncode == code, said
    assert place.status() == 200
    assert read_record(place.out)["status"] == "interrupted"
    assert place.steps()[-1] == "restored"


def test_a_kill_of_the_ladder_itself_is_finished_by_a_second_run(place: Place) -> None:
    place.write_arm(command=place.behind_another_process())
    ladder = place.program(samples=10_000)
    eventually(lambda: taken(place) >= 1)
    mark = read_record(place.out)["run"]
    ladder.kill()
    ladder.communicate()
    assert place.status() is None
    assert marked(mark)  # what the arm started runs on, and is in the way
    call = [*PROGRAM, "ladder", "restore"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert "production is restored" in done.stderr
    assert marked(mark) == []
    assert place.status() == 200
    again = subprocess.run(call, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (again.returncode, again.stderr) == (0, "nothing to restore\n")


def test_the_next_ladder_restores_first(place: Place) -> None:
    ladder = place.program(samples=10_000)
    eventually(lambda: taken(place) >= 1)
    ladder.kill()
    ladder.communicate()
    place.out.unlink()
    assert place.run()["service"]["restored"] is True
    steps = place.steps()
    assert steps.count("restored") == 2
    assert steps.index("restored") < len(steps) - 1
    assert place.status() == 200


@pytest.mark.parametrize(
    ("version", "problem"),
    [("v8", "version: was v7, is v8"), (None, "it does not answer with HTTP 200")],
)
def test_production_that_does_not_come_back_is_the_loudest_thing(
    place: Place, version: str | None, problem: str
) -> None:
    broken = [sys.executable, "-c", "raise SystemExit(3)"]
    place.write_service(start=place.command("start", version) if version else broken)
    ladder = place.program()
    _, said = ladder.communicate(timeout=PATIENCE)
    assert ladder.returncode == 5
    text = " ".join(said.decode().replace("│", " ").split())
    assert "PRODUCTION IS DOWN" in text
    assert problem in text
    assert "slotwise ladder restore" in text
    record = read_record(place.out)
    assert record["service"]["restored"] is False
    assert place.steps()[-1] == "not-restored"
    # once the cause is gone, the journal is enough
    place.end()
    journal = Journal(place.journal_path)
    begin = json.loads(json.dumps(journal.window[0]))
    begin["service"]["start"] = place.command("start")
    journal.window[0].update(begin)
    assert finish(journal, key="", say=lambda _: None).restored
    journal.close()


def test_a_full_disk_while_samples_are_written(place: Place) -> None:
    """No file may grow over 6 kB: the record's samples do not fit, the journal does."""
    ladder = place.program(samples=50, limit=6_000)
    _, said = ladder.communicate(timeout=PATIENCE)
    assert ladder.returncode == 1, said
    assert b"Traceback" not in said
    assert place.status() == 200
    assert place.steps()[-1] == "restored"
    record = read_record(place.out)  # the last whole one
    assert record["status"] == "running"


def test_nothing_is_stopped_when_the_journal_cannot_be_written(place: Place) -> None:
    place.journal_path.parent.mkdir(parents=True)
    place.journal_path.symlink_to("/dev/full")
    pid = int((place.folder / "pid").read_text())
    with pytest.raises(OSError, match="No space left"):
        place.run()
    assert alive(pid)
    assert place.status() == 200


def test_a_journal_that_fills_up_on_the_way_does_not_stop_the_restoration(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.write("begin")
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, journal._file)
    os.close(full)
    assert "No space left" in journal.write_if_possible("restoring")
    assert [entry["step"] for entry in journal.window] == ["begin", "restoring"]
    journal.close()


def test_production_that_is_down_is_not_touched(place: Place) -> None:
    place.end()
    eventually(lambda: place.status() is None)
    with pytest.raises(SlotwiseError, match="nothing was stopped"):
        place.run()
    assert not place.steps()


def test_a_stop_command_that_fails(place: Place) -> None:
    text = place.service_file.read_text().replace("'stop', ", "'stop', '/nowhere', ")
    place.service_file.write_text(text)
    pid = int((place.folder / "pid").read_text())
    with pytest.raises(SlotwiseError, match="ended with exit code 1"):
        place.run()
    assert alive(pid)
    assert read_record(place.out)["service"]["restored"] is True


def test_one_window_at_a_time(place: Place) -> None:
    journal = Journal(place.journal_path)
    with pytest.raises(UsageError, match="another run has this service"):
        place.run()
    journal.close()
    assert place.status() == 200


def test_a_window_without_an_arm_to_start(place: Place) -> None:
    with pytest.raises(UsageError, match="no arm starts a server"):
        run(place.out, url=place.url, service=read_service(place.service_file))
    assert place.steps() == [] if place.journal_path.exists() else True


def test_a_half_written_journal_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_text('{"step": "begin"}\n{"step": "stopping"}\n{"step": "stop')
    assert [entry["step"] for entry in read_steps(path)] == ["begin", "stopping"]
    assert Journal(path).unfinished


def test_not_restored_has_an_exit_code_of_its_own() -> None:
    assert NotRestored("x").exit_code == 5
