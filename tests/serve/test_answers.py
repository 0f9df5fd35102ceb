"""Chat and completions, streamed and whole: OpenAI's objects, llama.cpp's timings, the ledger."""

from __future__ import annotations

from typing import Any

import pytest
from serve.served import HI, Served, checked

from slotwise.trace.ledger import PHASES


def test_a_chat(served: Served) -> None:
    answer = served.chat()
    assert answer.status == 200
    body = answer.json
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] == 6


def test_the_same_whole_and_streamed(served: Served) -> None:
    whole = served.chat(max_tokens=20).json["choices"][0]["message"]["content"]
    events = served.chat(max_tokens=20, stream=True).events
    deltas = [e["choices"][0]["delta"] for e in events]
    assert deltas[0]["role"] == "assistant"
    assert "".join(d.get("content", "") for d in deltas) == whole
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert len({e["id"] for e in events}) == 1


def test_the_ledger_of_an_answer(served: Served) -> None:
    served.chat([{"role": "user", "content": "another one"}])
    body = served.chat(cache_prompt=False).json
    record = checked(body["slotwise"]["record"])
    order = [name for name in record.ledger.phases if name != "other"]
    assert order[:4] == ["queue", "template", "tokenize", "lookup"]
    assert set(order) >= {"lend", "read.attention", "first_window", "sample", "emit"}
    assert set(order) <= set(PHASES)
    assert record.status == record.ledger.status == "done"
    assert record.tokens.prompt == body["usage"]["prompt_tokens"]
    assert record.request == body["slotwise"]["request"]


def test_the_edges_of_a_stream_lie_inside_its_ledger(served: Served) -> None:
    record = checked(served.chat(stream=True).events[-1]["slotwise"]["record"])
    edges = record.edges
    assert edges.first_byte_ns is not None
    assert edges.first_event_ns is not None
    assert edges.first_token_ns is not None
    assert edges.first_byte_ns <= edges.first_event_ns <= edges.first_token_ns
    # The ledger is closed by the engine's thread when it hears that the bytes are out.
    assert edges.first_token_ns <= record.ledger.wall_ns


def test_an_answer_that_is_sent_whole_has_no_first_byte_before_its_last(served: Served) -> None:
    record = served.chat().record
    assert record.edges.first_token_ns is None
    assert "edges.first_token_ns" in record.to_dict()["missing"]


def test_timings_are_llama_cpp_s(served: Served) -> None:
    first = served.chat(cache_prompt=False).json
    timings, usage = first["timings"], first["usage"]
    assert timings["cache_n"] == 0
    assert timings["prompt_n"] == usage["prompt_tokens"]
    assert timings["predicted_n"] == usage["completion_tokens"]
    assert timings["prompt_ms"] > 0
    assert timings["prompt_per_token_ms"] == timings["prompt_ms"] / timings["prompt_n"]
    record = checked(first["slotwise"]["record"])
    assert timings["prompt_ms"] * 1e6 < record.ledger.wall_ns
    again = served.chat().json
    assert again["timings"]["cache_n"] == again["usage"]["prompt_tokens"] - 1
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["timings"]["cache_n"]


def test_usage_of_a_stream_only_when_asked(served: Served) -> None:
    assert all("usage" not in e for e in served.chat(stream=True).events)
    *before, last = served.chat(stream=True, stream_options={"include_usage": True}).events
    assert all(e["usage"] is None for e in before)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 6
    assert last["timings"]["predicted_n"] == 6


@pytest.mark.parametrize("prompt", ["Hello", [72, 101, 108], ["Hello"], [[72, 101, 108]]])
def test_completions_of_text_and_tokens(served: Served, prompt: Any) -> None:
    body = served.complete(prompt).json
    assert body["object"] == "text_completion"
    assert body["usage"]["completion_tokens"] == 6
    whole = body["choices"][0]["text"]
    events = served.complete(prompt, stream=True).events
    assert "".join(e["choices"][0]["text"] for e in events) == whole


def test_a_seed_repeats_an_answer(served: Served) -> None:
    def text(seed: int) -> str:
        answer = served.chat(temperature=1.5, top_k=0, seed=seed, max_tokens=24)
        return answer.json["choices"][0]["message"]["content"]

    assert text(7) == text(7)
    assert len({text(seed) for seed in range(4)}) > 1
    assert text(-5) == text(-5)


def test_stop_strings_are_cut_off_wherever_tokens_end(served: Served) -> None:
    options = {"temperature": 1.2, "top_k": 0, "seed": 3, "max_tokens": 40}
    text = served.chat(**options).json["choices"][0]["message"]["content"]
    stop = text[7:10]
    body = served.chat(**options, stop=stop).json
    assert body["choices"][0]["message"]["content"] == text[: text.index(stop)]
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["slotwise"]["cause"] == "stop string"
    assert body["slotwise"]["record"]["status"] == "done"
    events = served.chat(**options, stop=["never said", stop], stream=True).events
    streamed = "".join(e["choices"][0]["delta"].get("content", "") for e in events)
    assert streamed == text[: text.index(stop)]
    untouched = served.chat(**options, stop=text[-1] + "never")
    assert untouched.json["choices"][0]["message"]["content"] == text


def test_logprobs(served: Served) -> None:
    choice = served.chat(logprobs=True, top_logprobs=3).json["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == 6
    for entry in content:
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"]  # greedy takes the best
        assert entry["bytes"] == entry["top_logprobs"][0]["bytes"]
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        assert all(value <= 0 for value in values)
    streamed = served.chat(logprobs=True, top_logprobs=3, stream=True).events
    pieces = [e["choices"][0].get("logprobs") for e in streamed]
    assert [c for p in pieces if p for c in p["content"]] == content
    old = served.complete(logprobs=2).json["choices"][0]["logprobs"]
    assert len(old["tokens"]) == len(old["token_logprobs"]) == len(old["top_logprobs"]) == 6
    assert served.chat().json["choices"][0]["logprobs"] is None


def test_an_answer_ends_with_the_context(served: Served) -> None:
    body = served.complete("x" * 500, max_tokens=None).json
    assert body["usage"]["total_tokens"] == 512
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["slotwise"]["cause"] == "context"


def test_content_in_parts_is_joined(served: Served) -> None:
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]
    joined = served.chat([{"role": "user", "content": parts}]).json
    assert joined["choices"] == served.chat().json["choices"]


def test_progress_while_a_prompt_is_read(served: Served) -> None:
    events = served.chat(
        [{"role": "user", "content": "long " * 60}],
        stream=True,
        return_progress=True,
        cache_prompt=False,
    ).events
    (first, *_), ledgers = (
        [e for e in events if "prompt_progress" in e],
        [e for e in events if "slotwise_ledger" in e],
    )
    progress = first["prompt_progress"]
    assert 0 <= progress["processed"] <= progress["total"]
    assert set(first["slotwise_progress"]["phases_ns"]) <= set(PHASES)
    assert ledgers[0]["slotwise_ledger"] == events[-1]["slotwise"]["record"]["ledger"]


def test_a_client_s_request_id_comes_back(served: Served) -> None:
    answer = served.send("POST", "/v1/completions", b'{"prompt":"x"}', X_Request_Id="mine-1")
    assert answer.headers["x-request-id"] == "mine-1"
    (entry,) = [r for r in served.get("/v1/requests").json["data"] if r["id"] == "mine-1"]
    assert entry["request"] == answer.json["slotwise"]["request"]
    odd = served.send("POST", "/v1/completions", b'{"prompt":"x"}', X_Request_Id="y" * 200)
    assert odd.headers["x-request-id"].startswith("req-")


def test_tools_reach_the_template(served: Served) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    with_tools = served.chat(tools=[tool], tool_choice="auto")
    assert with_tools.status == 200
    answerer = served.service.desk.answerer
    assert answerer is not None
    seen: list[Any] = []
    render = answerer.template.render  # type: ignore[union-attr]
    answerer.template.render = lambda m, **v: seen.append(v) or render(m, **v)  # type: ignore
    try:
        served.chat(tools=[tool])
        served.chat(tools=[tool], tool_choice="none")
        served.chat(chat_template_kwargs={"enable_thinking": False, "messages": 1, "self": 2})
    finally:
        del answerer.template.render  # type: ignore[union-attr]
    assert seen == [{"tools": [tool]}, {}, {"enable_thinking": False}]


def test_tokens_and_templates(served: Served) -> None:
    tokens = served.post("/tokenize", {"content": "he said <|im_end|>"}).json["tokens"]
    assert served.post("/detokenize", {"tokens": tokens}).json == {"content": "he said <|im_end|>"}
    pieces = served.post("/tokenize", {"content": "hé", "with_pieces": True}).json["tokens"]
    assert [p["piece"] for p in pieces] == ["h", [0xC3], [0xA9]]
    prompt = served.post("/apply-template", {"messages": HI}).json["prompt"]
    asked = served.chat().json["usage"]["prompt_tokens"]
    assert len(served.post("/tokenize", {"content": prompt}).json["tokens"]) == asked
