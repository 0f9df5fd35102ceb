"""Secrets in every kind of line, names that a terminal would obey, pipes, full disks, few lines."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from explain import made

from slotwise.cli import main
from slotwise.explain import fit, html, summary, wording
from slotwise.explain.arms import two_arms
from slotwise.explain.compare import compare
from slotwise.explain.levers import predict_levers
from slotwise.explain.readers import FileReading, ladder_record, read_files
from slotwise.explain.readers.llama_cpp import LlamaCppReader
from slotwise.explain.readers.strata_prefill import parse_phases
from slotwise.explain.record import Life, Reading

DATA = Path(__file__).parents[1] / "data" / "explain"
LOG = DATA / "strata-notmike101-P023" / "engine-session.thinned.txt"
KINDS = sorted(p for p in DATA.rglob("*") if p.suffix in (".log", ".txt", ".out", ".json", ".md"))
SECRETS = (
    "sk-Zq81hVd02LmX", "/home/zebraname/zq", "zebra@host.example", "https://zebra.example/z?t=1",
    "ZebraPrompt1234", "C:\\Users\\zebraname",
)  # fmt: skip
LEAK = re.compile("zebra|Zq81h|02LmX", re.IGNORECASE)
_SEPARATORS = re.compile(r"(\s+|[=,:()\"\[\]{}])")


def poisoned(text: str, secret: str, rng: random.Random) -> str:
    """Lines with the secret after, before or between their words, instead of one, or without it."""
    out = []
    for line in text.split("\n"):
        pieces = _SEPARATORS.split(line)
        words = [i for i, piece in enumerate(pieces) if len(piece) > 1 and piece.strip()]
        way = rng.randrange(5) if words else 0
        if way == 1:
            pieces.append(f" {secret}")
        elif way == 2:
            pieces.insert(0, f"{secret} ")
        elif way:
            at = rng.choice(words)
            pieces[at] = secret if way == 3 else f"{pieces[at]} {secret}"
        out.append("".join(pieces))
    return "\n".join(out)


@pytest.mark.parametrize("secret", SECRETS)
def test_no_secret_leaves_a_reader(secret: str, tmp_path: Path) -> None:
    rng = random.Random(secret)
    lives = 0
    for path in KINDS:
        if path.name == "SOURCE.txt":
            continue
        text = path.read_text(encoding="utf-8", errors="replace")[:100_000]
        log = tmp_path / "engine.log"
        log.write_text(poisoned(text, secret, rng), encoding="utf-8")
        reading = read_files([log])
        lives += len(reading.lives)
        assert not LEAK.search(json.dumps(reading.to_dict())), path
    assert lives > 20


def test_half_a_path_is_no_phase_name() -> None:
    assert parse_phases("gdn 3 (1.0%) /home/zebra/x gather 5 (2.0%)") == ({"gdn": 3.0}, 1)
    assert parse_phases(" ... qsa attn 3 (1.0%), gather 5 (2.0%)")[1] == 0


def test_a_failed_sample_does_not_quote_the_server() -> None:
    sample = {
        "arm": "off", "status": "error", "why": "HTTP 500: your prompt zebra", "index": 0,
        "trace": {"status": "done", "cannot_tell": ["see https://zebra.example/z", "the rest"]},
    }  # fmt: skip
    arm = {"name": "off", "servers": [{"version": "zebra"}]}
    (life,) = ladder_record.lives_of({"arms": [arm], "samples": [sample]}, file="run.json")
    assert not LEAK.search(json.dumps(life.to_dict()))
    assert life.requests[0].cannot_tell == ("(not shown)", "the rest")


def test_a_name_that_a_terminal_would_obey(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a[bold]\x1b[31m\udcff.log"
    path.write_bytes(LOG.read_bytes())
    assert main(["explain", str(path)]) == 0
    assert "a[bold]?[31m?.log from line" in capsys.readouterr().out


def test_two_logs_of_one_name_are_not_told_apart_by_their_folders(tmp_path: Path) -> None:
    for user in ("alice", "bob"):
        (tmp_path / user).mkdir()
        (tmp_path / user / "x.log").write_bytes(LOG.read_bytes())
    arms = two_arms(*(str(tmp_path / user / "x.log") for user in ("alice", "bob")))
    assert [name for name, _ in arms] == ["x.log (A)", "x.log (B)"]


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_pipe_is_a_log_too(pack: Any, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(pack(LOG.read_bytes())))
    writer.start()
    reading = read_files([pipe])
    writer.join(timeout=60)
    assert reading.lives[0].requests == read_files([LOG]).lives[0].requests


@pytest.mark.parametrize("name", ["made/vllm-0.6-docker.log", "made/llamacpp-2026-11-verbose.log"])
def test_a_log_that_comes_line_by_line_is_the_whole_log(name: str, tmp_path: Path) -> None:
    source = DATA / name
    path = tmp_path / source.name
    path.touch()
    reading = FileReading(path)
    with path.open("ab", buffering=0) as log:
        for line in source.read_bytes().splitlines(keepends=True):
            log.write(line)
            reading.pump()
    whole = FileReading(source)
    whole.pump()
    assert reading.lives() == whole.lives()
    assert sum(reading.unknown_counts().values()) == sum(whole.unknown_counts().values())
    assert reading.lines == whole.lines
    reading.end()
    whole.end()


def test_blank_lines_at_a_block_s_end_are_counted() -> None:
    assert LlamaCppReader("a").feed_block(1, b"a\n\n") == 4


def test_a_full_disk_leaves_no_half_page(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000));"
        "from slotwise.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    call = [sys.executable, "-c", code, "explain", str(LOG), "--html", str(page)]
    done = subprocess.run(call, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "page.html cannot be written: File too large" in done.stderr
    assert not page.exists()


def test_more_reused_than_there_is_is_said(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_text(
        "strata serve: prompt 100 tokens = 500 reused + 100 read in 900 ms (1.0 tok/s), "
        "1 generated in 30 ms (60.0 tok/s), drafts accepted 0 of 0, 2 checkpoints\n",
        encoding="ascii",
    )
    (request,) = read_files([path]).lives[0].requests
    assert "more tokens are reused than the prompt has" in request.warnings


def test_a_fit_that_cannot_be_is_not_a_title_alone() -> None:
    line = fit.straight_line([1757.0, 2334.0], [2285.0, 3721.0], name="read", per="token")
    title = wording.fit_title("read", line)
    assert title.startswith("read: -2,08")
    assert "below zero" in title
    assert "too small for an interval" in title
    sound = fit.straight_line([1.0, 1, 5, 5, 9, 9], [11.0, 12, 31, 30, 50, 51], name="r", per="t")
    assert wording.fit_title("r", sound) == f"r: {wording.formula(sound)}"
    life = Life(dialect="strata", file="a.log", first_line=1, requests=tuple(
        made.request(i, prompt=n, phases=(), prompt_ms=ms)
        for i, (n, ms) in enumerate(((1757, 2285.0), (2334, 3721.0)))
    ))  # fmt: skip
    page = html.page(summary.explain(Reading(lives=(life,))))
    (caption,) = re.findall("<figcaption>(.*?)</figcaption>", page)
    assert "below zero" in caption


def test_drawn_requests_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "MOST_REQUESTS", 20)
    reading = read_files([LOG])
    said = "20 of 24 requests, drawn at random, are in these numbers"
    result = compare(reading, reading, names=("a", "b"))
    assert {f"arm A: {said}", f"arm B: {said}"} <= set(result.warnings)
    assert said in predict_levers(reading).warnings


def test_an_arm_that_differs_otherwise_is_said_with_its_lever() -> None:
    now = read_files([LOG])
    other = replace(now, lives=tuple(replace(life, version="9.9") for life in now.lives))
    report = predict_levers(now, with_lever=other, lever_key="deferred-refill", arm="other")
    assert any(w.startswith("not comparable: other engine revisions") for w in report.warnings)
    assert any(w.startswith("differs beside the lever: version") for w in report.warnings)
