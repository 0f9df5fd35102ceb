"""What `auto` finds, and how a budget is divided. Real control groups where one can be made."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotwise.engine.memory import (
    GROUP_HEADROOM_BYTES,
    GROUP_HEADROOM_SHARE,
    HEADROOM_BYTES,
    HEADROOM_SHARE,
    TOKEN_BYTES,
    Budget,
    MemoryPlan,
    available,
    divide,
)
from slotwise.experts.pool import experts_per_class, minimum_slots
from slotwise.weights.layout import ExpertLayout, SlotClass

GIB = 1 << 30
UNLIMITED_V1 = 9223372036854771712


class Machine:
    """A root folder with /proc and control groups in it."""

    def __init__(self, root: Path, *, free: int = 16 * GIB) -> None:
        self.root = root
        lines = ("MemTotal: 99 kB", "MemFree: 1 kB", f"MemAvailable:   {free // 1024} kB", "")
        self.write("proc/meminfo", "\n".join(lines))

    def write(self, path: str, text: str | int) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}\n" if isinstance(text, int) else text)

    def member_of(self, *lines: str) -> None:
        self.write("proc/self/cgroup", "".join(line + "\n" for line in lines))

    def v2(self, group: str, *, limit: int | str, usage: int, inactive_file: int = 0) -> None:
        folder = f"sys/fs/cgroup/{group}"
        self.write(f"{folder}/memory.max", f"{limit}\n")
        self.write(f"{folder}/memory.current", usage)
        stat = f"anon 5\nfile 999999\ninactive_file {inactive_file}\nactive_file 3\n"
        self.write(f"{folder}/memory.stat", stat)

    def v1(self, group: str, *, limit: int, usage: int, inactive_file: int = 0) -> None:
        folder = f"sys/fs/cgroup/memory/{group}"
        self.write(f"{folder}/memory.limit_in_bytes", limit)
        self.write(f"{folder}/memory.usage_in_bytes", usage)
        stat = f"cache 1\ninactive_file 7\ntotal_inactive_file {inactive_file}\n"
        self.write(f"{folder}/memory.stat", stat)

    def budget(self) -> Budget:
        return available(root=self.root)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    machine.member_of("0::/")
    return machine


def after_headroom(free: int) -> int:
    return int(free - max(HEADROOM_BYTES, free * HEADROOM_SHARE))


def in_a_group(free: int) -> int:
    return int(free - max(GROUP_HEADROOM_BYTES, free * GROUP_HEADROOM_SHARE))


def test_without_limits_it_is_what_is_free(machine: Machine) -> None:
    budget = machine.budget()
    assert budget.nbytes == after_headroom(16 * GIB)
    assert budget.reason == "memory that is free: 16,384 MiB, less headroom"


def test_a_system_without_control_groups(tmp_path: Path) -> None:
    assert Machine(tmp_path).budget().nbytes == after_headroom(16 * GIB)


def test_little_free_memory_leaves_nothing_but_never_less(tmp_path: Path) -> None:
    machine = Machine(tmp_path, free=100 << 20)
    machine.member_of("0::/")
    assert machine.budget().nbytes == 0


def test_v2_limit_minus_what_cannot_be_reclaimed(machine: Machine) -> None:
    machine.member_of("0::/user.slice/job")
    machine.v2("user.slice/job", limit=4 * GIB, usage=3 * GIB, inactive_file=2 * GIB)
    assert machine.budget().nbytes == in_a_group(3 * GIB)
    assert "control group (v2)" in machine.budget().reason


def test_v2_the_tightest_group_on_the_way_up_counts(machine: Machine) -> None:
    machine.member_of("0::/a/b/c")
    machine.v2("a", limit=8 * GIB, usage=6 * GIB)
    machine.v2("a/b", limit=5 * GIB, usage=1 * GIB)
    machine.v2("a/b/c", limit="max", usage=1 * GIB)
    machine.v2("elsewhere", limit=1, usage=1)
    assert machine.budget().nbytes == in_a_group(2 * GIB)


def test_v2_inside_a_container_only_the_top_is_there(machine: Machine) -> None:
    machine.member_of("0::/docker/0123456789")
    machine.v2("", limit=2 * GIB, usage=0)
    assert machine.budget().nbytes == in_a_group(2 * GIB)


def test_v2_a_path_out_of_the_namespace(machine: Machine) -> None:
    machine.member_of("0::/../../neighbour")
    machine.v2("", limit=2 * GIB, usage=0)
    assert machine.budget().nbytes == in_a_group(2 * GIB)


def test_v1_counts_the_children_too(machine: Machine) -> None:
    machine.member_of("9:cpu,cpuacct:/x", "4:memory:/job", "0::/")
    machine.v1("job", limit=4 * GIB, usage=3 * GIB, inactive_file=1 * GIB)
    machine.v1("x", limit=1, usage=0)
    assert machine.budget().nbytes == in_a_group(2 * GIB)
    assert "control group (v1)" in machine.budget().reason


def test_v1_without_a_limit(machine: Machine) -> None:
    machine.member_of("4:memory:/job")
    machine.v1("job", limit=UNLIMITED_V1, usage=3 * GIB)
    machine.v1("", limit=UNLIMITED_V1, usage=3 * GIB)
    assert machine.budget().nbytes == after_headroom(16 * GIB)


def test_v1_memory_together_with_another_controller(machine: Machine) -> None:
    machine.member_of("4:memory,hugetlb:/job")
    machine.v1("job", limit=2 * GIB, usage=0)
    assert machine.budget().nbytes == in_a_group(2 * GIB)


def test_a_small_group_leaves_more_than_half_of_it(machine: Machine) -> None:
    machine.member_of("4:memory:/job")
    machine.v1("job", limit=500 << 20, usage=50 << 20)
    assert machine.budget().nbytes == (450 << 20) - GROUP_HEADROOM_BYTES


def test_a_group_leaves_room_for_the_tokenizer(machine: Machine) -> None:
    machine.member_of("4:memory:/job")
    machine.v1("job", limit=500 << 20, usage=50 << 20)
    without = machine.budget().nbytes
    with_tokens = available(n_vocab=100_000, root=machine.root).nbytes
    assert without - with_tokens == 100_000 * TOKEN_BYTES


def test_a_group_larger_than_what_is_free_says_nothing(machine: Machine) -> None:
    machine.member_of("4:memory:/job")
    machine.v1("job", limit=17 * GIB, usage=0)
    assert machine.budget().nbytes == after_headroom(16 * GIB)


def test_more_in_use_than_the_limit_is_no_room(machine: Machine) -> None:
    machine.member_of("0::/job")
    machine.v2("job", limit=1 * GIB, usage=2 * GIB)
    assert machine.budget().nbytes == 0


@pytest.mark.parametrize("name", ["memory.max", "memory.current", "memory.stat"])
@pytest.mark.parametrize("text", [None, "", "what\n", "12 34\n"])
def test_an_unreadable_group_is_passed_over(machine: Machine, name: str, text: str | None) -> None:
    machine.member_of("0::/job")
    machine.v2("job", limit=1 * GIB, usage=0)
    machine.v2("", limit=4 * GIB, usage=0)
    file = machine.root / "sys/fs/cgroup/job" / name
    file.unlink()
    if text is not None:
        file.write_text(text)
    expected = 1 if name == "memory.stat" and text is not None else 4
    assert machine.budget().nbytes == in_a_group(expected * GIB)


def test_usage_may_have_grown_less_than_its_cache(machine: Machine) -> None:
    """The two files are read one after the other."""
    machine.member_of("0::/job")
    machine.v2("job", limit=2 * GIB, usage=10, inactive_file=20)
    assert machine.budget().nbytes == in_a_group(2 * GIB)


# -- a real group


def _own_group() -> Path | None:
    """This process's memory group, v1 or v2."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/")
        if number == "0" and Path("/sys/fs/cgroup/cgroup.controllers").exists():
            return Path("/sys/fs/cgroup") / path.lstrip("/")
    return None


@pytest.fixture
def group() -> Iterator[Path]:
    """A child group with a limit of 1 GiB."""
    own = _own_group()
    if own is None:
        pytest.skip("there are no memory control groups here")
    made = own / f"slotwise-test-{os.getpid()}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error.strerror}")
    try:
        v1 = made / "memory.limit_in_bytes"
        (v1 if v1.exists() else made / "memory.max").write_text(str(GIB))
        yield made
    except OSError as error:
        pytest.skip(f"no memory limit can be set: {error.strerror}")
    finally:
        made.rmdir()


def test_a_process_in_a_real_group_sees_its_limit(group: Path) -> None:
    code = (
        "import os, pathlib, sys\n"
        "pathlib.Path(sys.argv[1], 'cgroup.procs').write_text(str(os.getpid()))\n"
        "from slotwise.engine.memory import available\n"
        "budget = available(); print(budget.nbytes); print(budget.reason)\n"
    )
    if available().nbytes < GIB:
        pytest.skip("less memory is free than the group's limit")
    child = subprocess.run(
        [sys.executable, "-c", code, str(group)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    nbytes, reason = child.stdout.splitlines()
    assert 0 < int(nbytes) <= in_a_group(GIB)
    assert reason.startswith("room in the control group (v")


# -- dividing


@st.composite
def layouts(draw: st.DrawFn) -> ExpertLayout:
    n_experts = draw(st.integers(1, 64))
    n_classes = draw(st.integers(1, 3))
    class_of = tuple(draw(st.permutations(range(n_classes))))
    class_of += tuple(draw(st.lists(st.integers(0, n_classes - 1), max_size=9)))
    sizes = draw(st.lists(st.integers(1, 500), min_size=n_classes, max_size=n_classes))
    return ExpertLayout(
        n_experts=n_experts,
        n_used=draw(st.integers(1, n_experts)),
        layers=tuple(range(len(class_of))),
        classes=tuple(SlotClass(i, (), 4096 * n) for i, n in enumerate(sizes)),
        class_of=class_of,
    )


@st.composite
def needs(draw: st.DrawFn) -> MemoryPlan:
    sizes = st.integers(0, 1 << 24)
    return MemoryPlan(
        budget=Budget(0, "test"),
        dense=draw(sizes),
        state=draw(sizes),
        windows=draw(sizes),
        work=draw(sizes),
        scratch=draw(st.integers(1, 1 << 24)),
    )


def with_budget(plan: MemoryPlan, nbytes: int) -> MemoryPlan:
    return replace(plan, budget=Budget(nbytes, "test"))


def lendable(layout: ExpertLayout, plan: MemoryPlan) -> list[int]:
    """Bytes each class can lend in one stretch."""
    least = minimum_slots(layout)
    per_class = zip(layout.classes, plan.slots, least, strict=True)
    return [c.slot_bytes * (n - keep) for c, n, keep in per_class]


budgets = st.one_of(st.integers(0, 1 << 30), st.integers(0, 1 << 34))


@given(layouts(), needs(), st.floats(0, 1.1), st.integers(0, 1))
def test_a_divided_budget(
    layout: ExpertLayout, wanted: MemoryPlan, share: float, more: int
) -> None:
    smallest = divide(wanted, layout)
    assert smallest.total == smallest.minimum, "no budget gives the smallest plan"
    largest = divide(with_budget(wanted, 1 << 60), layout)
    extra = int((largest.total - smallest.total) * share) + more
    plan = divide(with_budget(wanted, smallest.minimum + extra), layout)
    assert plan.minimum == smallest.minimum
    assert plan.total <= plan.budget.nbytes
    assert plan.total == sum(plan.parts().values())
    sizes = [c.slot_bytes for c in layout.classes]
    assert plan.arena == sum(n * size for n, size in zip(plan.slots, sizes, strict=True))
    assert all(n >= keep for n, keep in zip(plan.slots, minimum_slots(layout), strict=True))
    assert max(lendable(layout, plan)) >= plan.scratch
    if plan.slots != largest.slots:
        left = plan.budget.nbytes - plan.total
        assert left < sum(sizes), "there was room for one more expert slot of some class"
    assert all(n >= e for n, e in zip(largest.slots, experts_per_class(layout), strict=True))


@given(layouts(), needs(), st.lists(budgets, min_size=2, max_size=4))
def test_a_bigger_budget_never_gives_fewer_slots(
    layout: ExpertLayout, wanted: MemoryPlan, sizes: list[int]
) -> None:
    plans = [divide(with_budget(wanted, nbytes), layout) for nbytes in sorted(sizes)]
    for less, more in pairwise(plans):
        assert all(a <= b for a, b in zip(less.slots, more.slots, strict=True))


@given(layouts(), needs(), st.integers(1, 2000))
def test_slots_that_were_asked_for(layout: ExpertLayout, wanted: MemoryPlan, n: int) -> None:
    plan, least = divide(wanted, layout, slots=n), divide(wanted, layout, slots=1)
    most = divide(with_budget(wanted, 1 << 50), layout)
    for got, low, high in zip(plan.slots, least.slots, most.slots, strict=True):
        assert got == max(low, min(n, high))
    assert max(lendable(layout, plan)) >= plan.scratch


@given(needs(), st.integers(0, 1 << 30))
def test_a_dense_model_keeps_its_scratch(wanted: MemoryPlan, nbytes: int) -> None:
    plan = divide(with_budget(wanted, nbytes), None)
    parts = (wanted.dense, wanted.state, wanted.windows, wanted.work, wanted.scratch)
    assert plan.total == plan.minimum == plan.fixed == sum(parts) == sum(plan.parts().values())
    assert (plan.slots, plan.arena) == ((), 0)
