"""`slotwise explain` from the outside: logs in, text, JSON or a page out, and exit codes."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from explain import made

from slotwise.cli_support import run_guarded
from slotwise.explain.commands import explain_group

SECRET = "the launch code is 8675309-swordfish"
PROGRAM = """
import sys
from slotwise.cli_support import run_guarded
from slotwise.explain.commands import explain_group
sys.exit(run_guarded(explain_group, sys.argv[1:]))
"""


def block(read: int, read_ms: float, refill_ms: float, slots: int, *, rest: float = 56.0) -> str:
    """One request as Strata 0.1.41 writes it with STRATA_TRACE=1."""
    n, total = read + 1, read_ms + refill_ms + rest
    trace = (
        f"request {n} 0",
        f"prompt start {read} -1",
        f"lent {slots} slots for 2048 tokens in 0.0 ms",
        f"prompt chunk 0 of {read}",
        f"read {read} tokens (batched) in {read_ms:.1f} ms",
        f"refill start {slots} -1",
        f"refilled {slots} slots on 1 stage(s) in {refill_ms:.1f} ms",
        "prompt done (slots refilled) -1 -1",
        f"window {read} 1",
    )
    summary = (
        f"strata serve: prompt {n} tokens = 0 reused + {n} read in {total:.0f} ms "
        f"({n / total * 1e3:.1f} tok/s), 1 generated in 30 ms (33.3 tok/s), "
        "drafts accepted 0 of 0, 1 checkpoints"
    )
    return "".join(f"strata trace: {line}\n" for line in trace) + summary + "\n"


def study() -> str:
    rows = zip(made.READS, made.READ_MS, made.REFILL_MS, made.SLOTS, strict=True)
    return "".join(block(*row) for row in rows)


def ladder(*, rest: float = 56.0, refill: float = 0.32, wobble: float = 1.0) -> str:
    text = ""
    for turn in range(6):
        for step, read in enumerate((200, 800, 2000)):
            slots, noise = 150 + read // 4, wobble * (0.3, -0.8, 0.9, -0.2, 0.6)[(turn + step) % 5]
            text += block(read, 100 + 0.7 * read + noise, slots * refill + 0.1, slots, rest=rest)
    return text


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "engine.log"
    path.write_text(study())
    return path


def called(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = run_guarded(explain_group, [str(a) for a in arguments])
    out, err = capfd.readouterr()
    assert "Traceback" not in err
    return code, out, err


def test_the_study_as_a_log_gives_its_numbers_back(
    log: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    code, out, err = called(capfd, log)
    assert (code, err) == (0, "")
    for number in ("252.0 m", "188.2 m", "0.319 ms/slot", "109.5 ms + 0.706 ms/token"):
        assert number in out
    assert "56.3 d" in out  # the summary line rounds 379.7 to 380
    assert called(capfd, "logs", log)[1] == out


def test_json_and_gzip(log: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    packed = tmp_path / "engine.log.gz"
    packed.write_bytes(gzip.compress(log.read_bytes()))
    code, out, _ = called(capfd, packed, "--json")
    document = json.loads(out)
    assert code == 0
    requests = document["lives"][0]["requests"]
    assert [r["slots_lent"]["value"] for r in requests] == list(made.SLOTS)
    assert [r["remainders"][0]["ms"]["how"] for r in requests] == ["derived"] * 3
    assert document["lives"][0]["summary"]["read"]["floor"]["saturated"] is True


def test_a_page_is_written_once(
    log: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert called(capfd, log, "--html", page)[:2] == (0, "")
    assert page.read_text().startswith("<!doctype html>")
    page.write_text("mine")
    code, _, err = called(capfd, log, "--html", page)
    assert code == 2
    assert "--force" in err
    assert page.read_text() == "mine"
    assert called(capfd, log, "--html", page, "--force")[0] == 0
    assert "0.319" in page.read_text()
    assert called(capfd, log, "--html", "-")[1].startswith("<!doctype html>")


def test_nothing_of_the_log_s_text_gets_out(
    log: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    log.write_text(
        f"user: {SECRET}\n" + study() + f"strata serve: {SECRET} /home/alice/swordfish.gguf\n"
    )
    page = tmp_path / "page.html"
    outputs = [
        called(capfd, log, *more)[1]
        for more in ([], ["--per-request"], ["--unknown"], ["--json"], ["--html", page])
    ]
    outputs.append(page.read_text())
    for text in outputs:
        assert "swordfish" not in text
        assert "alice" not in text
        assert "8675309" not in text
    assert "lines were not understood" in outputs[0]
    assert "…" in outputs[2]


def test_nothing_measured_is_exit_code_3(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "shopping.txt"
    other.write_text("eggs\nbread\n")
    code, out, err = called(capfd, other)
    assert code == 3
    assert "no known dialect" in out
    assert "nothing was measured" in err
    assert called(capfd, tmp_path / "absent.log")[0] == 2
    assert called(capfd)[0] == 2


def test_arms_are_compared_or_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name, text in (("off", ladder()), ("pinned", ladder(rest=204.0, wobble=1.3))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "engine.log").write_text(text)
    code, out, _ = called(capfd, "compare", tmp_path / "off", tmp_path / "pinned", "--json")
    assert code == 0
    for size in json.loads(out)["sizes"]:
        assert size["unexplained"]["by"]["estimate"]["value"] == pytest.approx(148, abs=1)
    small = tmp_path / "small.log"
    small.write_text(block(20, 90.0, 9.0, 30) * 5)
    code, _, err = called(capfd, "compare", tmp_path / "off", small)
    assert code == 3
    assert "no prompt size" in err
    code, out, _ = called(capfd, "compare", tmp_path / "off", small, "--force-compare")
    assert code == 0
    assert "FORCED although" in out
    (tmp_path / "empty").mkdir()
    assert called(capfd, "compare", tmp_path / "off", tmp_path / "empty")[0] == 1


def test_a_lever_is_predicted_and_set_against_an_arm(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    now, deferred = tmp_path / "now.log", tmp_path / "deferred.log"
    now.write_text(ladder())
    deferred.write_text(ladder(refill=0.0, wobble=1.2))
    code, out, _ = called(
        capfd, "levers", now, "--with", deferred, "--lever", "deferred-refill", "--json"
    )
    predictions = json.loads(out)["predictions"]
    assert code == 0
    assert [p["holds"] for p in predictions] == [True, True, True]
    code, out, _ = called(capfd, "levers", now)
    assert "assumes:" in out
    code, out, _ = called(capfd, "levers", now, "--lever", "one-part")
    assert code == 3
    assert "not predicted" in out
    for wrong in (["--with", deferred], ["--lever", "magic"]):
        code, _, err = called(capfd, "levers", now, *wrong)
        assert code == 2
        assert err.startswith("error: ")


def test_benchmark_rows_are_joined_and_strangers_listed(
    log: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    rows = [
        {"prompt_tokens": 128, "ttft_ms": 412.0},
        {"prompt_tokens": 77, "ttft_ms": 99.0},
        {"prompt_tokens": 1610, "ttft_ms": 1520.0},
    ]
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"rows": rows}))
    code, out, _ = called(capfd, log, "--join", results)
    assert code == 0
    assert "2 paired" in out
    assert "412.0" in out
    assert "1 requests without a partner: 2" in out
    assert "1 benchmark rows without a partner: 2" in out


def test_following_shows_what_is_appended(log: Path) -> None:
    environment = {**os.environ, "COLUMNS": "160", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(log), "--follow"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            seen = iter(process.stdout.readline, "")
            assert any("1,245.0" in line for line in seen)
            with log.open("a") as more:
                more.write(block(777, 654.3, 99.9, 311))
            assert any("654.3" in line for line in seen)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                _, err = process.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
    assert process.returncode == 130
    assert "Traceback" not in err


def test_following_shows_a_table_and_nothing_else(
    log: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert called(capfd, log, "--follow", "--json")[0] == 2


def test_help_costs_no_heavy_import() -> None:
    code = (
        "import sys\nfrom slotwise.explain.commands import explain_group\n"
        "try:\n    explain_group(['logs', '--help'])\nexcept SystemExit: pass\n"
        "print(sorted({'numpy', 'scipy', 'rich', 'jinja2', 'ggml'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_worked_example_is_what_the_tool_prints(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every line of the example on docs/explain.md, in order; `...` stands for any lines."""
    monkeypatch.setenv("COLUMNS", "140")
    root = Path(__file__).parents[2]
    data = root / "tests/data/explain/strata-notmike101-P023/engine-session.thinned.txt"
    page = (root / "docs/explain.md").read_text()
    example = page.partition("$ slotwise explain engine-session.thinned.txt\n")[2]
    printed = iter([" ".join(line.split()) for line in called(capfd, data)[1].splitlines()])
    for line in example.partition("\n```")[0].splitlines():
        assert line == "..." or " ".join(line.split()) in printed, line
    log = data.read_text()
    excerpt = page.partition("```text\n")[2].partition("```")[0].splitlines()
    assert len(excerpt) == 9
    for line in excerpt:
        assert f"{line}\n" in log
