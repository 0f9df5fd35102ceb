"""Memory control groups: real ones of the version this machine has, and files for the other."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slotwise.bench.cgroup import V1, V2, Files, MemoryGroup, NoGroup, memory_group
from slotwise.errors import SlotwiseError

MIB = 1 << 20
HOLD = "import sys; held = bytearray(int(sys.argv[1])); print(len(held))"


def in_group(group: MemoryGroup, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(group.inside(command), capture_output=True, text=True, check=False)


@pytest.mark.usefixtures("real_groups")
class TestRealGroup:
    def test_a_process_inside_is_counted_and_lives(self) -> None:
        with memory_group(300 * MIB) as group:
            done = in_group(group, sys.executable, "-c", HOLD, str(50 * MIB))
            assert done.returncode == 0, done.stderr
            peak = group.peak()
            assert peak is None or 50 * MIB <= peak <= 300 * MIB
            assert group.oom_kills() == 0

    def test_a_process_that_wants_more_is_killed_and_we_are_not(self) -> None:
        with memory_group(100 * MIB) as group:
            done = in_group(group, sys.executable, "-c", HOLD, str(400 * MIB))
            assert done.returncode == -9
            assert group.oom_kills() == 1
            peak = group.peak()
            assert peak is None or peak <= 100 * MIB

    def test_the_process_is_in_the_group_from_its_start(self) -> None:
        with memory_group(100 * MIB) as group:
            done = in_group(group, "cat", "/proc/self/cgroup")
            assert group.folder.name in done.stdout

    def test_at_the_end_the_group_and_what_is_in_it_are_gone(self) -> None:
        with memory_group(100 * MIB) as group:
            process = subprocess.Popen(group.inside(["sleep", "60"]))
            while process.pid not in group.processes():
                pass
        assert process.wait(timeout=10) == -9
        assert not group.folder.exists()

    def test_it_is_gone_too_after_an_exception(self) -> None:
        kept: list[Path] = []

        def interrupted() -> None:
            with memory_group(100 * MIB) as group:
                kept.append(group.folder)
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert not kept[0].exists()


class FakeRoot:
    """The files that `memory_group` looks at, under a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def v2(self, *, controllers: str = "cpu memory", enabled: str = "memory") -> Path:
        self.write("proc/self/mountinfo", "41 31 0:38 / /cg rw,relatime - cgroup2 none rw\n")
        self.write("proc/self/cgroup", "0::/user/job\n")
        self.write("cg/cgroup.controllers", controllers)
        for folder in ("cg", "cg/user", "cg/user/job"):
            self.write(f"{folder}/cgroup.subtree_control", enabled)
        return self.root / "cg"

    def v1(self) -> Path:
        self.write(
            "proc/self/mountinfo",
            "1 0 0:1 / /cg/cpu rw - cgroup none rw,cpu\n"
            "2 0 0:2 / /cg/memory rw - cgroup none rw,memory,hugetlb\n",
        )
        self.write("proc/self/cgroup", "4:memory,hugetlb:/job\n3:cpu:/other\n")
        (self.root / "cg/memory/job").mkdir(parents=True)
        return self.root / "cg/memory"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRoot:
    """Control groups' folders can be removed with their files in them; plain folders cannot."""
    monkeypatch.setattr(Path, "rmdir", lambda self: shutil.rmtree(self))
    return FakeRoot(tmp_path)


def test_v2_limits_memory_and_forbids_swap(fake: FakeRoot) -> None:
    top = fake.v2()
    with memory_group(64 * MIB, root=fake.root) as group:
        assert group.folder.parent == top
        assert group.files is V2
        assert (group.folder / "memory.max").read_text() == str(64 * MIB)
    assert not group.folder.exists()


def test_v2_asks_for_memory_where_it_is_not_enabled_yet(fake: FakeRoot) -> None:
    top = fake.v2(enabled="cpu")
    with memory_group(64 * MIB, root=fake.root):
        assert (top / "cgroup.subtree_control").read_text() == "+memory"


def test_v2_without_memory_is_no_hierarchy(fake: FakeRoot) -> None:
    fake.v2(controllers="cpu io")
    with (
        pytest.raises(NoGroup, match="no hierarchy with memory"),
        memory_group(MIB, root=fake.root),
    ):
        pass


def test_v1_is_found_among_the_controllers(fake: FakeRoot) -> None:
    top = fake.v1()
    with memory_group(64 * MIB, root=fake.root) as group:
        assert (group.folder.parent, group.files) == (top, V1)
        assert (group.folder / "memory.limit_in_bytes").read_text() == str(64 * MIB)


def test_the_next_group_is_tried_where_one_may_not_be_written(
    fake: FakeRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = fake.v1()
    make = Path.mkdir

    def mkdir(self: Path, *args: int, **options: bool) -> None:
        if self.parent == top:
            raise PermissionError(13, "Permission denied", str(self))
        make(self, *args, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with memory_group(64 * MIB, root=fake.root) as group:
        assert group.folder.parent == top / "job"


def test_without_any_right_the_reason_is_named(
    fake: FakeRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.v1()

    def refused(self: Path, *_: int) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refused)
    with (
        pytest.raises(NoGroup, match="Permission denied") as caught,
        memory_group(MIB, root=fake.root),
    ):
        pass
    assert caught.value.exit_code == 3
    assert "systemd-run" in caught.value.next_step


def test_a_system_without_control_groups(tmp_path: Path) -> None:
    with pytest.raises(NoGroup), memory_group(MIB, root=tmp_path):
        pass


@pytest.mark.parametrize(
    ("files", "events"),
    [(V1, "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"), (V2, "low 0\noom 9\noom_kill 3\n")],
)
def test_what_both_versions_tell(tmp_path: Path, files: Files, events: str) -> None:
    group = MemoryGroup(tmp_path, files, MIB)
    assert (group.peak(), group.oom_kills()) == (None, None)
    (tmp_path / files.events).write_text(events)
    (tmp_path / files.peak).write_text("12345\n")
    assert (group.peak(), group.oom_kills()) == (12345, 3)


def test_swap_is_set_by_the_rules_of_the_version(tmp_path: Path) -> None:
    for files, expected in ((V1, str(MIB)), (V2, "0")):
        (tmp_path / files.swap).write_text("as it was")
        MemoryGroup(tmp_path, files, MIB).set_limit()
        assert (tmp_path / files.swap).read_text() == expected


def test_a_group_that_stays_is_an_error_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slotwise.bench.cgroup.REMOVE_TIMEOUT_S", 0.0)
    (tmp_path / "cgroup.procs").write_text("")
    with pytest.raises(SlotwiseError, match="cannot be removed") as caught:
        MemoryGroup(tmp_path, V1, MIB).remove()
    assert caught.value.next_step == f"Remove it yourself: rmdir {tmp_path}"
