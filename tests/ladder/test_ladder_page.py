"""The example that docs/ladder.md begins with runs, against llama.cpp's real server."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from house.talking_model import write_talking_model
from house.tree import HOUSE, blocks

from slotwise.ladder.arms import read_arm
from slotwise.ladder.client import Client
from slotwise.ladder.identity import answers
from slotwise.ladder.record import read_record
from slotwise.ladder.service import read_service

PAGE = HOUSE / "docs" / "ladder.md"
PROGRAM = [sys.executable, "-c", "from slotwise.cli import entry; entry()"]
LETTER_E = 101
"""Its token; a random model may say nothing but control characters, which are no text."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """(address, log) of a llama.cpp server with a tiny model."""
    folder = tmp_path_factory.mktemp("llama")
    model, log = write_talking_model(folder / "tiny.gguf"), folder / "server.log"
    program = [sys.executable, str(Path(__file__).with_name("llama_server.py")), str(model)]
    with log.open("wb") as err:
        process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=err, text=True)
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    client, end = Client(url), time.monotonic() + 60
    while answers(client) != 200:
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.05)
    client.close()
    yield url, log
    process.terminate()
    process.stdout.close()
    process.wait()


def slotwise(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *arguments], cwd=cwd, capture_output=True, text=True, timeout=240, check=False
    )


def talkative(folder: Path) -> str:
    """An arm that makes the tiny model say letters."""
    arm = folder / "arm.toml"
    arm.write_text(
        f"[request]\nlogit_bias = [[{LETTER_E}, 1000.0]]\n"
        "[engaged]\ncounter = 'response:timings.cache_n'\nis = 0\n"
    )
    return f"tiny={arm}"


def test_the_page_s_commands_run(llama: tuple[str, Path], tmp_path: Path) -> None:
    calls = [
        line.removeprefix("$ slotwise ")
        for block in blocks(PAGE, "console")
        for line in block.text.splitlines()
        if line.startswith("$ slotwise")
    ]
    assert len(calls) == 4
    for call in calls:
        arguments = shlex.split(call.replace("http://127.0.0.1:8080", llama[0]))
        if "--url" in arguments:
            arguments += ["--arm", talkative(tmp_path)]
        done = slotwise(*arguments, cwd=tmp_path)
        assert done.returncode == 0, f"{call}\n{done.stderr}"
    assert "<svg" in (tmp_path / "run.html").read_text()


def test_llama_cpp_is_measured_exactly_and_paired_with_its_log(
    llama: tuple[str, Path], tmp_path: Path
) -> None:
    url, log = llama
    done = slotwise(
        "ladder", "--url", url, "--sizes", "50,90,300", "--samples", "3", "--max-tokens", "4",
        "--arm", talkative(tmp_path), "--trace", str(log), "--out", "run.json", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = read_record(tmp_path / "run.json")
    warm = [s for s in record["samples"] if not s["cold"]]
    assert len(warm) == 9
    for sample in warm:
        assert sample["status"] == "ok", sample["why"]
        assert sample["tokens"] == {
            "prompt": sample["target_tokens"], "cached": 0, "generated": 4,
        }  # fmt: skip
        assert sample["trace"]["prompt_ms"]["value"] == pytest.approx(
            sample["timings"]["prompt_ms"], abs=0.02
        )
    assert record["pairing"]["unpaired_samples"] == []
    assert record["arms"][0]["servers"][0]["software"] == "llama.cpp"
    assert record["arms"][0]["fields"]["cache_prompt"] is False


def test_the_page_s_files_are_what_the_ladder_reads(tmp_path: Path) -> None:
    files = {}
    for block in blocks(PAGE, "toml"):
        name = re.match(r"# ([\w.]+)\n", block.text)
        assert name is not None
        files[name[1]] = tmp_path / name[1]
        files[name[1]].write_text(block.text)
    assert set(files) == {"deferred.toml", "window.toml"}
    arm = read_arm("deferred", files["deferred.toml"])
    assert [engaged.every_sample for engaged in arm.engaged] == [True, False]
    assert arm.start is not None
    assert read_service(files["window.toml"]).stop[-1] == "llama"
    assert tomllib.loads(files["deferred.toml"].read_text())
