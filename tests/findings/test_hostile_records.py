"""Records that nobody would write on purpose: a check says what is wrong, and never breaks."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import warnings
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slotwise.cli import main
from slotwise.findings import citations
from slotwise.findings.check import check_record
from slotwise.findings.record import read_record
from slotwise.findings.render import markdown
from slotwise.findings.report import Report, report_lines

DOCS = Path(__file__).parents[2] / "docs"
SCHEMA = json.loads((DOCS / "schemas" / "findings-v1.json").read_text())
EXAMPLE = json.loads((DOCS / "examples" / "prefill-phase-interpretation.json").read_text())


def checked(document: dict[str, Any], folder: Path, *, folder_given: bool = True) -> Report:
    record, issues = read_record(folder / "r.json", json.dumps(document).encode())
    assert record, issues
    assert markdown(record)
    report = check_record(record, repo=None, folder=folder, folder_given=folder_given)
    assert all(line.isprintable() for line in report_lines(report, "r.json"))
    json.dumps(report.to_dict(), allow_nan=False)
    return report


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("path", ["a" * 300, "/".join(["a" * 200] * 30)[1:]])
def test_an_evidence_name_no_file_can_have(tmp_path: Path, path: str, given: bool) -> None:
    document = copy.deepcopy(EXAMPLE)
    document["evidence"] = [{"id": "e", "path": path, "sha256": "0" * 64}]
    report = checked(document, tmp_path, folder_given=given)
    (issue,) = [i for i in report.issues if i.where == "evidence[0]"]
    assert issue.level == ("problem" if given else "unchecked")


@pytest.mark.parametrize("formula", ["1if 2else 3", "1(2)", "\0", "0x1", "1j", "'\\d'", "(" * 150])
def test_a_formula_that_is_none(tmp_path: Path, formula: str) -> None:
    document = copy.deepcopy(EXAMPLE)
    number = {"value": 7410, "unit": "tokens", "how": "derived", "formula": formula}
    document["claims"][1]["numbers"][0] = number
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        report = checked(document, tmp_path)
    assert not warned  # Python has an opinion on how `1if` is spelled
    found = [i.found for i in report.issues if i.where == "claims[1].numbers[0]"]
    assert len(found) == 1
    assert found[0].startswith("the formula ")


TEXTS = st.text(min_size=1, max_size=20) | st.from_regex(
    r"[-+−]?[0-9]{1,5}([.,_x/–e-][0-9]{0,4}){0,3} ?(ms|s|k|%|tokens|)", fullmatch=True
)
VALUES = (
    st.integers(-(10**307), 10**307)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([10**300, 5e-324, -0.0, 1e22])
)
NUMBERS = st.fixed_dictionaries(
    {
        "value": VALUES,
        "unit": st.sampled_from(["ms", "", "GiB", "%", "x"]),
        "how": st.just("derived"),
    },
    optional={
        "formula": st.text(alphabet="0123456789+-*/() ._,eEj", min_size=1, max_size=15),
        "evidence": st.just("e"),
        "pointer": st.sampled_from(["", "/a", "/a/0", "/b/~0", "/" + "9" * 30, "/²"]),
        "line": st.integers(1, 10**30),
    },
)
JSON = st.recursive(
    st.none() | st.booleans() | VALUES | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", "wall_ms", "~", ""]), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TEXTS, st.lists(NUMBERS, max_size=3), JSON)
def test_any_valid_record_is_checked(
    tmp_path: Path, statement: str, numbers: list[dict[str, Any]], evidence: Any
) -> None:
    data = json.dumps(evidence).encode()
    (tmp_path / "e").write_bytes(data)
    document = copy.deepcopy(EXAMPLE)
    document["evidence"] = [{"id": "e", "path": "e", "sha256": hashlib.sha256(data).hexdigest()}]
    document["claims"][0] |= {"statement": statement, "numbers": numbers, "evidence": ["e"]}
    assert checked(document, tmp_path).exit_code in (3, 4)


@pytest.mark.parametrize("arguments", [[], ["--evidence", "a.log"]])
def test_the_skeleton_is_valid_by_the_published_schema(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.log").write_text("read 127 tokens")
    assert main(["findings", "new", *arguments]) == 0
    data = capfd.readouterr().out
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(data))
    assert read_record(Path("r.json"), data.encode())[0]


def test_a_number_that_cannot_be_read_is_not_asked_for_in_vain(tmp_path: Path) -> None:
    document = copy.deepcopy(EXAMPLE)
    document["claims"][0]["statement"] = "It took 12'532 ms."
    issues = [i for i in checked(document, tmp_path).issues if i.level == "problem"]
    assert [(i.found, i.next_step) for i in issues] == [
        ("12'532 cannot be read as a number", "Write it like 12,532 or 0.319.")
    ]


def test_a_git_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git = tmp_path / "git"
    git.write_text("#!/bin/sh\nexec sleep 60\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(citations, "SECONDS", 0.1)
    with pytest.raises(citations.CannotCheck, match=r"did not answer in 0.1 s"):
        citations.Checkout(tmp_path, "a" * 40)
