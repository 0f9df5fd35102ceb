"""Reading a record: the schema, versions, junk, and the older form."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slotwise.findings.older import OLDER_SCHEMA
from slotwise.findings.record import Record, read_record
from slotwise.findings.render import markdown
from slotwise.findings.schema import findings_schema
from slotwise.findings.validate import violations

DOCS = Path(__file__).parents[2] / "docs"
SCHEMA = DOCS / "schemas" / "findings-v1.json"
EXAMPLE = json.loads((DOCS / "examples" / "prefill-phase-interpretation.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(findings_schema())


def read(document: Any) -> tuple[Record | None, list[str]]:
    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    record, issues = read_record(Path("r.json"), data)
    return record, [f"{i.where}: {i.found}" for i in issues]


def changed(**values: Any) -> dict[str, Any]:
    return copy.deepcopy(EXAMPLE) | values


def test_schema_file_is_the_one_the_code_makes() -> None:
    jsonschema.Draft202012Validator.check_schema(findings_schema())
    assert json.loads(SCHEMA.read_text()) == findings_schema(), (
        "run: python -m slotwise.findings.schema > docs/schemas/findings-v1.json"
    )


def test_the_example_is_a_record() -> None:
    VALIDATOR.validate(EXAMPLE)
    record, issues = read(EXAMPLE)
    assert issues == []
    assert record
    assert len(record.claims) == 5
    assert record.subject.revision is None


def places(document: Any) -> list[Any]:
    """Every container in the document, so that one can be changed."""
    inside = document.values() if isinstance(document, dict) else document
    return [document] + [p for v in inside if isinstance(v, dict | list) for p in places(v)]


FLOATS = st.floats(allow_nan=False, allow_infinity=False)
JUNK = st.none() | st.booleans() | st.integers() | FLOATS | st.text(max_size=5)
VALUES = JUNK | st.lists(JUNK, max_size=2) | st.dictionaries(st.text(max_size=3), JUNK, max_size=2)


@settings(deadline=None)
@given(st.data())
def test_our_verdict_is_that_of_the_published_schema(data: st.DataObject) -> None:
    document = copy.deepcopy(EXAMPLE)
    place = data.draw(st.sampled_from(places(document)))
    if isinstance(place, dict):
        key = data.draw(st.sampled_from([*place, "claim", "x"]))
        if data.draw(st.booleans()):
            place.pop(key, None)
        else:
            place[key] = data.draw(VALUES)
    elif data.draw(st.booleans()):
        place.clear()
    else:
        place.append(data.draw(VALUES))
    ours = list(violations(document, findings_schema()))
    assert (ours == []) == VALIDATOR.is_valid(document), ours
    read(document)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"limitation": []}, "limitation: unknown key; did you mean 'limitations'?"),
        ({"limitations": []}, "limitations: is empty; at least one entry is needed"),
        ({"status": "mesured"}, "status: is 'mesured'; expected one of draft, source-supported, "
                                "measured, refuted, superseded; did you mean 'measured'?"),
        ({"claims": 1}, "claims: is 1; expected a list"),
        ({"title": ""}, "title: is empty"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(values: dict[str, Any], expected: str) -> None:
    assert read(changed(**values)) == (None, [expected])


def test_everything_wrong_is_said_at_once() -> None:
    document = changed(status="no", tool={})
    document["subject"]["revision"] = "HEAD"
    del document["limitations"]
    _, issues = read(document)
    assert [i.partition(":")[0] for i in issues] == [
        "limitations", "subject.revision", "status", "tool.name", "tool.version",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ("slotwise.findings/v2", "schema: is major version 2; this slotwise reads 1"),
        ("slotwise.finding/v1", "did you mean 'slotwise.findings/v1'?"),
        (f"{OLDER_SCHEMA}0", "expected slotwise.findings/v1 or"),
        (None, "schema: is ''"),
    ],
)
def test_other_versions_are_refused(schema: Any, expected: str) -> None:
    record, (issue,) = read(changed(schema=schema))
    assert record is None
    assert expected in issue


def test_a_newer_minor_version_is_read_but_for_what_is_new() -> None:
    record, (note,) = read(changed(schema="slotwise.findings/v1.3", reviewers=["x"]))
    assert record
    assert "minor version 3" in note


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "is not JSON"),
        (b"[1]", "is a list; expected an object"),
        (b'{"a": 1, "a": 2}', "has a key twice: 'a'"),
        (b'{"a": NaN}', "holds NaN"),
        (b'{"a": 1e999}', "holds 1e999"),
        (b'{"a": -Infinity}', "holds -Infinity"),
        (b"\xff\xfe", "is not UTF-8"),
        (b"[" * 100_000, "is nested too deeply"),
        (b"1" * 400, "which is no JSON number"),
        (b"1" * 5000, "which is no JSON number"),
        (b" " * (16 * 1024**2 + 1), "has more than"),
    ],
)
def test_what_is_no_record(data: bytes, expected: str) -> None:
    record, (issue,) = read(data)
    assert record is None
    assert expected in issue


@settings(deadline=None)
@given(st.binary() | st.recursive(JUNK, lambda inner: st.lists(inner) | st.dictionaries(
    st.sampled_from(["schema", "claims", "subject", "x"]), inner)))  # fmt: skip
def test_junk_is_survived(junk: Any) -> None:
    record, issues = read(junk)
    assert record is None
    assert issues


OLDER = {
    "schema": OLDER_SCHEMA,
    "source_revision": "a" * 40,
    "status": "source-supported interpretation; no additional live requests",
    "findings": [
        {"claim": "Dequant is a bucket.", "source_lines": ["src/a.cu:10-20", "src/b.cu#L7"]},
        {"id": "mtp", "claim": "7 ms.", "sources": [{"path": "c.cpp", "lines": [3, 9]}]},
        {"claim": "Three ranges.", "sources": "d.cpp:1,5-6"},
        {"statement": "No line.", "sources": ["e.cpp"]},
        "Only a text.",
    ],
    "limitations": ["No claim about the SSD."],
    "observations": {"walls": [12532, 10285]},
}


def test_the_older_form_is_read() -> None:
    record, issues = read(OLDER)
    assert issues == []
    assert record
    assert record.older
    assert record.subject.revision == "a" * 40
    assert [[str(s) for s in c.sources] for c in record.claims] == [
        ["src/a.cu:10-20", "src/b.cu:7"], ["c.cpp:3-9"], ["d.cpp:1", "d.cpp:5-6"], [], [],
    ]  # fmt: skip
    assert record.claims[3].missing["sources"] == "cited without path and line: e.cpp"
    assert record.claims[1].id == "mtp"
    page = markdown(record)
    assert "the older form, converted" in page
    assert "`src/a.cu:10-20@aaaaaaaaaaaa`" in page
    assert "walls: [12532, 10285]" in page


@pytest.mark.parametrize(
    "other",
    [
        {"source": {"repository": "r", "revision": "B" * 40}},
        {"source_revision": {"repo": "r", "commit": "b" * 40}},
        {"source_revision": "r@" + "b" * 40},
        {"repository": "r", "commit": "b" * 40},
    ],
)
def test_spellings_of_the_older_form_s_revision(other: dict[str, Any]) -> None:
    document = {k: v for k, v in OLDER.items() if k != "source_revision"} | other
    record, _ = read(document)
    assert record
    assert (record.subject.repository, record.subject.revision) == ("r", "b" * 40)


def test_an_older_record_without_limitations_is_not_accepted() -> None:
    assert read(OLDER | {"limitations": []})[1] == [
        "limitations: is empty; at least one entry is needed"
    ]


KEYS = ["findings", "claims", "claim", "sources", "source", "path", "lines", "line", "start",
        "end", "limitations", "observations", "source_revision", "id", "status"]  # fmt: skip


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), st.recursive(
    JUNK | st.from_regex(r"[a-c./]{1,3}[:#]L?\d{1,3}([-,]\d)?", fullmatch=True),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3), max_leaves=8)))  # fmt: skip
def test_any_older_document_is_survived(values: dict[str, Any]) -> None:
    record, issues = read(values | {"schema": OLDER_SCHEMA})
    if record:
        assert markdown(record)
    else:
        where = {i.partition(":")[0].partition("[")[0] for i in issues}
        assert where <= {"claims", "limitations", "r.json"}


def test_markdown_holds_no_html_and_no_broken_table() -> None:
    document = changed(title="<script>alert(1)</script>\n# x\x1b[31m")
    document["claims"][0]["statement"] = "a `<b>` and <img src=x>"
    document["claims"][1]["numbers"][0]["quoted"] = "a | b"
    record, _ = read(document)
    assert record
    page = markdown(record)
    assert page.startswith("# &lt;script>alert(1)&lt;/script> # x [31m\n")
    assert "a `<b>` and &lt;img src=x>" in page
    assert "| quoted from a \\| b |" in page
