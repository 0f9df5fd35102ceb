"""What a window of service has done so far, on disk before it is done.

One JSON line per step, synced before the step is taken, so that after a kill or a power cut a
second run knows that production is down and how to bring it back. Holds the commands of the service
file (it is readable by its owner only) and a lock against a second window on the same service.
"""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from slotwise.errors import SlotwiseError, UsageError
from slotwise.ladder.record import now

FINISHED = ("restored", "untouched")
LARGEST = 16 << 20


class Journal:
    """An open, locked journal. Close it to let another run have it."""

    def __init__(self, path: Path) -> None:
        """Raises UsageError while another run holds it, SlotwiseError when it cannot be kept."""
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise SlotwiseError(
                f"{path}: the journal cannot be kept: {error.strerror}",
                next_step="Without one nothing is stopped. Set XDG_STATE_HOME to a folder.",
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._file)
            raise UsageError(
                f"{path}: another run has this service in its hands",
                next_step="Wait for it to end, or stop it: it restores what it stopped.",
            ) from error
        self.steps = read_steps(path)

    def write(self, step: str, **facts: Any) -> None:
        """Adds a step and syncs it. Raises OSError (a full disk): then do not take the step."""
        entry = {"step": step, "at": now(), **facts}
        os.write(self._file, (json.dumps(entry) + "\n").encode())
        os.fsync(self._file)
        self.steps.append(entry)

    def write_if_possible(self, step: str, **facts: Any) -> str:
        """For steps that are taken whatever happens; why it could not be written, or nothing."""
        try:
            self.write(step, **facts)
        except OSError as error:
            self.steps.append({"step": step, "at": now(), **facts})
            return f"the journal could not be written: {error.strerror}"
        return ""

    @property
    def window(self) -> list[dict[str, Any]]:
        """Steps of the latest window."""
        begins = [i for i, entry in enumerate(self.steps) if entry.get("step") == "begin"]
        return self.steps[begins[-1] :] if begins else []

    @property
    def unfinished(self) -> bool:
        return bool(self.window) and self.window[-1].get("step") not in FINISHED

    def close(self) -> None:
        with suppress(OSError):
            os.close(self._file)


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a journal; a half-written last one is left out."""
    with path.open("rb") as file:
        *lines, _half = file.read(LARGEST).split(b"\n")
    steps = []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            steps.append(entry)
    return steps


def state_folder() -> Path:
    """Where journals are: the user's state folder."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "slotwise" / "ladder"
