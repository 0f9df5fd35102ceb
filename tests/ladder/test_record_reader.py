"""`explain` reads a run record whatever it holds: damaged ones give fewer requests, not errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ladder.driving import run
from ladder.small_server import SmallServer
from ladder.test_pairing import own_block

from slotwise.explain.readers import read_files
from slotwise.explain.readers.ladder_record import lives_of
from slotwise.explain.summary import explain
from slotwise.ladder.pairing import pair
from slotwise.ladder.record import Record

JUNK: tuple[Any, ...] = (None, [], {}, "x" * 300, -1, 1e300, True, [None, {"how": "measured"}])


@pytest.fixture
def record(server: SmallServer, tmp_path: Path) -> dict[str, Any]:
    data = run(tmp_path / "run.json", url=server.url, sizes=(50, 90), samples=2)
    for sample in data["samples"][1:]:
        sample["slotwise"] = own_block(sample["tokens"]["prompt"])
    pair(Record(tmp_path / "run.json", data), {}, ())
    return data


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    inner = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in inner:
        if isinstance(value, dict | list) and len(path) < 5:
            yield from places(value, (*path, key))
        else:
            yield (*path, key)


def test_junk_anywhere_is_no_error(record: dict[str, Any]) -> None:
    record["samples"] = record["samples"][1:3]
    text = json.dumps({k: record[k] for k in ("schema", "status", "arms", "samples")})
    tried = 0
    for number, path in enumerate(p for p in places(json.loads(text)) if p):
        data = json.loads(text)
        place = data
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = JUNK[number % len(JUNK)]
        for life in lives_of(data, file="r.json"):
            json.dumps(life.to_dict(), allow_nan=False)
        tried += 1
    assert tried > 200


def test_cold_samples_are_a_life_of_their_own_and_in_no_median(
    record: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(record, indent=1))
    result = explain(read_files([path]))
    names = [life.file for life in result.reading.lives]
    assert names == ["r.json:server", "r.json:server-first"]
    warm, cold = result.summaries
    assert [len(group.used) for group in warm.groups] == [2, 2]
    assert not any(group.cold for group in warm.groups)
    assert result.reading.unknown == {}
    assert len(cold.groups) == 2


def test_half_a_record_is_said_to_be_one(record: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(record, indent=1)[:-2_000])
    reading = read_files([path])
    (life,) = reading.lives
    assert life.requests == ()
    assert "damaged or cut" in life.notes[0]


def test_a_refused_sample_is_no_finished_request(record: dict[str, Any]) -> None:
    record["samples"][-1] |= {"status": "refused", "why": "not switched on"}
    (warm, _) = lives_of(record, file="r")
    last = warm.requests[-1]
    assert last.status == "failed"
    assert "refused: not switched on" in last.warnings
