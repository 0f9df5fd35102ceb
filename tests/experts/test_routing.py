"""Routing traces round-trip, and nothing but a routing trace is taken for one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from experts.fakes import Bench, ids, make_layout
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slotwise.errors import Refused
from slotwise.experts import RoutingRecorder, load_routing, save_routing

LAYOUT = make_layout(layers=2, experts=6, used=2, class_of=(0, 1))
HEAD: dict[str, Any] = {
    "schema": "slotwise.routing/v1",
    "model": {"name": "tiny.gguf", "digest": "abc"},
    "experts": 6,
    "used": 2,
    "class_of": [0, 1],
    "slot_bytes": [4096, 8192],
}
SAME_FOLDER = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def read_and_decode(b: Bench, recorder: RoutingRecorder) -> None:
    """A chunk of three tokens, then two windows."""
    b.experts.routing = recorder
    b.experts.stage = "read"
    b.experts.touch(0, ids(0, 4, 5), np.array([3, 2, 1]))
    b.experts.touch(1, ids(1, 2), np.array([4, 2]))
    b.have(0, 3)
    b.experts.stage = "decode"
    for pair in ((0, 1), (5, 0)):
        b.experts.touch(0, ids(*pair))
        b.experts.touch(1, ids(2, 3))


def test_what_an_experts_does_survives_the_file(tmp_path: Path) -> None:
    recorder = RoutingRecorder(LAYOUT)
    with Bench(LAYOUT, slots=(6, 6)) as b:
        read_and_decode(b, recorder)
    path = tmp_path / "r.jsonl"
    save_routing(path, recorder.routing(model_name="tiny.gguf", model_digest="abc"))
    found = load_routing(path)
    assert (found.model_name, found.model_digest) == ("tiny.gguf", "abc")
    assert found.layout.class_of == LAYOUT.class_of
    assert [c.slot_bytes for c in found.layout.classes] == [4096, 8192]
    assert [(s.stage, s.tokens) for s in found.steps] == [("read", 3), ("decode", 1), ("decode", 1)]
    assert (found.tokens("read"), found.tokens("decode")) == (3, 2)
    chunk, first, last = found.steps
    assert chunk.calls[0].counts is not None
    assert chunk.calls[0].counts.tolist() == [3, 2, 1]
    assert [call.experts.tolist() for call in last.calls] == [[5, 0], [2, 3]]
    assert last.calls[0].counts is None
    assert chunk.resident is not None
    assert not chunk.resident.any()
    assert first.resident is not None
    assert np.argwhere(first.resident).tolist() == [[0, 3]]
    assert last.resident is None
    assert [len(steps) for _, steps in found.segments()] == [1, 2]


def test_the_file_is_json_lines_with_the_shape_first(tmp_path: Path) -> None:
    recorder = RoutingRecorder(LAYOUT)
    recorder.begin("decode", np.full((2, 6), -1, np.int32))
    recorder.add(0, ids(1, 2), None)
    path = tmp_path / "r.jsonl"
    save_routing(path, recorder.routing(model_name="tiny.gguf", model_digest="abc"))
    head, resident, step = (json.loads(line) for line in path.read_text().splitlines())
    assert head == HEAD
    assert resident == {"resident": [[], []]}
    assert step == {"stage": "decode", "tokens": 1, "experts": [[1, 2]]}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("{", "is not JSON"),
        ("[]", "has stage 'None'"),
        ({"stage": "think", "tokens": 1, "experts": []}, "has stage 'think'"),
        ({"stage": "decode", "tokens": 0, "experts": []}, "with '0' tokens"),
        ({"stage": "decode", "tokens": 1, "experts": 3}, "has no list of experts"),
        ({"stage": "decode", "tokens": 1, "experts": [[6]]}, "has experts from 6 to 6"),
        ({"stage": "decode", "tokens": 1, "experts": [[True]]}, r"has experts '\[True\]'"),
        ({"stage": "decode", "tokens": 1, "experts": [[0]] * 3}, "has 3 layers of experts"),
        ({"stage": "read", "tokens": 1, "experts": [[1]], "counts": [[]]}, "do not match"),
        ({"stage": "read", "tokens": 1, "experts": [[1, 1]], "counts": [[1, 1]]}, "twice"),
        ({"stage": "read", "tokens": 1, "experts": [[1]], "counts": [[3]]}, "from 3 to 3"),
        ({"resident": [[0]]}, "has 1 rows resident"),
        ({"resident": [[0], [-1]]}, "has resident from -1 to -1"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, found: str) -> None:
    path = tmp_path / "r.jsonl"
    text = line if isinstance(line, str) else json.dumps(line)
    path.write_text(json.dumps(HEAD) + "\n" + text + "\n")
    with pytest.raises(Refused, match=found) as caught:
        load_routing(path)
    (finding,) = caught.value.findings
    assert finding.where == f"{path}:2"
    assert finding.expected


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"schema": "slotwise.profile/v1"}, "has the schema 'slotwise.profile/v1'"),
        ({"class_of": []}, "says 0 layers"),
        ({"class_of": [0, 2]}, "classes that do not fit"),
        ({"slot_bytes": [4096, 0]}, "classes that do not fit"),
        ({"used": 7}, "says 2 layers, '7' of '6' experts"),
        ({"experts": 10**9}, "of '1000000000' experts"),
        ({"experts": None}, "'2' of 'None' experts"),
    ],
)
def test_a_bad_head_is_refused(tmp_path: Path, change: dict[str, Any], found: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(HEAD | change) + "\n")
    with pytest.raises(Refused, match=found):
        load_routing(path)


def test_a_file_that_is_not_there_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="cannot be read"):
        load_routing(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(Refused, match="schema"):
        load_routing(tmp_path / "empty.jsonl")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from(["stage", "tokens", "experts", "counts", "resident", "used"]), inner
    ),
    max_leaves=12,
)  # fmt: skip


@SAME_FOLDER
@given(head=st.just(HEAD) | JSON, lines=st.lists(JSON, max_size=3))
def test_junk_is_refused_and_nothing_else_happens(tmp_path: Path, head: Any, lines: Any) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [head, *lines]))
    try:
        load_routing(path)
    except Refused:
        return
    assert head == HEAD
