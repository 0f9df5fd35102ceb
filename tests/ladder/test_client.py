"""Edges, blocks and errors of one request, against a real socket."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from ladder.small_server import SmallServer

from slotwise.errors import UsageError
from slotwise.ladder.client import Answer, Client, NoAnswer, events


def ask(url: str, *, mode: str = "", text: str = "What?", timeout: float = 20.0) -> Answer:
    client = Client(url, timeout=timeout)
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 3, "mode": mode}
    answer = client.stream("/v1/chat/completions", body, request_id="r-1")
    client.close()
    return answer


def test_the_four_edges_are_in_order_and_none_is_another(server: SmallServer) -> None:
    answer = ask(server.url, mode="reasoning")
    assert answer.error == ""
    stamps = (
        answer.began_ns, answer.sent_ns, answer.first_byte_ns, answer.first_event_ns,
        answer.token_ns[0], answer.first_content_ns, answer.last_byte_ns,
    )  # fmt: skip
    assert None not in stamps
    assert list(stamps) == sorted(stamps)  # type: ignore[type-var]
    assert len(answer.token_ns) == 4
    # the role came before any token, the thought before any content
    assert answer.first_event_ns < answer.token_ns[0] < answer.first_content_ns  # type: ignore


def test_an_event_is_stamped_when_its_last_piece_comes() -> None:
    chunks = [(1, b"data: {a"), (2, b"}\n"), (3, b"\ndata: x\n\ndata: "), (5, b"y\r\n\r\n")]
    assert list(events(chunks)) == [(3, b"{a}"), (3, b"x"), (5, b"y")]


def test_comments_and_events_of_several_lines() -> None:
    chunks = [(1, b": ping\n\n"), (2, b"event: e\ndata: 1\ndata: 2\n\n"), (3, b"data: end")]
    assert list(events(chunks)) == [(2, b"1\n2"), (3, b"end")]


def test_events_cut_into_pieces_are_the_same(server: SmallServer) -> None:
    assert len(ask(server.url, mode="halves").token_ns) == 3


@pytest.mark.parametrize(
    ("mode", "error"),
    [
        ("http 500", "HTTP 500"),
        ("error in stream", "an error came in the stream"),
        ("not streamed", "no event came: the server did not stream"),
        ("broken", "the connection broke off"),
    ],
)
def test_what_goes_wrong_is_an_error_and_no_sample(
    server: SmallServer, mode: str, error: str
) -> None:
    assert ask(server.url, mode=mode).error == error


def test_what_a_server_says_of_an_error_stays_out_of_the_error(server: SmallServer) -> None:
    answer = ask(server.url, mode="http 500", text="my secret words")
    assert "secret" not in answer.error
    assert "secret" in answer.remark


def test_no_server_is_an_answer_with_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        answer = ask(f"http://127.0.0.1:{taken.getsockname()[1]}")
    assert answer.error == "no connection"
    assert answer.http_status is None


def test_the_key_is_sent_and_not_shown(server: SmallServer) -> None:
    client = Client(server.url + "/v1", key="sk-abc")
    client.get("/health")
    assert server.seen[-1][1]["Authorization"] == "Bearer sk-abc"
    assert "sk-abc" not in repr(client)
    client.close()


@pytest.mark.parametrize("url", ["ftp://x", "localhost:8080", "http://u:p@127.0.0.1"])
def test_addresses_that_make_no_sense(url: str) -> None:
    with pytest.raises(UsageError):
        Client(url)


@contextmanager
def endless() -> Iterator[str]:
    """A server that keeps the connection alive for ever."""
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
                try:
                    connection.sendall(head)
                    while not stop.wait(0.02):
                        connection.sendall(b": ping\n\n")
                except OSError:
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        stop.set()
        thread.join()


def test_an_answer_that_never_ends_is_given_up() -> None:
    with endless() as url:
        assert ask(url, timeout=0.2).error == "the answer took longer than 0.2 s"


def test_small_pages_raise_instead(server: SmallServer) -> None:
    client = Client(server.url)
    assert client.get("/health")[0] == 200
    client.close()
    with endless() as url, pytest.raises(NoAnswer):
        Client(url).get("/health", seconds=0.2)
