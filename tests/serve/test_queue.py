"""One engine, many clients: order, a full queue, hang-ups, crashes, time, and the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
from serve.served import PATIENCE, Answer, Served, checked

from slotwise.errors import StoreError


@contextmanager
def held(served: Served) -> Iterator[threading.Event]:
    """No window runs until the event is set."""
    gate, window = threading.Event(), served.engine.window

    def waiting(token: int, position: int) -> Any:
        gate.wait(PATIENCE)
        return window(token, position)

    with patch.object(served.engine, "window", waiting):
        try:
            yield gate
        finally:
            gate.set()
            served.wait_for(lambda: served.service.desk.current is None)


def in_background(work: Callable[[], Answer]) -> tuple[threading.Thread, list[Answer]]:
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(work()))
    thread.start()
    return thread, answers


def ended(served: Served, n: int) -> list[dict[str, Any]]:
    """The latest `n` that ended, oldest first, with sound records."""
    entries = list(served.service.ended)[:n][::-1]
    for entry in entries:
        checked(entry["record"])
    return entries


def test_first_come_first_served_and_429_beyond_the_queue(serve: Callable[..., Any]) -> None:
    with serve(queue=2) as served, held(served) as gate:
        desk, threads = served.service.desk, []
        for n in range(3):
            name = f"n{n}"
            work = lambda name=name: served.send(  # noqa: E731
                "POST", "/v1/completions", b'{"prompt":"x","max_tokens":2}', X_Request_Id=name
            )
            threads.append(in_background(work))
            served.wait_for(lambda n=n: len(desk.jobs()) == n + 1 and desk.current)
        refused = served.complete()
        assert (refused.status, refused.error["code"]) == (429, "queue_full")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert served.get("/health").json["waiting"] == 2
        states = [job["state"] for job in served.get("/v1/requests").json["running"]]
        assert states == ["running", "queued", "queued"]
        gate.set()
        for thread, answers in threads:
            thread.join(PATIENCE)
            assert answers[0].status == 200
        assert [entry["id"] for entry in ended(served, 3)] == ["n0", "n1", "n2"]
        ends = [checked(entry["record"]).ledger for entry in ended(served, 3)]
        for before, after in pairwise(ends):
            assert after.start_ns + after.ns("queue") > before.end_ns
        metrics = served.get("/metrics").body.decode()
        assert 'slotwise:request_success_total{finished_reason="refused"} 1.0' in metrics


def test_a_hang_up_in_the_middle_of_an_answer(served: Served) -> None:
    with served.start_chat(max_tokens=400) as response:
        response.readline()
    served.wait_for(lambda: served.service.desk.current is None)
    (entry,) = ended(served, 1)
    assert entry["state"] == "cancelled"
    assert entry["record"]["tokens"]["generated"] < 400
    served.check_serves()


def test_a_hang_up_while_waiting_for_a_whole_answer(served: Served) -> None:
    with held(served) as gate:
        connection = served.connect()
        connection.request("POST", "/v1/completions", body=b'{"prompt":"zz","max_tokens":300}')
        served.wait_for(lambda: served.service.desk.current is not None)
        job = served.service.desk.current
        assert job is not None
        connection.close()
        served.wait_for(job.cancel.is_set)
        gate.set()
    assert ended(served, 1)[0]["state"] == "cancelled"
    served.check_serves()


def test_a_hang_up_in_the_queue_frees_its_place(serve: Callable[..., Any]) -> None:
    with serve(queue=1) as served, held(served) as gate:
        running, _ = in_background(served.complete)
        served.wait_for(lambda: served.service.desk.current is not None)
        connection = served.connect()
        connection.request("POST", "/v1/completions", body=b'{"prompt":"q"}')
        served.wait_for(lambda: served.service.desk.waiting == 1)
        connection.close()
        served.wait_for(lambda: served.service.desk.waiting == 0)
        gate.set()
        running.join(PATIENCE)
        served.wait_for(lambda: len(served.service.ended) == 2)
        states = [entry["state"] for entry in ended(served, 2)]
        assert states == ["done", "cancelled"]
        served.check_serves()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("secret detail"), "internal_error"),
        (MemoryError(), "out_of_memory"),
        (StoreError("/secret/path", 4096, "input/output error"), "store_error"),
    ],
)
def test_a_crash_in_a_request_does_not_lose_the_next(
    served: Served, error: Exception, code: str, after: int, stream: bool
) -> None:
    window, calls = served.engine.window, iter(range(10_000))

    def failing(token: int, position: int) -> Any:
        if next(calls) >= after:
            raise error
        return window(token, position)

    with patch.object(served.engine, "window", failing):
        answer = served.complete("crash", stream=stream, cache_prompt=False)
    if stream and after:
        assert answer.status == 200
        fault = answer.events[-1]["error"]
    else:
        assert answer.status == 500
        fault = answer.error
    assert fault["code"] == code
    assert "secret" not in fault["message"]
    (entry,) = ended(served, 1)
    assert entry["state"] == "failed"
    served.check_serves()


def test_the_time_limit_before_and_after_the_first_token(serve: Callable[..., Any]) -> None:
    with serve(max_seconds=0.2) as served:
        with held(served):
            running, _ = in_background(served.complete)
            served.wait_for(lambda: served.service.desk.current is not None)
            answer = served.complete()
        running.join(PATIENCE)
        assert (answer.status, answer.error["code"]) == (504, "time_limit")
        window, first = served.engine.window, threading.Event()

        def slow(token: int, position: int) -> Any:
            if first.is_set() and (job := served.service.desk.current) is not None:
                job.cancel.wait(PATIENCE)
            first.set()
            return window(token, position)

        with patch.object(served.engine, "window", slow):
            late = served.complete(stream=True, max_tokens=400)
        assert late.events[-1]["choices"][0]["finish_reason"] == "length"
        assert late.events[-1]["slotwise"]["cause"] == "time limit"


def test_keep_alives_in_a_stream_with_nothing_to_say(serve: Callable[..., Any]) -> None:
    with (
        serve(ping_seconds=0.05) as served,
        held(served) as gate,
        served.start_chat(max_tokens=3) as response,
    ):
        assert response.readline() == b": still here\n"
        gate.set()
        assert response.read().endswith(b"data: [DONE]\n\n")


def test_stopping_finishes_the_running_answer_and_refuses_the_others(
    serve: Callable[..., Any],
) -> None:
    with serve() as served:
        with held(served) as gate:
            running, answers = in_background(lambda: served.complete(max_tokens=9))
            served.wait_for(lambda: served.service.desk.current is not None)
            waiting, others = in_background(served.complete)
            served.wait_for(lambda: served.service.desk.waiting == 1)
            served.server.handle_exit(15, None)
            waiting.join(PATIENCE)
            assert (others[0].status, others[0].error["code"]) == (503, "stopping")
            gate.set()
            running.join(PATIENCE)
        assert answers[0].json["usage"]["completion_tokens"] == 9
        served.wait_for(lambda: not served.service.desk._thread.is_alive())


def test_stopping_while_a_prompt_is_prepared_refuses_it_in_order(serve: Callable[..., Any]) -> None:
    with serve() as served:
        desk, gate = served.service.desk, threading.Event()
        answerer = desk.answerer
        assert answerer is not None
        encode = answerer.tokenizer.encode

        def slow(text: str, **options: Any) -> list[int]:
            gate.wait(PATIENCE)
            return encode(text, **options)

        with patch.object(answerer.tokenizer, "encode", slow):
            waiting, answers = in_background(served.complete)
            served.wait_for(lambda: desk.waiting == 1)
            desk.stop()
            gate.set()
            waiting.join(PATIENCE)
        assert (answers[0].status, answers[0].error["code"]) == (503, "stopping")
        served.wait_for(lambda: not desk._thread.is_alive())
        assert [entry["state"] for entry in ended(served, 1)] == ["cancelled"]
        assert desk._known == {}


def test_a_second_signal_does_not_wait(serve: Callable[..., Any]) -> None:
    with serve() as served, served.start_chat(max_tokens=400) as response:
        response.readline()
        served.server.handle_exit(2, None)
        served.server.handle_exit(2, None)
        served.wait_for(lambda: not served.service.desk._thread.is_alive())


def test_the_server_adds_little(served: Served) -> None:
    """By its own phases: what is not the engine's. The bound is for a machine that is not busy;
    bench/serve_load.py measures it."""
    record = checked(served.chat(stream=True).events[-1]["slotwise"]["record"])
    own = sum(record.ledger.ns(name) for name in ("queue", "template", "tokenize", "emit"))
    assert 0 < own < record.ledger.wall_ns
