"""A memory control group of our own, v1 or v2: make it, put processes in, read it, remove it.

The group is made as near to the root of the hierarchy as we may write, so that it is a leaf (v2
gives no limits to the children of a group with processes in it). This process never enters it: the
limit cannot kill it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from slotwise.errors import SlotwiseError

REMOVE_TIMEOUT_S = 10.0
_PREFIX = "slotwise-bench-"
_JOIN = 'echo $$ > "$0" && exec "$@"'


class NoGroup(SlotwiseError):
    """No memory control group can be made here."""

    exit_code = 3


@dataclass(frozen=True, kw_only=True)
class Files:
    """What the files of one version of control groups are called."""

    version: str
    limit: str
    swap: str
    no_swap: str | None
    """What to write into `swap`; None: the limit, for it counts memory and swap together."""
    usage: str
    peak: str
    events: str


V1 = Files(
    version="v1",
    limit="memory.limit_in_bytes",
    swap="memory.memsw.limit_in_bytes",
    no_swap=None,
    usage="memory.usage_in_bytes",
    peak="memory.max_usage_in_bytes",
    events="memory.oom_control",
)
V2 = Files(
    version="v2",
    limit="memory.max",
    swap="memory.swap.max",
    no_swap="0",
    usage="memory.current",
    peak="memory.peak",
    events="memory.events",
)


class MemoryGroup:
    """A group that is there. `folder` is its directory."""

    def __init__(self, folder: Path, files: Files, limit: int) -> None:
        self.folder, self.files, self.limit = folder, files, limit

    def inside(self, command: Sequence[str]) -> list[str]:
        """`command`, started so that it is in the group from its first instruction on."""
        return ["/bin/sh", "-c", _JOIN, str(self.folder / "cgroup.procs"), *command]

    def set_limit(self) -> None:
        """Raises OSError where the files cannot be written."""
        (self.folder / self.files.limit).write_text(str(self.limit))
        with suppress(OSError):  # a kernel that does not account for swap has no such file
            if (self.folder / self.files.swap).exists():
                (self.folder / self.files.swap).write_text(self.files.no_swap or str(self.limit))

    def peak(self) -> int | None:
        """Most bytes it ever held, page cache included; None where the kernel does not say."""
        return self._number(self.files.peak)

    def usage(self) -> int | None:
        return self._number(self.files.usage)

    def oom_kills(self) -> int | None:
        """Processes that the limit has killed."""
        with suppress(OSError, ValueError):
            for line in (self.folder / self.files.events).read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
        return None

    def _number(self, name: str) -> int | None:
        try:
            return int((self.folder / name).read_text())
        except (OSError, ValueError):
            return None

    def processes(self) -> list[int]:
        return [int(line) for line in (self.folder / "cgroup.procs").read_text().split()]

    def remove(self) -> None:
        """Kills what is still in it and removes it. Raises SlotwiseError when it stays."""
        deadline = time.monotonic() + REMOVE_TIMEOUT_S
        while True:
            with suppress(FileNotFoundError):
                for process in self.processes():
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
            try:
                self.folder.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise SlotwiseError(
                        f"the control group {self.folder} cannot be removed: {error.strerror}",
                        next_step=f"Remove it yourself: rmdir {self.folder}",
                    ) from None
                time.sleep(0.02)


@contextmanager
def memory_group(limit: int, *, root: Path = Path("/")) -> Iterator[MemoryGroup]:
    """A group with `limit` bytes and no swap; gone at the end, with all that is in it.

    Raises NoGroup, with the reason, where none can be made.
    """
    group = _make(limit, root)
    try:
        yield group
    finally:
        group.remove()


def _make(limit: int, root: Path) -> MemoryGroup:
    reasons = []
    for files, parents in _hierarchies(root):
        for parent in parents:
            try:
                return _make_in(parent, files, limit)
            except OSError as error:
                reasons.append(f"{error.filename or parent}: {error.strerror}")
    raise NoGroup(
        "no memory control group can be made here: "
        + (reasons[0] if reasons else "no hierarchy with memory in it is mounted"),
        next_step="Run it as root, or under `systemd-run --user --scope`.",
    )


def _make_in(parent: Path, files: Files, limit: int) -> MemoryGroup:
    if files is V2 and "memory" not in (parent / "cgroup.subtree_control").read_text().split():
        (parent / "cgroup.subtree_control").write_text("+memory")
    group = MemoryGroup(parent / f"{_PREFIX}{os.getpid()}-{limit}", files, limit)
    group.folder.mkdir()
    try:
        group.set_limit()
    except BaseException:
        group.remove()
        raise
    return group


def _hierarchies(root: Path) -> Iterator[tuple[Files, list[Path]]]:
    """Hierarchies that can limit memory, each with the groups from its root to our own."""
    ours = _membership(root)
    for line in _lines(root / "proc/self/mountinfo"):
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        top = root / left.split()[4].lstrip("/")
        if kind == "cgroup" and "memory" in options.split()[-1].split(","):
            yield V1, _path(top, ours.get("memory", "/"))
        elif kind == "cgroup2" and "memory" in " ".join(_lines(top / "cgroup.controllers")).split():
            yield V2, _path(top, ours.get("", "/"))


def _membership(root: Path) -> dict[str, str]:
    """Our group by controller; that of v2 under the empty name."""
    found = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        found |= dict.fromkeys(controllers.split(","), path)
    return found


def _path(top: Path, group: str) -> list[Path]:
    folders = [top]
    for part in Path(group).parts[1:]:
        folders.append(folders[-1] / part)
    return folders


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
