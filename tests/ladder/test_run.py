"""A whole ladder against a real server: what is kept, what is refused, what stays out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from ladder.driving import a_b, plan, run, with_mode
from ladder.small_server import OVERHEAD, SECRET, SmallServer, tokens_of

from slotwise.errors import Refused, SlotwiseError
from slotwise.ladder.arms import Arm, Engaged
from slotwise.ladder.record import InvalidRecord, new_record, read_record
from slotwise.ladder.run import run_ladder
from slotwise.ladder.schema import ladder_schema

PUBLISHED = Path(__file__).parents[2] / "docs" / "schemas" / "ladder-v1.json"


def test_the_published_schema_is_the_one_in_use() -> None:
    assert json.loads(PUBLISHED.read_text()) == ladder_schema()


def test_a_record_holds_every_sample_and_satisfies_its_schema(
    server: SmallServer, tmp_path: Path
) -> None:
    record = run(tmp_path / "run.json", url=server.url)
    Draft202012Validator(ladder_schema()).validate(record)
    assert read_record(tmp_path / "run.json") == record
    assert record["status"] == "done"
    samples = record["samples"]
    assert len(samples) == record["plan"]["steps"] == 6
    assert [s["cold"] for s in samples] == [True, True, False, False, False, False]
    assert {s["status"] for s in samples} == {"ok"}
    for sample in samples[1:]:  # the first one learns what the template adds
        assert sample["tokens"]["prompt"] == sample["target_tokens"]
        assert sample["timings"]["prompt_n"] == sample["target_tokens"]
        assert len(sample["token_ms"]) == 3
        edges = [ms for ms in sample["edges_ms"].values() if ms is not None]
        assert edges == sorted(edges)
    (arm,) = record["arms"]
    (known,) = arm["servers"]
    assert (known["software"], known["version"]) == ("SmallServer", "b1")
    assert known["models"][0]["name"] == "tiny.gguf"
    assert record["machine"]["cpus"]


def test_requests_are_what_was_planned(server: SmallServer, tmp_path: Path) -> None:
    run(tmp_path / "run.json", url=server.url, endpoint="completions", model="mine")
    asked = [(headers, b) for path, headers, b in server.seen if path == "/v1/completions"]
    assert len(asked) == 6
    for headers, body in asked:
        assert body["model"] == "mine"
        assert body["stream"] is True
        assert body["stream_options"] == {"include_usage": True}
        assert body["temperature"] == 0
        assert headers["X-Request-Id"]
    assert len({body["prompt"].split()[0] for _, body in asked}) == 6
    last = asked[-1][1]["prompt"]
    assert tokens_of(last) + OVERHEAD in (60, 120)


def test_no_prompt_no_answer_no_key_and_no_path_is_in_the_record(
    server: SmallServer, tmp_path: Path
) -> None:
    out = tmp_path / "run.json"
    run(out, url=server.url, key=SECRET + "-mine")
    text = out.read_text()
    prompts = [b["messages"][0]["content"] for p, _, b in server.seen if p.endswith("completions")]
    for words in ("/models/", "/srv/", "somebody", SECRET, *(p[:24] for p in prompts)):
        assert words not in text
    assert SECRET + "-mine" in str(server.seen[-1][1])


def test_a_record_that_would_hold_the_key_is_not_written(tmp_path: Path) -> None:
    record = new_record(tmp_path / "r.json", plan={}, machine={"x": "sk-key"}, key="sk-key")
    with pytest.raises(SlotwiseError, match="key"):
        record.save()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("mode", "status", "why"),
    [
        ("cached", "refused", "5 prompt tokens came from the server's cache"),
        ("no usage", "refused", "does not say how many tokens"),
        ("error in stream", "error", "an error came in the stream"),
        ("http 500", "error", "HTTP 500"),
        ("broken", "error", "the connection broke off"),
    ],
)
def test_samples_that_cannot_be_used_are_kept_and_the_run_measures_nothing(
    server: SmallServer, tmp_path: Path, mode: str, status: str, why: str
) -> None:
    out = tmp_path / "run.json"
    with pytest.raises(Refused) as caught:
        run(out, url=server.url, arms=with_mode(mode))
    assert caught.value.findings[0].code == "nothing-measured"
    record = read_record(out)
    assert record["status"] == "done"
    assert {s["status"] for s in record["samples"]} == {status}
    assert all(why in s["why"] for s in record["samples"])


def test_errors_in_a_row_end_a_block_and_are_said(server: SmallServer, tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    with pytest.raises(Refused):
        run(out, url=server.url, arms=with_mode("http 500"), samples=5)
    record = read_record(out)
    assert len(record["samples"]) == 3
    assert "given up after 3 errors in a row (HTTP 500); 9 samples" in record["warnings"][0]


def test_reuse_asks_for_the_cache(server: SmallServer, tmp_path: Path) -> None:
    record = run(tmp_path / "run.json", url=server.url, reuse=True, arms=with_mode("cached"))
    assert {s["status"] for s in record["samples"]} == {"ok"}
    assert len(record["probes"]) == len(record["samples"])
    with pytest.raises(Refused, match="nothing was reused"):
        run(tmp_path / "cold.json", url=server.url, reuse=True)


def test_arms_that_prove_themselves(server: SmallServer, tmp_path: Path) -> None:
    record = run(tmp_path / "run.json", url=server.url, arms=a_b())
    assert {(s["arm"], tuple(s["engaged"]), s["status"]) for s in record["samples"]} == {
        ("off", ("off",), "ok"),
        ("on", ("on",), "ok"),
    }


def test_an_arm_that_was_not_switched_on_is_refused(server: SmallServer, tmp_path: Path) -> None:
    off, on = a_b()
    arms = (off, replace(on, fields={}))
    with pytest.raises(Refused, match=r"not switched on: response:slotwise\.lever is off"):
        run(tmp_path / "run.json", url=server.url, arms=arms)


def test_a_counter_that_the_server_has_not_stops_the_run_at_once(
    server: SmallServer, tmp_path: Path
) -> None:
    off, on = a_b()
    arms = (off, replace(on, engaged=(Engaged(counter="response:slotwise.levr", equals="on"),)))
    with pytest.raises(Refused) as caught:
        run(tmp_path / "run.json", url=server.url, arms=arms)
    assert caught.value.findings[0].code == "engaged-counter-absent"
    record = read_record(tmp_path / "run.json")
    assert record["status"] == "failed"
    assert len(record["samples"]) == 4  # every size of both arms once


def test_a_server_without_tokenize(tmp_path: Path) -> None:
    with SmallServer(tokenize=False) as server:
        record = run(tmp_path / "run.json", url=server.url, samples=6)
    last = record["samples"][-2:]
    assert all(abs(s["tokens"]["prompt"] - s["target_tokens"]) <= 1 for s in last)


def test_no_server(tmp_path: Path) -> None:
    with pytest.raises(Refused) as caught:
        run(tmp_path / "run.json", url="http://127.0.0.1:9")
    assert caught.value.findings[0].code == "no-server"
    assert caught.value.exit_code == 3


def test_an_interrupted_run_leaves_a_whole_record(server: SmallServer, tmp_path: Path) -> None:
    out = tmp_path / "run.json"

    def stop(done: int, _total: int, _text: str) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_ladder(plan(out, url=server.url), progress=stop, say=lambda _: None)
    record = read_record(out)
    assert record["status"] == "interrupted"
    assert len(record["samples"]) == 3
    assert record["pairing"] is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "slotwise.ladder/v2"}, "newer than this slotwise reads"),
        ({"schema": "slotwise.trace/v1"}, "expected slotwise.ladder/v1"),
        ({"status": "perhaps"}, "status is 'perhaps'"),
        ({"samples": [{}]}, "samples[0].index is not there"),
        ({"extra": 1}, "unknown key"),
    ],
)
def test_a_record_that_does_not_hold(
    server: SmallServer, tmp_path: Path, change: dict, message: str
) -> None:
    record = run(tmp_path / "run.json", url=server.url, samples=1, sizes=(50,))
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps({**record, **change}))
    with pytest.raises(InvalidRecord) as caught:
        read_record(bad)
    assert message in str(caught.value)
    assert caught.value.exit_code == 4


def test_a_newer_minor_version_may_know_more(server: SmallServer, tmp_path: Path) -> None:
    record = run(tmp_path / "run.json", url=server.url, samples=1, sizes=(50,))
    newer = tmp_path / "newer.json"
    newer.write_text(json.dumps({**record, "schema": "slotwise.ladder/v1.7", "more": 1}))
    assert read_record(newer)["more"] == 1


def test_an_arm_s_own_address(server: SmallServer, tmp_path: Path) -> None:
    arms = (Arm(name="there", url=server.url + "/v1/"),)
    assert run(tmp_path / "run.json", arms=arms)["arms"][0]["switched_on_by"] == ["url"]
