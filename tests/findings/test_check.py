"""`slotwise findings check`: sources in a git checkout, evidence by checksum, every number."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slotwise.cli import main
from slotwise.findings import citations, evidence

Check = Callable[..., tuple[int, list[str]]]
SOURCE = b"one\ntwo\r\n\nfour\rstill four\nfive"
LOG = b"read 127 tokens in 252.0 ms\nlent 225 slots\n"
RUN = {
    "read_ms": 252.0,
    "phases": {"refill": {"ns": 71_700_000}},
    "sizes": [127, 457],
    "a/b": "9 ms",
}


@pytest.fixture
def check(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Check:
    def run(record: dict[str, Any] | bytes, *options: str) -> tuple[int, list[str]]:
        """(exit code, issues as `level: where: found`)."""
        data = record if isinstance(record, bytes) else json.dumps(record).encode()
        (tmp_path / "r.json").write_bytes(data)
        capfd.readouterr()
        code = main(["findings", "check", str(tmp_path / "r.json"), "--json", *options])
        issues = json.loads(capfd.readouterr().out)["issues"]
        return code, [f"{i['level']}: {i['where']}: {i['found']}" for i in issues]

    return run


@pytest.fixture
def attach(tmp_path: Path) -> Callable[..., dict[str, str]]:
    def write(name: str, data: bytes | dict[str, Any], id: str = "e") -> dict[str, str]:
        data = data if isinstance(data, bytes) else json.dumps(data).encode()
        (tmp_path / name).write_bytes(data)
        return {"id": id, "path": name, "sha256": hashlib.sha256(data).hexdigest()}

    return write


def record(
    statement: str = "It is so.", *, sources: Sequence[dict[str, Any]] = (),
    evidence: Sequence[dict[str, str]] = (), numbers: Sequence[dict[str, Any]] = (),
    revision: str | None = "a" * 40, **claim: Any,
) -> dict[str, Any]:  # fmt: skip
    made = {
        "id": "c", "statement": statement, "status": "measured" if evidence else "predicted",
        "sources": list(sources), "evidence": [e["id"] for e in evidence],
        "numbers": list(numbers), "refuted_by": "Another run.",
    }  # fmt: skip
    if not sources and not evidence and not numbers:
        made["missing"] = {"evidence": "a test"}
    return {
        "schema": "slotwise.findings/v1", "title": "t",
        "subject": {"repository": "engine", "revision": revision}, "status": "draft",
        "claims": [made | claim], "evidence": list(evidence), "limitations": ["A test."],
        "observations": [], "invocation": "by hand", "tool": {"name": "t", "version": "1"},
    }  # fmt: skip


def cited(path: str, start: int, end: int | None = None, **more: str) -> dict[str, Any]:
    return {"path": path, "start_line": start, "end_line": end or start, **more}


def number(
    value: float | None, unit: str = "", how: str = "measured", **more: Any
) -> dict[str, Any]:
    return {"value": value, "unit": unit, "how": how, **more}


@pytest.fixture
def engine(checkout: Callable[..., tuple[Path, str]]) -> tuple[str, str]:
    files = {
        "a.c": SOURCE,
        "dir/b.c": b"x\n",
        "bin": b"\0\1\n2\n",
        "odd näme: 1": b"y\n",
        "empty": b"",
    }
    folder, revision = checkout(files)
    (folder / "a.c").write_text("changed since\n")
    return str(folder), revision


def test_lines_are_those_of_the_revision(
    check: Check, engine: tuple[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    repo, revision = engine
    digest = hashlib.sha256(b"two\r\n\nfour\rstill four\n").hexdigest()
    sources = [cited("a.c", 2, 4, sha256=digest), cited("a.c", 5), cited("odd näme: 1", 1),
               cited("dir/b.c", 1)]  # fmt: skip
    assert check(record(sources=sources, revision=revision), "--repo", repo) == (0, [])
    main(["findings", "check", str(tmp_path / "r.json"), "--repo", repo])
    shown = capfd.readouterr().out
    assert "a.c:2-4\n     2 | two\n     3 |\n     4 | four\\rstill four\n" in shown
    assert "a.c:5\n     5 | five\n" in shown


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (cited("a.c", 6), "a.c:6: a.c has 5 lines at that revision"),
        (cited("a.c", 1, 99), "a.c:1-99: a.c has 5 lines at that revision"),
        (cited("a.c", 3), "a.c:3: the cited lines are empty"),
        (cited("A.c", 1), "A.c:1: A.c is not there at that revision"),
        (cited("dir", 1), "dir:1: dir is a folder at that revision"),
        (cited("bin", 1), "bin:1: bin is a binary file"),
        (cited("empty", 1), "empty:1: empty has 0 lines at that revision"),
        (cited("a.c", 3, 2), "ends at line 2, before it starts"),
        (cited("../a.c", 1), "the path is not relative to the repository"),
        (cited("/etc/passwd", 1), "the path is not relative to the repository"),
        (cited("a.c\n", 1), "the path is not relative to the repository"),
        (cited("a.c", 1, sha256="0" * 64), "a.c:1: the lines have the SHA-256 "
         + hashlib.sha256(b"one\n").hexdigest()),
    ],
)  # fmt: skip
def test_a_wrong_citation_is_found(
    check: Check, engine: tuple[str, str], source: dict[str, Any], found: str
) -> None:
    repo, revision = engine
    code, issues = check(record(sources=[source], revision=revision), "--repo", repo)
    assert (code, issues) == (4, [f"problem: claims[0].sources[0]: {found}"])


def test_what_cannot_be_looked_up_is_no_pass(
    check: Check, engine: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo, revision = engine
    sources = [cited("a.c", 1)]
    fine = record(sources=sources, revision=revision)
    not_looked_up = "unchecked: sources: 1 citations not looked up: "
    assert check(fine) == (3, [f"{not_looked_up}no checkout was given"])
    other = record(sources=sources, revision="b" * 40)
    code, (issue,) = check(other, "--repo", repo)
    assert (code, issue.startswith(f"{not_looked_up}engine: revision bbb")) == (3, True)
    code, (issue,) = check(fine, "--repo", str(tmp_path))
    assert (code, issue.startswith(f"{not_looked_up}git cannot read")) == (3, True)
    monkeypatch.setattr(citations, "LARGEST_BLOB", 3)
    code, (issue,) = check(fine, "--repo", repo)
    assert (code, "more than is read" in issue) == (3, True)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check(fine, "--repo", repo) == (3, [f"{not_looked_up}git is not installed"])


def test_a_tree_is_no_revision(check: Check, engine: tuple[str, str]) -> None:
    repo, revision = engine
    tree = citations._ask(Path(repo), "rev-parse", f"{revision}^{{tree}}")
    code, (issue,) = check(record(sources=[cited("a.c", 1)], revision=tree), "--repo", repo)
    assert (code, "is a tree, not a commit" in issue) == (3, True)


def test_an_unknown_revision_needs_a_reason_and_is_unchecked(check: Check) -> None:
    bare = record(revision=None)
    code, issues = check(bare)
    assert (code, issues[0]) == (4, "problem: subject.revision: is null without a reason")
    bare["subject"]["missing"] = {"revision": "lost"}
    code, issues = check(bare)
    assert (code, issues[0]) == (3, "unchecked: subject.revision: is missing: lost")


@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ("127 tokens in 252 ms", True),
        ("0.252 s", True),
        ("225 expert slots", True),
        ("252 tokens", False),
        ("0.253 s", False),
        ("253 ms", False),
        ("127 tokens and 3 runs", False),
    ],
)
def test_numbers_in_a_log(
    check: Check, attach: Callable[..., dict[str, str]], statement: str, found: bool
) -> None:
    for name, data in (("a.log", LOG), ("a.log.gz", gzip.compress(LOG))):
        code, issues = check(record(statement, evidence=[attach(name, data)]))
        assert (code == 0) is found, issues
        assert code in (0, 4)


@pytest.mark.parametrize(
    ("name", "data"), [("a.json", RUN), ("a.jsonl", b'{"x": 1}\n' + json.dumps(RUN).encode())]
)
def test_numbers_in_json(
    check: Check, attach: Callable[..., dict[str, str]], name: str, data: Any
) -> None:
    entry = attach(name, data)
    prefix = "/1" if name.endswith("l") else ""
    for pointer, value, unit in (("/read_ms", 0.252, "s"), ("/phases/refill/ns", 71.7, "ms"),
                                 ("/sizes/1", 457, "tokens"), ("/a~1b", 9, "ms")):  # fmt: skip
        numbers = [number(value, unit, evidence="e", pointer=prefix + pointer)]
        assert check(record(f"{value} {unit}", evidence=[entry], numbers=numbers)) == (0, [])
        assert check(record(f"{value} {unit}", evidence=[entry])) == (0, [])
    for pointer in ("/none", "/sizes/2", "/sizes/-1", "/phases", "/sizes/x", "/read_ms/0"):
        numbers = [number(9, evidence="e", pointer=prefix + pointer)]
        code, (issue, *_) = check(record("nine", evidence=[entry], numbers=numbers))
        assert code == 4
        assert f"has no {prefix}{pointer}" in issue or "has no number at" in issue
    numbers = [number(253, "ms", evidence="e", pointer=f"{prefix}/read_ms")]
    code, (issue,) = check(record("253 ms", evidence=[entry], numbers=numbers))
    assert f"has 252 ms at {prefix}/read_ms, not 253 ms" in issue


def test_a_line_that_is_named_is_the_one_that_is_read(
    check: Check, attach: Callable[..., dict[str, str]]
) -> None:
    entry = attach("a.log", LOG)

    def at(line: int) -> list[str]:
        numbers = [number(225, "slots", evidence="e", line=line)]
        return check(record("225 slots", evidence=[entry], numbers=numbers))[1]

    assert at(2) == []
    assert at(1) == ["problem: claims[0].numbers[0]: 225 slots is not in line 1 of a.log"]
    assert at(9) == ["problem: claims[0].numbers[0]: a.log has no line 9"]


def test_numbers_that_are_quoted_or_calculated(
    check: Check, attach: Callable[..., dict[str, str]]
) -> None:
    entry = attach("a.log", LOG)
    quoted = number(12, "s", quoted="a letter")
    derived = number(1.98, "ms", "derived", formula="252 / 127")
    assert check(record("12 s, 1.98 ms", evidence=[entry], numbers=[quoted, derived])) == (0, [])
    for formula, found in (
        ("252 / 128", "252 / 128 is 1.96875, not 1.98 ms"),
        ("1.98 * 1", "1.98 in the formula: not in the evidence, nor quoted"),
        ("252 / x", "the formula has more in it than numbers, + - * / and brackets: 252 / x"),
    ):
        wrong = number(1.98, "ms", "derived", formula=formula)
        expected = [f"problem: claims[0].numbers[0]: {found}"]
        assert check(record("1.98 ms", evidence=[entry], numbers=[wrong]))[1] == expected


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        (number(1), "names no origin"),
        (number(1, quoted="q", formula="1"), "names formula and quoted"),
        (number(None), "a null value needs how = missing and a reason"),
        (number(1, how="missing"), "is called missing and has a value"),
        (number(1, quoted="q", line=1), "has a pointer or a line and no evidence"),
    ],
)
def test_a_number_says_where_it_is_from(check: Check, entry: dict[str, Any], found: str) -> None:
    code, issues = check(record(numbers=[entry]))
    assert code == 4
    assert f"problem: claims[0].numbers[0]: {found}" in issues


def test_evidence_is_the_file_that_is_meant(
    check: Check, attach: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    entry = attach("a.log", LOG)
    (tmp_path / "a.log").write_bytes(LOG.replace(b"252", b"253"))
    code, issues = check(record("253 ms", evidence=[entry]))
    assert code == 4
    assert issues[0].startswith("problem: evidence[0]: a.log has the SHA-256 ")
    assert issues[1] == "unchecked: claims[0].statement: 253 ms: not all of its evidence was read"
    (tmp_path / "a.log").unlink()
    assert check(record(evidence=[entry]))[0] == 3
    code, issues = check(record(evidence=[entry]), "--evidence", str(tmp_path))
    assert (code, issues) == (4, ["problem: evidence[0]: a.log is not there"])
    (tmp_path / "a.log").mkdir()
    assert check(record(evidence=[entry]))[1] == ["problem: evidence[0]: a.log is not a file"]


def test_evidence_that_is_no_plain_file_does_not_block(check: Check, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    entry = {"id": "e", "path": "pipe", "sha256": "0" * 64}
    assert check(record(evidence=[entry]))[1] == ["problem: evidence[0]: pipe is not a file"]
    outside = record(evidence=[entry | {"path": "../r.json"}])
    assert "leads out of the folder" in check(outside)[1][0]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.log.gz", b"no gzip"),
        ("a.gz", gzip.compress(LOG)[:-9]),
        ("b.gz", b"\x1f\x8b\x08\0junk" * 9),
    ],
)
def test_damaged_evidence_is_said(
    check: Check, attach: Callable[..., dict[str, str]], name: str, data: bytes
) -> None:
    code, issues = check(record("127 tokens", evidence=[attach(name, data)]))
    assert code == 4
    assert issues[0].startswith(f"problem: evidence[0]: {name}: cannot be read: ")


def test_large_evidence_is_searched_in_part_and_that_is_said(
    check: Check, attach: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "SEARCHED", 100_000)
    data = b"5 ms\n" + b"x" * 80_000 + b" 6 ms\n" + b"1 2\n" * 10_000 + b"7 ms\n"
    entry = attach("a.log", data)
    code, issues = check(record("5 ms", evidence=[entry]))
    assert code == 0
    assert issues[0].startswith("note: evidence[0]: a.log: numbers were looked for in the first")
    assert check(record("7 ms", evidence=[entry]))[0] == 3
    assert check(record("6 ms", evidence=[entry]))[0] == 3


def test_what_the_schema_cannot_say(check: Check) -> None:
    document = record("TODO: say it", evidence=[], refuted_by=None)
    document["claims"] += [dict(document["claims"][0], evidence=["x"], status="source-supported",
                                missing={}, refuted_by="y")]  # fmt: skip
    code, issues = check(document)
    assert code == 4
    assert set(issues) >= {
        "problem: claims[0].statement: is still to be written",
        "problem: claims: the id c is there twice",
        "problem: claims[1].evidence: there is no evidence x",
        "problem: claims[0].refuted_by: is null without a reason",
        "problem: claims[1]: is source-supported, and names no sources",
    }


def test_an_older_record_s_numbers_are_unchecked(check: Check, engine: tuple[str, str]) -> None:
    repo, revision = engine
    older = {
        "schema": "anvil-investigation.prefill-phase-interpretation/v1",
        "source_revision": revision,
        "status": "source-supported",
        "findings": [{"claim": "It took 7 ms.", "source_lines": ["a.c:1-2"]}],
        "limitations": ["One run."],
        "observations": [],
    }
    code, issues = check(older, "--repo", repo)
    assert code == 3
    assert issues[-1] == ("unchecked: claims[0].statement: 7 ms: the older form names no evidence")
    older["findings"][0]["source_lines"] = ["a.c:77"]
    assert check(older, "--repo", repo)[0] == 4


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.binary(max_size=60), st.text(alphabet="0123456789.,-/ msx%k", max_size=20), st.text(),
       st.sampled_from(["a.log", "a.json", "a.gz"]))  # fmt: skip
def test_no_evidence_and_no_statement_is_an_internal_error(
    check: Check, attach: Callable[..., dict[str, str]], data: bytes, statement: str, pointer: str,
    name: str,
) -> None:  # fmt: skip
    entry = attach(name, data)
    numbers = [number(1, evidence="e", pointer=f"/{pointer}"), number(2, evidence="e", line=1)]
    document = record(statement + "x", evidence=[entry], numbers=numbers)
    assert check(document)[0] in (0, 3, 4)


@pytest.mark.parametrize("junk", [b"", b"[]", b"{", b'{"schema": 1}', b"\xff", b"[" * 99_999])
def test_junk_is_exit_code_4(check: Check, junk: bytes) -> None:
    code, issues = check(junk)
    assert code == 4
    assert len(issues) == 1
