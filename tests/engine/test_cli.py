"""The command line, in this process: what goes to which stream, exit codes, and no tracebacks."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine.rig import Small

from slotwise.cli import main
from slotwise.trace import RequestRecord

FEW = ("--threads", "1", "--context", "256", "--chunk", "32", "-n", "6", "--temp", "0")


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., Result]


@pytest.fixture
def cli(capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs `slotwise`; whatever happens, nobody sees a traceback or the words for a defect."""

    def run(*arguments: str | Path, stdin: bytes = b"") -> Result:
        text = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8", errors="strict")
        monkeypatch.setattr(sys, "stdin", text)
        code = main([str(a) for a in arguments])
        captured = capfdbinary.readouterr()
        result = Result(code, captured.out.decode(), captured.err.decode())
        assert "Traceback" not in result.err
        assert "internal error" not in result.err
        assert "\x1b[" not in result.out + result.err, "colours where nobody looks"
        return result

    return run


@pytest.fixture
def model(talking: Path, tmp_path: Path) -> Path:
    """A copy, so that packs and profiles beside it are this test's own."""
    return Path(shutil.copy(talking, tmp_path / "talking.gguf"))


# -- run


def test_run_writes_the_answer_and_then_the_table(cli: Cli, model: Path) -> None:
    result = cli("run", model, "-p", "hello", *FEW)
    assert result.code == 0
    assert result.out.endswith("\n")
    assert len(result.out.rstrip("\n")) in range(1, 7)
    for words in ("first token", "first_window", "sum = wall time", "other"):
        assert words in result.err
    assert "first_window" not in result.out


def test_run_as_json_is_one_document_and_no_table(cli: Cli, model: Path) -> None:
    plain = cli("run", model, "-p", "hello", *FEW)
    result = cli("run", model, "-p", "hello", "--json", *FEW)
    assert result.code == 0
    assert result.out.count("\n") == 1
    assert result.json["text"] == plain.out[:-1]
    record = RequestRecord.from_dict(result.json["record"])
    assert record.to_dict() == result.json["record"]
    assert (record.status, record.tokens.generated) == ("done", 6)
    assert "first_window" not in result.err


def test_run_quietly(cli: Cli, model: Path) -> None:
    loud, result = (cli("run", model, "-p", "hello", *o, *FEW) for o in ((), ("--quiet",)))
    assert result.out == loud.out
    assert "first_window" not in result.err


@pytest.mark.parametrize("arguments", [(), ("-p", "-")])
def test_the_prompt_may_come_through_standard_input(
    cli: Cli, model: Path, arguments: Sequence[str]
) -> None:
    expected = cli("run", model, "-p", "hello", *FEW)
    assert cli("run", model, *arguments, *FEW, stdin=b"hello").out == expected.out


def test_standard_input_that_is_no_text(cli: Cli, model: Path) -> None:
    assert cli("run", model, *FEW, stdin=b"\xff\xfehello \xe2\x82").code == 0


@pytest.mark.parametrize("prompt", ["", " \n\t"])
def test_an_empty_prompt(cli: Cli, model: Path, prompt: str) -> None:
    for result in (
        cli("run", model, "-p", prompt, *FEW),
        cli("run", model, *FEW, stdin=prompt.encode()),
    ):
        assert (result.code, result.out) == (2, "")
        assert "error: the prompt is empty\n" in result.err


def test_raw_text_is_continued_without_a_template(cli: Cli, model: Path) -> None:
    result = cli("run", model, "-p", "hello", "--raw", "--json", *FEW)
    templated = cli("run", model, "-p", "hello", "--json", *FEW)
    assert result.json["record"]["tokens"]["prompt"] == len("hello") - 1  # `he` is one token
    assert templated.json["record"]["tokens"]["prompt"] > len("hello")


def test_a_system_message_is_read_first(cli: Cli, model: Path) -> None:
    without = cli("run", model, "-p", "hello", "--json", *FEW).json["record"]["tokens"]["prompt"]
    result = cli("run", model, "-p", "hello", "-s", "Be brief.", "--json", *FEW)
    assert result.json["record"]["tokens"]["prompt"] > without + len("Be brief.")


def test_a_seed_repeats_an_answer(cli: Cli, model: Path) -> None:
    hot = (*FEW, "--temp", "2", "--top-k", "0", "--top-p", "1", "--min-p", "0")
    one, again, other = (
        cli("run", model, "-p", "hello", *hot, "--seed", seed).out for seed in ("1", "1", "2")
    )
    assert one == again != other


@pytest.mark.parametrize("refill", ["deferred", "blocking", "lazy"])
def test_every_way_to_refill(cli: Cli, model: Path, refill: str) -> None:
    expected = cli("run", model, "-p", "hello", *FEW).out
    result = cli("run", model, "-p", "hello", "--refill", refill, "--json", *FEW)
    assert result.json["text"] == expected[:-1]
    phases = result.json["record"]["ledger"]["phases"]
    assert ("refill" in phases) == (refill == "blocking")


def test_a_prompt_longer_than_the_context(cli: Cli, model: Path) -> None:
    result = cli("run", model, "-p", "x" * 300, *FEW)
    assert (result.code, result.out) == (2, "")
    assert "the context holds 256" in result.err
    assert "Give a larger --context" in result.err


# -- chat


def test_two_turns_of_a_conversation(cli: Cli, model: Path) -> None:
    result = cli("chat", model, *FEW, stdin=b"hello\n\n  \nand now?\n")
    assert result.code == 0
    first, second = [line for line in result.err.splitlines() if "first token" in line]
    assert "0 reused" in first
    reused = int(second.split(" reused")[0].rpartition(" ")[2])
    assert reused > 20
    assert result.out.count("\n") >= 2


def test_a_quiet_conversation(cli: Cli, model: Path) -> None:
    result = cli("chat", model, "--quiet", *FEW, stdin=b"hello\n")
    assert result.code == 0
    assert "first token" not in result.err


def test_a_conversation_without_a_word(cli: Cli, model: Path) -> None:
    result = cli("chat", model, *FEW)
    assert (result.code, result.out) == (0, "")


def test_a_conversation_that_outgrows_the_context(cli: Cli, model: Path) -> None:
    result = cli("chat", model, *FEW, stdin=b"x" * 100 + b"\n" + b"y" * 150 + b"\n")
    assert result.code == 2
    assert "the context holds 256" in result.err


def test_a_model_that_cannot_chat(cli: Cli, small: Callable[[str], Small]) -> None:
    result = cli("chat", small("llama").path, "--threads", "1", stdin=b"hello\n")
    assert result.code in (2, 3)
    assert "tokenizer" in result.err or "chat template" in result.err


# -- check


def test_check_a_sound_model(cli: Cli, model: Path) -> None:
    result = cli("check", model, "--memory", "1GiB")
    assert result.code == 0
    assert "talking.gguf" in result.out
    report = cli("check", model, "--memory", "1GiB", "--json")
    assert report.code == 0
    assert isinstance(report.json, dict)


def codes(report: Any) -> set[str]:
    return {f["code"] for f in report["findings"] if f["level"] == "refusal"}


def test_check_says_everything_at_once(cli: Cli, model: Path, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text("[]")
    result = cli("check", model, "--memory", "1MiB", "--profile", tmp_path / "p.json", "--json")
    assert result.code == 3
    assert codes(result.json) >= {"memory-too-small", "profile-schema"}
    plain = cli("check", model, "--memory", "1MiB", "--profile", tmp_path / "p.json")
    assert plain.code == 3
    assert "MiB" in plain.out


def test_the_smallest_budget_that_check_names_is_enough(cli: Cli, model: Path) -> None:
    options = ("--context", "256", "--chunk", "32")
    report = cli("check", model, "--memory", "1", *options, "--json").json
    needed = report["memory_needed_bytes"]
    enough = str(needed)
    assert cli("check", model, "--memory", enough, *options).code == 0
    assert cli("run", model, "-p", "hello", "--memory", enough, *FEW).code == 0
    less = str(needed - 1)
    assert cli("check", model, "--memory", less, *options).code == 3
    assert cli("run", model, "-p", "hello", "--memory", less, *FEW).code == 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:100],
        lambda data: b"",
        lambda data: b"not a model" * 100,
        lambda data: data[:24] + bytes(64) + data[88:],
        lambda data: data.replace(b"ffn_up_exps", b"ffn_up_expz"),
        lambda data: data.replace(b"llama.block_count", b"llama.block_kount"),
        lambda data: data.replace(b"\x05" + bytes(7) + b"llama", b"\x05" + bytes(7) + b"lllll"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_refused_by_every_verb(
    cli: Cli, model: Path, damage: Callable[[bytes], bytes]
) -> None:
    model.write_bytes(damage(model.read_bytes()))
    for verb in (["check", model, "--memory", "1GiB"], ["run", model, "-p", "x", *FEW]):
        result = cli(*verb)
        assert result.code == 3
        assert "refusal" in result.err + result.out or "expected" in result.err + result.out
    assert cli("chat", model, *FEW, stdin=b"x\n").code == 3
    if b"kount" not in model.read_bytes():  # of the layers, a pack only wants the experts
        assert cli("pack", model).code == 3
        assert not list(model.parent.glob("*.slotpack/experts.bin"))


# -- pack


def test_pack_and_run_from_it(cli: Cli, model: Path) -> None:
    before = cli("run", model, "-p", "hello", *FEW)
    result = cli("pack", model, "--json")
    assert result.code == 0
    assert (result.json["experts"], Path(result.json["pack"]).parent) == (16, model.parent)
    assert (result.json["written_experts"], result.json["bytes"]) == (16, 16 * 24576)
    assert cli("pack", model, "--json").json["written_experts"] == 0
    assert "complete already" in cli("pack", model).out
    after = cli("run", model, "-p", "hello", *FEW)
    assert after.out == before.out
    assert cli("check", model, "--memory", "1GiB", "--deep").code == 0


def test_a_pack_of_another_model_is_refused_or_passed_over(
    cli: Cli, model: Path, small: Callable[[str], Small]
) -> None:
    expected = cli("run", model, "-p", "hello", *FEW)
    other = small("gpt-oss").pack
    assert cli("check", model, "--memory", "1GiB", "--pack", other).code == 3
    result = cli("run", model, "-p", "hello", "--pack", other, *FEW)
    assert result.code == 3 or result.out == expected.out


def test_a_dense_model_has_nothing_to_pack(cli: Cli, small: Callable[[str], Small]) -> None:
    result = cli("pack", small("llama").path)
    assert result.code == 2
    assert "has no experts" in result.err


# -- profile


def test_learn_a_profile_and_run_with_it(cli: Cli, model: Path, tmp_path: Path) -> None:
    expected = cli("run", model, "-p", "hello", *FEW).out
    text = tmp_path / "text.txt"
    text.write_bytes("Käse und Brot. ".encode() * 40 + b"\xff")
    few = FEW[:6]
    result = cli("profile", model, "--text", text, "--json", *few)
    assert result.code == 0
    assert result.json["tokens"] > 256, "more than one context"
    assert (result.json["moe_layers"], result.json["experts"]) == (2, 8)
    profile = Path(result.json["profile"])
    counts = json.loads(profile.read_text())["counts"]
    assert sum(map(sum, counts)) == result.json["tokens"] * 2 * 2  # layers x top-k
    again = cli("profile", model, "--text", text, *few)
    assert again.code == 2
    assert "--force" in again.err
    assert cli("profile", model, "--text", text, "--force", *few).code == 0
    run = cli("run", model, "-p", "hello", "--profile", profile, *FEW)
    assert (run.code, run.out) == (0, expected)


def test_a_profile_is_learnt_from_answers(cli: Cli, model: Path, tmp_path: Path) -> None:
    profile = tmp_path / "learnt.json"
    result = cli("run", model, "-p", "hello", "--save-profile", profile, "--json", *FEW)
    assert result.code == 0
    tokens = result.json["record"]["tokens"]
    routed = tokens["prompt"] + tokens["generated"] - 1  # the last token is only sampled
    counts = json.loads(profile.read_text())["counts"]
    assert sum(map(sum, counts)) == routed * 2 * 2  # layers x top-k
    again = cli("run", model, "-p", "hello", "--save-profile", profile, *FEW)
    assert again.code == 2
    assert "exists already" in again.err
    both = ("--profile", profile, "--save-profile", profile, "--force")
    used = cli("run", model, "-p", "hello", *both, *FEW)
    assert used.code == 2
    assert "an input of this command" in used.err
    assert cli("run", model, "-p", "hello", *both[2:], *FEW).code == 0


def test_an_empty_text_teaches_nothing(cli: Cli, model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    result = cli("profile", model, "--text", tmp_path / "empty.txt", *FEW[:6])
    assert result.code == 2
    assert "no text in empty.txt" in result.err
    assert not list(tmp_path.glob("*.profile.json"))


def test_a_profile_of_another_shape(cli: Cli, model: Path, small: Callable[[str], Small]) -> None:
    profile = small("gpt-oss").profiles["skewed"]
    assert profile is not None
    result = cli("run", model, "-p", "hello", "--profile", profile, *FEW)
    assert (result.code, result.out) == (3, "")
    assert "profile of 3 layers" in result.err


# -- trace


def test_trace_and_export(cli: Cli, model: Path, tmp_path: Path) -> None:
    trace, perfetto = tmp_path / "t.jsonl", tmp_path / "p.json"
    assert cli("run", model, "-p", "hello", "--trace", trace, *FEW).code == 0
    assert cli("trace", "export", trace, "--perfetto", perfetto).code == 0
    assert json.loads(perfetto.read_text())["traceEvents"]
    again = cli("trace", "export", trace, "--perfetto", perfetto)
    assert again.code == 2
    assert "exists already" in again.err
    assert cli("trace", "export", trace, "--perfetto", perfetto, "--force").code == 0
    result = cli("trace", "export", model, "--perfetto", tmp_path / "q.json")
    assert result.code == 1
    assert not (tmp_path / "q.json").exists()


def test_a_trace_that_cannot_be_written(cli: Cli, model: Path, tmp_path: Path) -> None:
    result = cli("run", model, "-p", "x", "--trace", tmp_path / "no" / "t.jsonl", *FEW)
    assert (result.code, result.out) == (1, "")
    assert "t.jsonl" in result.err


# -- usage


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["run"],
        ["run", "MODEL", "--memory", "lots"],
        ["run", "MODEL", "--memory", "-1"],
        ["run", "MODEL", "--memory", "0"],
        ["run", "MODEL", "--refill", "sometimes"],
        ["run", "MODEL", "--threads", "0"],
        ["run", "MODEL", "--threads", "100000", "-p", "x"],
        ["run", "MODEL", "--context", "99999999999999999999", "-p", "x"],
        ["run", "MODEL", "--temp", "nan", "-p", "x"],
        ["run", "MODEL", "--top-p", "2", "-p", "x"],
        ["run", "MODEL", "--seed", "-1", "-p", "x"],
        ["run", "MODEL", "-n", "0"],
        ["run", "MODEL", "--no-such-option"],
        ["run", "FOLDER", "-p", "x"],
        ["run", "MISSING", "-p", "x"],
        ["check", "MISSING"],
        ["pack", "MISSING"],
        ["chat", "MISSING"],
        ["profile", "MODEL"],
        ["profile", "MODEL", "--text", "MISSING"],
        ["trace", "export", "MISSING", "--perfetto", "x"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_2(cli: Cli, talking: Path, tmp_path: Path, arguments: list[str]) -> None:
    places = {"MODEL": talking, "FOLDER": tmp_path, "MISSING": tmp_path / "missing.gguf"}
    result = cli(*(places.get(a, a) for a in arguments), stdin=b"x")
    assert (result.code, result.out) == (2, "")
    assert result.err


@pytest.mark.parametrize("verb", ["run", "chat", "check", "pack", "profile", "trace"])
def test_help_of_every_verb(cli: Cli, verb: str) -> None:
    result = cli(verb, "--help")
    assert result.code == 0
    assert "Usage: slotwise" in result.out


def test_version(cli: Cli) -> None:
    result = cli("--version")
    assert result.code == 0
    assert result.out.startswith("slotwise")
