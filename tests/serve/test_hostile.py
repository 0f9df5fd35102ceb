"""Clients that are broken, slow or mean get 4xx, and life goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from serve.served import HI, Served

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"text"', b'{"prompt": ', b"\xff\xfe", b'{"prompt":"\xff"}',
        b'{"prompt":"\\ud800"}', b'{"prompt":NaN}', b"[" * 100_000, b'{"a":' * 50_000,
        b'{"prompt":"x"} {}', b"\x00", b'{"prompt":"x","temperature":1e999}',
    ],
)  # fmt: skip
def test_what_is_not_json(served: Served, body: bytes) -> None:
    answer = served.send("POST", "/v1/completions", body)
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", []), ("messages", "hello"), ("messages", [{"content": "x"}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        ("max_tokens", 0), ("max_tokens", "5"), ("max_tokens", 1.5), ("max_tokens", True),
        ("temperature", -1), ("temperature", "hot"), ("top_p", 2), ("top_k", -9),
        ("stop", ""), ("stop", ["a"] * 17), ("seed", 1 << 64), ("n", 2), ("n", 0),
        ("logprobs", 3), ("top_logprobs", 21), ("stream", "yes"),
        ("response_format", {"type": "json_object"}), ("tool_choice", "required"),
        ("grammar", "root ::= x"), ("model", 7),
    ],
)  # fmt: skip
def test_what_makes_no_sense(served: Served, field: str, value: Any) -> None:
    answer = served.chat(**{"messages": HI, field: value})
    assert answer.status == 400
    assert answer.error["param"] == field or field in answer.error["message"]


def test_unknown_fields_are_reported_and_refused_when_strict(served: Served) -> None:
    body = served.chat(flux=1, user="me", frequency_penalty=0, logit_bias={}).json
    assert body["slotwise"]["unknown_fields"] == ["flux"]
    assert served.chat(frequency_penalty=0.5).json["slotwise"]["unknown_fields"] == [
        "frequency_penalty"
    ]
    answer = served.chat(flux=1, strict=True)
    assert (answer.status, answer.error["param"]) == (400, "flux")


def test_another_model_is_not_loaded(served: Served) -> None:
    answer = served.chat(model="/etc/passwd")
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")
    assert served.chat(model="talking").status == served.chat(model="default").status == 200
    assert served.get("/v1/models/other").status == 404
    assert served.get("/v1/models/talking").json["id"] == "talking"


def test_a_prompt_that_is_too_long(served: Served) -> None:
    for answer in (served.complete("x" * 512), served.complete([1] * 9999)):
        assert answer.status == 400
        assert answer.error["code"] == "context_length_exceeded"
    assert served.complete([1, 1 << 40]).status == 400
    assert served.complete([1, 259]).error["message"].startswith("token id 259, expected 0 to 258")
    assert served.complete("").status == 400
    streamed = served.complete("x" * 512, stream=True)
    assert streamed.error["code"] == "context_length_exceeded"


def test_a_conversation_that_the_template_refuses(served: Served) -> None:
    answerer = served.service.desk.answerer
    assert answerer is not None
    from slotwise.weights.chat import ChatTemplate

    kept, answerer.template = answerer.template, ChatTemplate("{{ raise_exception('no') }}")
    try:
        answer = served.chat()
        assert answer.status == 400
        assert "refuses this conversation: no" in answer.error["message"]
        answerer.template = None
        assert served.chat().error["code"] == "no_chat_template"
    finally:
        answerer.template = kept
    served.check_serves()


def test_paths_and_methods(served: Served) -> None:
    assert served.get("/nothing").error["code"] == "not_found"
    answer = served.get("/v1/chat/completions")
    assert (answer.status, answer.headers["allow"]) == (405, "POST")
    assert served.get("/page.css/../../command.py").status == 404


def test_a_body_of_100_mb(served: Served) -> None:
    answer = served.send("POST", "/v1/completions", b"x" * 100_000_000)
    assert (answer.status, answer.error["code"]) == (413, "body_too_large")
    served.check_serves()


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/chat/completions", "messages", [{"role": "0"}] * 10_001),
        ("/v1/completions", "prompt", [1] * 1_048_577),
        ("/v1/completions", "prompt", [[1.0] * 1_048_577]),
        ("/detokenize", "tokens", [1] * 1_048_577),
    ],
)
def test_lists_that_take_long_are_refused_before_they_are_looked_at(
    served: Served, path: str, field: str, value: list[Any]
) -> None:
    answer = served.post(path, {field: value})
    assert (answer.status, answer.error["code"]) == (400, "invalid_field")
    assert "at most" in answer.error["message"]


def test_whole_numbers_may_have_a_point(served: Served) -> None:
    assert (
        served.complete([72.0, 101]).json["choices"] == served.complete([72, 101]).json["choices"]
    )
    assert served.complete([72.5, 101]).error["param"] == "prompt"
    assert served.post("/detokenize", {"tokens": [72.0]}).json == {"content": "H"}


def test_a_body_in_chunks_that_never_ends(serve: Callable[..., Any]) -> None:
    with serve(max_body=10_000) as served:
        sock = served.raw(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(40):
            sock.sendall(b"400\r\n" + b"x" * 1024 + b"\r\n")
        sock.sendall(b"0\r\n\r\n")
        assert sock.recv(64).startswith(b"HTTP/1.1 413 ")
        sock.close()
        served.check_serves()


def test_slow_clients_are_shown_the_door(serve: Callable[..., Any]) -> None:
    with serve(body_seconds=0.3) as served:
        silent, dripping = served.raw(), served.raw(HEAD)
        waiting = served.raw(HEAD + b"Content-Length: 100\r\n\r\n{")
        for sock in (silent, dripping, waiting):
            assert sock.recv(64).startswith(b"HTTP/1.1 408 ")
            sock.close()
        served.check_serves()


def test_a_flood_of_headers(served: Served) -> None:
    sock = served.raw(HEAD)
    flood = b"".join(b"X-%d: %s\r\n" % (i, b"y" * 1000) for i in range(100))
    sock.sendall(flood)
    assert sock.recv(64).startswith(b"HTTP/1.1 4")
    sock.close()
    served.check_serves()


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
)  # fmt: skip
def test_what_is_not_http(served: Served, data: bytes) -> None:
    sock = served.raw(data)
    assert sock.recv(64).startswith(b"HTTP/1.1 4")
    sock.close()
    served.check_serves()


def test_a_client_that_leaves_before_its_body(served: Served) -> None:
    sock = served.raw(HEAD + b"Content-Length: 100\r\n\r\n{")
    sock.close()
    served.check_serves()
