"""What may stand for an arm: a log, a folder, an arm of a ladder record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from explain import made

from slotwise.cli import main
from slotwise.errors import SlotwiseError, UsageError
from slotwise.explain.arms import one_arm, together, two_arms

LOG = Path(__file__).parents[1] / "data/explain/strata-notmike101-P023/engine-session.thinned.txt"


def sample(index: int, arm: str, *, cold: bool, rest: float, status: str = "ok") -> dict[str, Any]:
    """One paired sample, as the ladder writes it; its client waits 5 ms longer than the engine."""
    noise = 0.1 * (index % 5)
    request = made.slot_request(
        index, read=800, read_ms=660.0 + noise, refill_ms=112.0, slots=350, rest=rest + noise
    )
    first = (request.prompt_ms.value or 0.0) + 5.0
    return {
        "index": index, "arm": arm, "start": 0, "target_tokens": 800, "round": int(not cold),
        "cold": cold, "first_of_process": cold, "status": status, "why": "",
        "edges_ms": {"first_byte": 1.0, "first_token": first},
        "tokens": {"prompt": 801, "cached": 0, "generated": 8},
        "timings": None, "trace": request.to_dict(),
    }  # fmt: skip


def record(folder: Path, *arms: str) -> Path:
    """Samples in turn over the arms, one cold and six warm each; later arms leave over more."""
    samples = [
        sample(len(arms) * turn + place, name, cold=turn == 0, rest=56.0 + 100.0 * place)
        for turn in range(7)
        for place, name in enumerate(arms)
    ]
    server = {"version": "1.0", "software": None, "models": [{"meta": {"n_params": 7e9}}]}
    data = {
        "schema": "slotwise.ladder/v1", "run": "a1", "status": "done", "samples": samples,
        "arms": [{"name": name, "servers": [server]} for name in arms],
    }  # fmt: skip
    path = folder / "run.json"
    path.write_text(json.dumps(data, indent=1), encoding="utf-8")
    return path


def test_a_record_with_two_arms_is_a_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = record(tmp_path, "off", "on")
    assert main(["explain", "compare", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["names"] == ["off", "on"]
    (size,) = document["sizes"]
    assert (size["n_a"], size["n_b"]) == (6, 6)  # without the cold ones
    assert size["outer"]["name"] == "first token"
    assert size["outer"]["by"]["estimate"]["value"] == pytest.approx(100.0, abs=0.5)
    assert size["unexplained"]["by"]["estimate"]["value"] == pytest.approx(100.0, abs=0.5)
    verdicts = {p["name"]: p["verdict"] for p in size["phases"]}
    assert verdicts["read (batched)"] == "did not move"


def test_arms_of_a_record_are_chosen_by_name(tmp_path: Path) -> None:
    path = record(tmp_path, "off", "on", "both")
    (name, reading), (other, _) = two_arms(f"{path}:off", f"{path}:both")
    assert (name, other) == ("off", "both")
    assert [len(life.requests) for life in reading.lives] == [6, 1]
    assert [life.requests[0].first_of_life for life in reading.lives] == [False, True]


@pytest.mark.parametrize("text", ["run.json", "run.json:of", "run.json:"])
def test_an_arm_that_is_not_in_the_record_is_wrong_usage(tmp_path: Path, text: str) -> None:
    record(tmp_path, "off", "on")
    with pytest.raises(UsageError) as error:
        one_arm(str(tmp_path / text))
    assert "There are: off, on" in error.value.next_step


def test_one_arm_is_no_comparison(tmp_path: Path) -> None:
    for text, found in (
        (str(LOG), "is no ladder record"),
        (str(record(tmp_path, "off", "on", "both")), "holds 3 arms"),
    ):
        with pytest.raises(UsageError, match=found):
            two_arms(text, None)
    with pytest.raises(UsageError, match="is not there"):
        one_arm(str(tmp_path / "none.log"))


def test_levers_take_arms_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = record(tmp_path, "off", "on")
    call = ["explain", "levers", f"{path}:on", "--with", f"{path}:off", "--off", "refill"]
    assert main([*call, "--lever", "off:refill", "--json"]) == 0
    (prediction,) = json.loads(capsys.readouterr().out)["predictions"]
    assert prediction["predicted"]["value"] == pytest.approx(821.4, abs=0.5)
    assert prediction["measured"]["value"] == pytest.approx(833.4, abs=0.5)


def test_folders_and_logs(tmp_path: Path) -> None:
    assert one_arm(str(LOG))[0] == LOG.name
    with pytest.raises(SlotwiseError, match="empty folder"):
        one_arm(str(tmp_path))
    one = one_arm(str(LOG))[1]
    two = together([one, one])
    assert (len(two.lives), two.lines) == (2 * len(one.lives), 2 * one.lines)
    assert sum(two.unknown.values()) == 2 * sum(one.unknown.values())
