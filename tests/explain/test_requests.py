"""Requests that do not stay in memory are the same requests, and a full disk is said."""

from __future__ import annotations

import errno
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from explain import made

from slotwise.errors import SlotwiseError
from slotwise.explain import json_out, requests, summary
from slotwise.explain.record import Request
from slotwise.explain.requests import Requests
from slotwise.explain.summary import drawn, explain


def make(index: int, prompt: int) -> Request:
    return made.request(index, prompt=prompt, phases=[made.measured("read (batched)", prompt / 2)])


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "IN_MEMORY", 10)
    monkeypatch.setattr(requests, "PIECE", 7)


def filled(count: int) -> Requests:
    out = Requests(make)
    for prompt in range(count):
        out.append(prompt + 100)
    return out


@pytest.mark.parametrize("count", [0, 1, 10, 11, 17, 24, 100])
def test_as_a_sequence(count: int) -> None:
    found, wanted = filled(count), [make(i, i + 100) for i in range(count)]
    assert len(found) == count
    assert list(found) == wanted
    assert found == wanted
    assert found[3:40:5] == tuple(wanted[3:40:5])
    assert [found[-i - 1] for i in range(count)] == wanted[::-1]
    with pytest.raises(IndexError):
        found[count]


def test_only_the_first_stay_in_memory() -> None:
    found = filled(1000)
    assert found[9] is found[9]
    assert found[700] is not found[700]
    assert len(found._first) + len(found._last) < 20


def test_a_copy_grows_by_itself() -> None:
    first = filled(30)
    copy = first.copy()
    for prompt in range(50):
        copy.append(prompt + 1000)
        first.append(prompt + 5000)
    assert [r.prompt.value for r in first[28:32]] == [128, 129, 5000, 5001]
    assert [r.prompt.value for r in copy[28:32]] == [128, 129, 1000, 1001]
    assert [r.prompt.value for r in copy[-3:]] == [1047, 1048, 1049]


def test_a_full_disk_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full: a device that is always full")

    def full(**_: Any) -> Any:
        return Path("/dev/full").open("r+b", buffering=0)

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(SlotwiseError, match=r"17 requests were read.*No space left") as caught:
        filled(40)
    assert caught.value.exit_code == 1
    assert "TMPDIR" in caught.value.next_step
    assert caught.value.__cause__.errno == errno.ENOSPC  # type: ignore[union-attr]


def test_many_requests_are_drawn_from_and_all_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "MOST_REQUESTS", 20)
    monkeypatch.setattr(json_out, "MOST_INDENTED", 20)
    many = filled(200)
    chosen = drawn(many)
    assert len(chosen) == 20
    assert chosen[0].first_of_life
    assert [r.index for r in chosen] == sorted({r.index for r in chosen})
    result = explain(made.reading(made.life(many)))
    assert any("20 of 200 requests" in text for text in result.summaries[0].warnings)
    document = json.loads("".join(json_out.explained_pieces(result)))
    assert [r["prompt"]["value"] for r in document["lives"][0]["requests"]] == list(range(100, 300))


@pytest.mark.parametrize("counts", [(), (0,), (1,), (3, 0, 2)])
def test_pieces_are_the_document_as_json_would_indent_it(counts: tuple[int, ...]) -> None:
    result = explain(made.reading(*(made.life(list(filled(count))) for count in counts)))
    text = "".join(json_out.explained_pieces(result))
    assert text == json.dumps(json.loads(text), indent=1, ensure_ascii=False) + "\n"
    assert [len(life["requests"]) for life in json.loads(text)["lives"]] == list(counts)
