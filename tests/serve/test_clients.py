"""Other people's programs, unmodified: the official `openai` client, and schemathesis."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from unittest.mock import patch

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serve.served import HI, PATIENCE, Served

from slotwise.engine.conversations import ParkSettings


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{served.url}/v1", api_key="unused", max_retries=0, timeout=PATIENCE
    ) as client:
        yield client


def test_openai_s_client_chats(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="talking", messages=HI, max_completion_tokens=6, temperature=0, seed=1
    )  # type: ignore[call-overload]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 6
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0
    assert answer.slotwise["record"]["schema"] == "slotwise.request/v1"
    assert answer.timings["predicted_n"] == 6


def test_openai_s_client_streams(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="talking", messages=HI, max_tokens=6, temperature=0, stream=True, logprobs=True,
        top_logprobs=2, stream_options={"include_usage": True},
    )  # type: ignore[call-overload]  # fmt: skip
    chunks = list(stream)
    assert chunks[-1].usage.completion_tokens == 6
    entries = [c for k in chunks for choice in k.choices if choice.logprobs
               for c in choice.logprobs.content]  # fmt: skip
    assert len(entries) == 6
    assert len(entries[0].top_logprobs) == 2


def test_openai_s_client_continues_text_and_lists_models(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="talking", prompt="Once", max_tokens=4, logprobs=1)
    assert len(answer.choices[0].logprobs.tokens) == 4  # type: ignore[union-attr, arg-type]
    assert [model.id for model in client.models.list()] == ["talking"]


def test_openai_s_client_understands_the_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="requests load nothing"):
        client.completions.create(model="gpt-x", prompt="x")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="talking", prompt="x" * 600)
    assert caught.value.code == "context_length_exceeded"


def test_metrics_are_prometheus_s(served: Served) -> None:
    before = _samples(served)
    tokens = served.chat().json["usage"]["completion_tokens"]
    after = _samples(served)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown("slotwise:generation_tokens_total") == tokens
    assert grown("slotwise:tokens_predicted_total") == tokens
    assert grown("slotwise:time_to_first_token_seconds_count") == 1
    record = served.service.ended[0]["record"]
    wall = record["ledger"]["wall_ns"] / 1e9
    assert grown("slotwise:time_to_first_token_seconds_sum") == pytest.approx(wall)
    slots = served.engine.expert_slots()
    assert after["slotwise:expert_slots{resident}"] == slots["resident"]
    phases = {k: v for k, v in after.items() if k.startswith("slotwise:ttft_phase_seconds_total{")}
    total = sum(after[k] - before.get(k, 0) for k in phases)
    assert total == pytest.approx(wall)


def test_what_a_refill_reads_after_its_request_is_counted(
    serve: Callable[..., AbstractContextManager[Served]],
) -> None:
    with serve(memory=900 << 10) as served:
        experts, gate = served.engine.loaded.experts, threading.Event()
        assert experts is not None
        read = experts._lanes.store.read

        def slow(moe_index: int, expert: int, target: memoryview) -> int:
            if experts._refill.active:
                gate.wait(PATIENCE)
            return read(moe_index, expert, target)

        with patch.object(experts._lanes.store, "read", slow):
            record = served.chat([{"role": "user", "content": "long " * 60}], max_tokens=1).record
            before = _samples(served)
            gate.set()
            served.wait_for(lambda: not experts.refill_state().active)
        assert record.refill is not None
        assert record.refill.end == "running"
        after, books = _samples(served), experts.refill_books
        assert books.bytes > record.refill.bytes
        name = "slotwise:expert_refill_bytes_total"
        assert (before[name], after[name]) == (record.refill.bytes, books.bytes)
        assert after["slotwise:expert_refill_seconds_total"] == pytest.approx(books.ns / 1e9)


def test_parked_conversations_are_counted(
    serve: Callable[..., AbstractContextManager[Served]],
) -> None:
    with serve(park=ParkSettings(memory=0, disk=1 << 20)) as served:
        parking = served.engine.conversations.parking
        served.chat([{"role": "user", "content": "long " * 60}])
        served.wait_for(lambda: parking.disk_used > 0 and not parking.over)
        served.wait_for(lambda: not parking.missing(served.engine.loaded.state.tokens))
        now = _samples(served)
        assert now["slotwise:parked_blocks"] == parking.blocks > 1
        assert now["slotwise:parked_bytes{memory}"] == 0
        assert now["slotwise:parked_bytes{disk}"] == parking.disk_used
        assert now["slotwise:parked_bytes{disk}"] <= now["slotwise:parked_bytes{file}"] <= 1 << 20


def _samples(served: Served) -> dict[str, float]:
    text = served.get("/metrics").body.decode()
    return {
        s.name + "".join(f"{{{v}}}" for v in s.labels.values()): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def test_health_says_what_is_loaded_and_since_when(served: Served) -> None:
    state = served.get("/health").json
    assert state["status"] == "ok"
    assert (state["model"], state["state"]) == ("talking", "ready")
    assert state["started"] <= state["since"]
    assert served.get("/props").json["total_slots"] == 1


SETTINGS = """
request-timeout = 120.0
[generation]
max-examples = {examples}
database = "none"
deterministic = true
[phases.coverage]
enabled = {coverage}
"""


@pytest.mark.parametrize(
    "examples", [5, pytest.param(100, marks=pytest.mark.deep)], ids=["short", "long"]
)
def test_schemathesis_finds_nothing(served: Served, examples: int, tmp_path: Path) -> None:
    (tmp_path / "schemathesis.toml").write_text(
        SETTINGS.format(examples=examples, coverage=str(examples > 10).lower())
    )
    done = subprocess.run(
        [Path(sys.executable).with_name("schemathesis"), "run", f"{served.url}/openapi.json"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    served.check_serves()
