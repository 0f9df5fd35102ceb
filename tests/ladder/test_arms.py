"""Arm files: what they may say, and the counter without which arms are not compared."""

from __future__ import annotations

from pathlib import Path

import pytest
from ladder.small_server import SmallServer

from slotwise.errors import Refused, UsageError
from slotwise.ladder import counters
from slotwise.ladder.arms import Arm, Engaged, check_arms, parse_arm
from slotwise.ladder.client import Answer, Client
from slotwise.ladder.service import Service, read_service

WHOLE = """
url = "http://127.0.0.1:9"
trace = "arm-{start}.jsonl"
[start]
command = ["serve", "--trace", "arm-{start}.jsonl"]
environment = { LEVER = "1" }
log = "arm.log"
ready_seconds = 3
[request]
lever = "on"
[engaged]
counter = "response:slotwise.lever"
is = "on"
"""


def arm_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "arm.toml"
    path.write_text(text)
    return path


def test_a_whole_arm(tmp_path: Path) -> None:
    arm = parse_arm(f"fast={arm_file(tmp_path, WHOLE)}")
    assert arm.name == "fast"
    assert arm.start is not None
    assert arm.start.command == ("serve", "--trace", "arm-{start}.jsonl")
    assert arm.start.log == tmp_path / "arm.log"
    assert arm.trace == tmp_path / "arm-{start}.jsonl"
    assert arm.switched_on_by == ["process", "fields", "url"]
    assert arm.engaged == (Engaged(counter="response:slotwise.lever", equals="on"),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("urls = 1", "unknown key urls"),
        ("url = 1", "url is 1"),
        ("[start]\ncommand = 'sh -c x'", "not a list of words"),
        ("[start]\ncommand = []", "not a list of words"),
        ("[start]\ncomand = ['x']", "unknown key start.comand"),
        ("[engaged]\ncounter = 'x'\nis = 1", "SOURCE:NAME"),
        ("[engaged]\ncounter = 'props:x'", "one of `is` and `above`"),
        ("[engaged]\ncounter = 'props:x'\nis = 1\nabove = 2", "one of `is` and `above`"),
        ("[start", "not TOML"),
    ],
)
def test_what_an_arm_may_not_say(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_arm(f"a={arm_file(tmp_path, text)}")
    assert message in f"{caught.value} {caught.value.next_step}"


@pytest.mark.parametrize("text", ["noequals", "=file", "name="])
def test_name_and_file_are_both_needed(text: str) -> None:
    with pytest.raises(UsageError, match="NAME=FILE"):
        parse_arm(text)


def test_arms_without_a_counter_are_not_compared() -> None:
    proven = Arm(name="a", engaged=(Engaged(counter="props:x", equals=1),))
    check_arms([Arm(name="alone")])
    check_arms([proven, Arm(name="b", engaged=proven.engaged)])
    with pytest.raises(Refused) as caught:
        check_arms([proven, Arm(name="b"), Arm(name="c")])
    assert [f.where for f in caught.value.findings] == ["arm b", "arm c"]
    with pytest.raises(UsageError, match="one name"):
        check_arms([proven, proven])


@pytest.mark.parametrize(
    ("engaged", "value", "holds"),
    [
        (Engaged(counter="props:x", equals="on"), "on", True),
        (Engaged(counter="props:x", equals="on"), "off", False),
        (Engaged(counter="props:x", equals="on"), None, False),
        (Engaged(counter="props:x", above=0), 3, True),
        (Engaged(counter="props:x", above=0), 0, False),
        (Engaged(counter="props:x", above=0), "many", False),
        (Engaged(counter="props:x", equals=0), None, False),
    ],
)
def test_what_a_counter_has_to_say(engaged: Engaged, value: object, holds: bool) -> None:
    assert engaged.holds(value) is holds
    assert (counters.verdict(engaged, value) == "") is holds


def test_counters_of_every_source(server: SmallServer) -> None:
    client, answer = Client(server.url), Answer(began_ns=0)
    answer.blocks = {"slotwise": {"settings": {"refill": "deferred"}}}

    def read(counter: str) -> object:
        engaged = Engaged(counter=counter, above=0)
        was = counters.before(client, engaged)
        server.lever_uses += 2
        return counters.after(client, engaged, answer, was)

    assert read("response:slotwise.settings.refill") == "deferred"
    assert read("response:slotwise.settings.nothing") is None
    assert read("props:lever.mode") == "on"
    assert read("props:status") == "ok"  # /health where /props has none
    assert read("metrics:lever_total") == 2
    assert read('metrics:lever_total{kind="a"}') == 2
    assert read("metrics:other_total") is None
    client.close()


def test_a_counter_of_the_trace() -> None:
    request = {
        "slots_refilled": {"value": 12, "how": "measured"},
        "facts": {"windows": {"value": 3, "how": "measured"}},
        "phases": [
            {"name": "refill", "ms": {"value": 1.5}},
            {"name": "refill", "ms": {"value": 1}},
        ],
    }
    assert counters.of_trace(request, "slots_refilled") == 12
    assert counters.of_trace(request, "facts.windows") == 3
    assert counters.of_trace(request, "phase.refill") == 2.5
    assert counters.of_trace(request, "phase.checkpoint") is None


SERVICE = """
[production]
url = "http://127.0.0.1:8080/"
stop = ["systemctl", "stop", "llama"]
start = ["systemctl", "start", "llama"]
ready_seconds = 5
"""


def test_a_service_file(tmp_path: Path) -> None:
    service = read_service(arm_file(tmp_path, SERVICE))
    assert service.stop == ("systemctl", "stop", "llama")
    assert service.ready_seconds == 5
    assert Service.from_dict(service.to_dict()) == service


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[production]", "[prod]", "unknown key prod"),
        ('stop = ["systemctl", "stop", "llama"]', "", "production.stop"),
        ("ready_seconds = 5", "ready_seconds = 0", "above 0"),
        ("ready_seconds = 5", "ready = 0", "unknown key production.ready"),
        ('url = "http://127.0.0.1:8080/"', "", "production.url"),
    ],
)
def test_what_a_service_file_may_not_say(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_service(arm_file(tmp_path, SERVICE.replace(old, new)))
    assert message in str(caught.value)
