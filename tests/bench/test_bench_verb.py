"""`slotwise bench` end to end, on a tiny model; with real control groups where they can be made."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from slotwise.bench.cgroup import NoGroup
from slotwise.bench.peers import Peer
from slotwise.cli import main
from slotwise.experts.routing import load_routing

SMALL = ("--prompts", "8", "--decode", "3", "--pairs", "1", "--threads", "1")
GROUPS = Path("/sys/fs/cgroup")


@pytest.fixture(autouse=True)
def a_busy_machine_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("run", "turns"):
        monkeypatch.setattr(f"slotwise.bench.{module}.MOST_CROWDING", 1e9)


def bench(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = main(["bench", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.usefixtures("real_groups")
def test_in_a_real_group_the_engine_finds_its_room_and_lives(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "record.json"
    code, out, _ = bench(capsys, tiny, *SMALL, "--memory", "500MiB", "--out", kept, "--json")
    assert code == 0
    record: dict[str, Any] = json.loads(out)
    assert json.loads(kept.read_text())["samples"] == record["samples"]
    assert record["schema"] == "slotwise.bench/v1"
    limited = next(s for s in record["samples"] if s["limit_bytes"] and s["arm"] == "slotwise")
    assert limited["group"]["oom_kills"] in (0, None)
    assert 0 < limited["budget_bytes"] < 500 << 20
    assert limited["cold"]["how"].startswith("posix_fadvise")
    assert "control group" in record["workers"][f"slotwise {500 << 20}"]["budget_reason"]
    assert all(check["passed"] for check in record["checks"])
    assert {"500 MiB, read 8, tokens/s", "500 MiB, decode after 8, tokens/s"} <= set(
        record["results"]
    )
    assert set(record["how"]) >= {"tokens/s", "of the limit", "policy quality"}
    assert not list(GROUPS.glob(f"**/slotwise-bench-{os.getpid()}-*"))


def test_without_groups_it_says_so_and_goes_on(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise NoGroup("no memory control group can be made here: not allowed")

    monkeypatch.setattr("slotwise.bench.run.memory_group", refused)
    code, out, err = bench(capsys, tiny, *SMALL, "--memory", "300MiB")
    assert code == 0
    assert "no memory control group can be made here" in err
    assert "300 MiB" in out
    assert "missing: against llama.cpp: not measured in this run" in out


@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="xllamacpp is not installed")
def test_llama_cpp_s_server_is_measured_in_turns(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    through_server = Peer(worker="server", arguments=("xllamacpp", "-"), python=sys.executable)
    monkeypatch.setattr("slotwise.bench.peers.find_peer", lambda text: through_server)
    code, out, _ = bench(capsys, tiny, *SMALL, "--against", "llama.cpp", "--json")
    assert code == 0
    record = json.loads(out)
    theirs = next(s for s in record["samples"] if s["arm"] == "llama.cpp")
    assert "failed" not in theirs
    assert theirs["first_ns"] > 0
    assert "xllamacpp" in record["workers"]["llama.cpp all"]["package"]
    assert record["results"]["resident, read 8, against llama.cpp"]["n"] == 1


def test_nothing_measured_is_3(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = bench(capsys, tiny, *SMALL, "--against", "llama.cpp:/no/such/python")
    assert code == 3
    assert "no program /no/such/python" in err
    code, _, err = bench(capsys, tiny, *SMALL, "--against", f"llama.cpp:{sys.executable}x")
    assert code == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--prompts", "0"), "no list of different sizes"),
        (("--prompts", "8,8"), "no list of different sizes"),
        (("--prompts", "8", "--decode-after", "9"), "none of the prompts"),
        (("--memory", "lots"), "not a size"),
        (("--memory", "0"), "--memory is 0"),
        (("--against", "vllm"), "not known"),
        (("--replay", "TINY"), "takes no MODEL"),
    ],
)
def test_wrong_usage_is_2(
    tiny: Path, arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(tiny) if word == "TINY" else word for word in arguments]
    code, _, err = bench(capsys, tiny, *given)
    assert code == 2
    assert words in err


def test_a_record_that_is_there_is_kept(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "record.json"
    kept.write_text("mine")
    code, _, err = bench(capsys, tiny, *SMALL, "--out", kept)
    assert code == 2
    assert "exists already" in err
    assert kept.read_text() == "mine"


def test_replay_holds_every_policy_against_belady(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "routing.jsonl"
    few = ("-n", "4", "--temp", "0", "--threads", "1", "--context", "64", "--quiet")
    assert main(["run", str(tiny), "-p", "a few words", *few, "--routing", str(trace)]) == 0
    capsys.readouterr()
    code, out, _ = bench(capsys, "--replay", trace, "--slots", "50%,12", "--json")
    assert code == 0
    document = json.loads(out)
    assert document["schema"] == "slotwise.replay/v1"
    assert document["tokens"]["decode"] == load_routing(trace).tokens("decode")
    best = {}
    for one in document["replays"]:
        total = one["read"]["bytes"] + one["decode"]["bytes"]
        key = tuple(one["slots"])
        if one["policy"] == "belady":
            best[key] = total
        assert total >= best[key]
    assert len(best) == 2
    code, out, _ = bench(capsys, "--replay", trace, "--slots", "100%")
    assert code == 0
    assert "belady" in out


def test_replay_of_something_else_is_refused(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = bench(capsys, "--replay", tiny)
    assert code == 3
    assert "expected" in err


@pytest.mark.usefixtures("real_groups")
def test_ctrl_c_leaves_no_child_and_no_group(tiny: Path) -> None:
    command = [sys.executable, "-c", "from slotwise.cli import entry; entry()", "bench", str(tiny)]
    many = ("--prompts", "8", "--pairs", "500", "--memory", "300MiB", "--threads", "1")
    process = subprocess.Popen(
        [*command, *many], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        group, child = first_child(f"slotwise-bench-{process.pid}-{300 << 20}")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in err
    assert not group.exists()
    assert not Path(f"/proc/{child}").exists()


def first_child(name: str) -> tuple[Path, int]:
    """The group called `name` and a process in it, as soon as there is one."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # groups come and go while we look
            for procs in GROUPS.glob(f"**/{name}/cgroup.procs"):
                if children := procs.read_text().split():
                    return procs.parent, int(children[0])
    raise AssertionError(f"{name} was never there")
