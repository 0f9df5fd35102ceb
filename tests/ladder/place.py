"""A folder with a production server running in it, and the ladder as a process beside it."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ladder.driving import run
from ladder.production import alive

from slotwise.ladder.arms import read_arm
from slotwise.ladder.client import Client
from slotwise.ladder.identity import answers
from slotwise.ladder.journal import read_steps, state_folder
from slotwise.ladder.processes import left_running
from slotwise.ladder.record import read_record
from slotwise.ladder.service import read_service

HERE = Path(__file__).parent
PROGRAM = [sys.executable, "-c", "from slotwise.cli import entry; entry()"]
PATIENCE = 60.0


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def eventually(true: Callable[[], object]) -> None:
    """Waits for something that other processes do; a test that never sees it fails."""
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)


class Place:
    """A folder with production running, its service file, and an arm's file."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.arm_port = folder, free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.out = folder / "run.json"
        self.service_file = folder / "window.toml"
        self.arm_file = folder / "arm.toml"
        self.write_service()
        self.write_arm()
        subprocess.run(self.command("start", "v7"), check=True)
        eventually(lambda: self.status() == 200)

    def command(self, verb: str, version: str = "v7") -> list[str]:
        program = [sys.executable, str(HERE / "production.py"), verb, str(self.folder)]
        return program if verb == "stop" else [*program, str(self.port), version]

    def write_service(self, *, start: list[str] | None = None, verb: str = "start") -> None:
        self.service_file.write_text(
            f"[production]\nurl = '{self.url}'\nstop = {self.command('stop')}\n"
            f"start = {start or self.command(verb)}\nready_seconds = 20\nstop_seconds = 20\n"
        )

    @property
    def server(self) -> list[str]:
        """The command of an arm."""
        program = str(HERE / "small_server.py")
        return [sys.executable, program, str(self.arm_port), "/arm.gguf", "v7"]

    def behind_another_process(self) -> list[str]:
        """An arm whose own process is not the server, which is in a session of its own."""
        start = "import subprocess as s, sys; s.Popen(sys.argv[1:], start_new_session=True).wait()"
        return [sys.executable, "-c", start, *self.server]

    def write_arm(self, *, mode: str = "", command: list[str] | None = None) -> None:
        self.arm_file.write_text(
            f"url = 'http://127.0.0.1:{self.arm_port}'\n[start]\n"
            f"command = {json.dumps(command or self.server)}\n"
            f"ready_seconds = 40\n[request]\nmode = '{mode}'\n"
        )  # fmt: skip

    def status(self) -> int | None:
        client = Client(self.url)
        try:
            return answers(client)
        finally:
            client.close()

    @property
    def journal_path(self) -> Path:
        return state_folder() / f"{read_service(self.service_file).key}.journal"

    def steps(self) -> list[str]:
        return [entry["step"] for entry in read_steps(self.journal_path)]

    def run(self) -> dict:
        arms = (read_arm("arm", self.arm_file),)
        service = read_service(self.service_file)
        return run(self.out, arms=arms, service=service, sizes=(50,), samples=1)

    def program(
        self, *, samples: int = 1, limit: int | None = None, window: bool = True
    ) -> subprocess.Popen[bytes]:
        """The ladder as a process of its own, which can be killed."""
        call = [
            *PROGRAM, "ladder", "--sizes", "50", "--samples", str(samples), "--starts", "1",
            "--arm", f"arm={self.arm_file}", "--out", str(self.out),
            *(("--service", str(self.service_file)) if window else ()),
        ]  # fmt: skip
        before = None
        if limit is not None:
            before = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))  # noqa: E731
        return subprocess.Popen(call, stderr=subprocess.PIPE, preexec_fn=before)

    def end(self) -> None:
        pid = int((self.folder / "pid").read_text())
        if alive(pid):
            os.kill(pid, signal.SIGKILL)
        while left_running:  # what this process restored is its child
            left_running.pop().wait(PATIENCE)


def taken(place: Place) -> int:
    return len(read_record(place.out)["samples"]) if place.out.exists() else 0
