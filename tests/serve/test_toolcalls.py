"""Tool calls: out of a model's text, whole and streamed, and back into its template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import openai
import pytest
from house import talking_model
from hypothesis import given, settings
from hypothesis import strategies as st
from serve.served import HI, PATIENCE, Served, serving

from slotwise.serve.pieces import Piece
from slotwise.serve.toolcalls import CLOSE, OPEN, CallText, read_call, writes_calls

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}{% endfor %}"
    'Write <tool_call>{"name": ..., "arguments": ...}</tool_call> to call one.<|im_end|>\n'
    "{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a town.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}
CALL = '{"name": "weather", "arguments": {"town": "Kraków"}}'
STOP = 258


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model whose template knows tools."""
    folder = tmp_path_factory.mktemp("calling")
    with patch.object(talking_model, "TEMPLATE", TEMPLATE):
        model = talking_model.write_talking_model(folder / "calling.gguf")
    with serving(model, context=2048) as served:
        yield served


@pytest.fixture
def client(calling: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{calling.url}/v1", api_key="unused", max_retries=0, timeout=PATIENCE
    ) as client:
        yield client


@contextmanager
def saying(served: Served, text: str) -> Iterator[None]:
    """The model wants to write `text`: its logits are moved towards it, the rest is as always."""
    script = iter([*text.encode(), STOP])
    window = served.engine.window

    def leading(token: int, position: int) -> np.ndarray:
        logits = window(token, position).copy()
        logits[next(script)] += 1e6
        return logits

    with patch.object(served.engine, "window", leading):
        yield
        served.wait_for(lambda: served.service.desk.current is None)


def ask(client: openai.OpenAI, **more: Any) -> Any:
    options = {"messages": HI, "tools": [TOOL], "temperature": 0, "max_tokens": 400, **more}
    return client.chat.completions.create(model="calling", **options)


def test_a_call_by_openai_s_client(calling: Served, client: openai.OpenAI) -> None:
    with saying(calling, f"{OPEN}\n{CALL}\n{CLOSE}"):
        choice = ask(client).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"town": "Kraków"}
    assert call.id


def test_calls_in_a_stream_by_openai_s_client(calling: Served, client: openai.OpenAI) -> None:
    second = '{"name": "time", "arguments": {}}'
    said = f"Let me see <b>.\n{OPEN}{CALL}{CLOSE}\n{OPEN}\n{second}{CLOSE}\n"
    with saying(calling, said):
        chunks = list(ask(client, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(d.content or "" for d in deltas) == "Let me see <b>."
    assert [d.role for d in deltas if d.role] == ["assistant"]
    calls = [call for d in deltas for call in d.tool_calls or []]
    assert [(c.index, c.function.name) for c in calls] == [(0, "weather"), (1, "time")]
    assert [json.loads(c.function.arguments) for c in calls] == [{"town": "Kraków"}, {}]
    assert len({c.id for c in calls}) == 2
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_the_openai_client_s_own_collector_understands_the_stream(
    calling: Served, client: openai.OpenAI
) -> None:
    with (
        saying(calling, f"Well.{OPEN}{CALL}{CLOSE}"),
        client.chat.completions.stream(
            model="calling", messages=HI, tools=[TOOL], temperature=0, max_tokens=400
        ) as stream,  # type: ignore[arg-type]
    ):
        message = stream.get_final_completion().choices[0].message
    assert message.content == "Well."
    assert message.tool_calls is not None
    assert json.loads(message.tool_calls[0].function.arguments) == {"town": "Kraków"}


def test_a_whole_round_goes_back_through_the_template(
    calling: Served, client: openai.OpenAI
) -> None:
    with saying(calling, f"{OPEN}{CALL}{CLOSE}"):
        message = ask(client).choices[0].message
    rendered: list[str] = []
    answerer = calling.service.desk.answerer
    assert answerer is not None
    encode = answerer.tokenizer.encode

    def listening(text: str, **options: Any) -> list[int]:
        rendered.append(text)
        return encode(text, **options)

    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    with patch.object(answerer.tokenizer, "encode", listening), saying(calling, "It rains."):
        choice = ask(client, messages=[*HI, message, result]).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("It rains.", "stop")
    assert not choice.message.tool_calls
    (text,) = rendered
    assert f"<|im_start|>assistant\n{OPEN}{CALL}{CLOSE}<|im_end|>" in text
    assert "<|im_start|>tool\nrain<|im_end|>" in text
    assert "weather in a town" in text


@pytest.mark.parametrize(
    ("text", "more"),
    [
        (f"{OPEN}not JSON{CLOSE}", {}),
        (f"{OPEN}<function=weather>{CLOSE}", {}),
        (f"{OPEN}{CALL}{CLOSE}", {"tools": None}),
        (f"{OPEN}{CALL}{CLOSE}", {"tool_choice": "none"}),
        (f"{OPEN}[1]{CLOSE} {OPEN}", {}),
        ("no tag at all  ", {}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_no_call_stays_text(
    calling: Served, text: str, more: dict[str, Any], stream: bool
) -> None:
    with saying(calling, text):
        answer = calling.chat(max_tokens=400, stream=stream, **{"tools": [TOOL], **more})
    if stream:
        deltas = [e["choices"][0]["delta"] for e in answer.events]
        assert "".join(d.get("content", "") for d in deltas) == text
        assert not any("tool_calls" in d for d in deltas)
        assert answer.events[-1]["choices"][0]["finish_reason"] == "stop"
        return
    choice = answer.json["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert choice["finish_reason"] == "stop"


def test_an_answer_that_was_cut_off_in_a_call_is_text(calling: Served) -> None:
    text = f"{OPEN}{CALL}"
    with saying(calling, text):
        whole = calling.chat(max_tokens=400, tools=[TOOL]).json["choices"][0]
    assert whole["finish_reason"] == "tool_calls"  # the model ended it, only the tag is missing
    with saying(calling, text + " " * 50):
        cut = calling.chat(max_tokens=len(text.encode()), tools=[TOOL]).json["choices"][0]
    assert (cut["message"]["content"], cut["finish_reason"]) == (text, "length")


def test_logprobs_and_usage_cover_the_call(calling: Served) -> None:
    text = f"{OPEN}{CALL}{CLOSE}"
    with saying(calling, text):
        body = calling.chat(max_tokens=400, tools=[TOOL], logprobs=True).json
    entries = body["choices"][0]["logprobs"]["content"]
    assert bytes(b for e in entries for b in e["bytes"]).decode() == text
    assert body["usage"]["completion_tokens"] == len(text.encode())


def test_a_template_of_another_kind_writes_no_such_calls(served: Served) -> None:
    text = f"{OPEN}{CALL}{CLOSE}"
    with saying(served, text):
        choice = served.chat(max_tokens=200, tools=[TOOL]).json["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert writes_calls(TEMPLATE)
    assert not writes_calls(None)


def test_wrong_calls_in_messages_are_refused(calling: Served) -> None:
    for call in ({}, {"function": {}}, {"function": {"name": "f", "arguments": 1}}):
        answer = calling.chat([*HI, {"role": "assistant", "tool_calls": [call]}])
        assert (answer.status, answer.error["param"]) == (400, "messages")
    odd = {"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
    assert calling.chat([*HI, {"role": "assistant", "tool_calls": [odd]}]).status == 200
    assert calling.chat(tools=[TOOL], parallel_tool_calls=False).json["slotwise"][
        "unknown_fields"
    ] == ["parallel_tool_calls"]


@pytest.mark.parametrize(
    "text",
    [
        "", "{}", '{"name": ""}', '{"name": 1, "arguments": {}}', '{"name": "f", "arguments": []}',
        '{"name": "f", "arguments": {"x": NaN}}', '{"name": "f", "arguments": {"x": "\\ud800"}}',
        '{"name": "f", "more": 1}', "[" * 100_000,
    ],
)  # fmt: skip
def test_what_no_call_is(text: str) -> None:
    assert read_call(text) is None


PARTS = [OPEN, CLOSE, CALL, "<tool", "_call>", "</", " ", "\n", "text", '{"name": "f"}', "<"]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=12), st.data())
def test_however_the_text_is_cut_it_is_read_the_same(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)

    def read(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
        reader = CallText()
        out = [*(reader.push(Piece(p)) for p in pieces), reader.finish(whole=True)]
        calls = [(c.name, c.arguments) for piece in out for c in piece.calls]
        assert reader.calls == len(calls)
        return "".join(piece.text for piece in out), calls

    size = data.draw(st.integers(1, 9))
    content, calls = read([text])
    assert read([text[i : i + size] for i in range(0, len(text), size)]) == (content, calls)
    if not calls:
        assert content == text
    assert content.count("text") <= text.count("text")
