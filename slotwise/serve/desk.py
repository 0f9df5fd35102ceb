"""The engine's own thread, and the queue before it: one engine, many clients, first come first.

Prompts are rendered and tokenized by a second thread (the clerk) as they come, so that a bad one
is refused at once; they are answered by the engine's thread in the order in which they came.
Nothing here knows HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Literal

from slotwise.engine.prompt import Cancelled
from slotwise.engine.text import Answerer, Prompt
from slotwise.errors import SlotwiseError
from slotwise.serve.answering import Answering
from slotwise.serve.faults import ApiError, from_exception
from slotwise.serve.jobs import Job
from slotwise.trace.record import RequestRecord

log = logging.getLogger("slotwise.serve")

State = Literal["loading", "ready", "stopping", "failed"]
Opener = Callable[[], AbstractContextManager[Answerer]]
OnRecord = Callable[[Job | None, RequestRecord], None]


class Desk:
    """Takes jobs and has them answered. `submit` and `withdraw` are for the event loop's thread."""

    def __init__(
        self, opener: Opener, *, queue: int, max_tokens: int | None, on_record: OnRecord
    ) -> None:
        self._opener, self._queue_limit, self._max_tokens = opener, queue, max_tokens
        self._on_record = on_record
        self._changed = threading.Condition()
        self._queue: deque[Job] = deque()
        self._leaving: deque[Job] = deque()
        self._preparing = 0
        self._known: dict[str, Job] = {}
        self._clerk = ThreadPoolExecutor(1, thread_name_prefix="clerk")
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self.state: State = "loading"
        self.since = time.time()
        self.failure: BaseException | None = None
        self.on_state: Callable[[], None] = _nothing
        """Called from the engine's thread when `state` has changed."""
        self.answerer: Answerer | None = None
        self.current: Job | None = None
        self._seconds = 1.0
        """What a request took lately, for Retry-After."""

    # -- for the event loop --------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self._queue) + self._preparing

    def jobs(self) -> list[Job]:
        """Those that have not ended, in the order in which they will."""
        with self._changed:
            running = [self.current] if self.current else []
            return [*running, *self._queue]

    def ready(self) -> Answerer:
        """Raises ApiError unless requests are taken."""
        if self.state == "loading":
            message = "the model is being loaded"
            raise ApiError(503, message, code="loading", headers={"retry-after": "2"})
        if self.state != "ready" or self.answerer is None:
            raise ApiError(503, "the server is stopping", code="stopping")
        return self.answerer

    async def submit(self, job: Job) -> None:
        """Prepares the job's prompt and puts it into the queue. Raises ApiError."""
        answerer = self.ready()
        busy = self.current is not None or self.waiting
        if busy and self.waiting >= self._queue_limit:
            seconds = str(max(1, min(60, round(self._seconds))))
            raise ApiError(
                429,
                f"{self.waiting} requests are waiting, which is all the queue holds",
                code="queue_full",
                headers={"retry-after": seconds},
            )
        with self._changed:
            self._preparing += 1
        try:
            loop = asyncio.get_running_loop()
            job.prompt = await loop.run_in_executor(self._clerk, self._prepare, answerer, job)
        finally:
            waits = self._line_up(job)
        if not waits:
            raise ApiError(503, "the server is stopping", code="stopping")

    def _line_up(self, job: Job) -> bool:
        """Into the queue, unless its prompt could not be prepared or the server was told to stop
        meanwhile. In one step with its being counted: the engine must not end in between."""
        with self._changed:
            self._preparing -= 1
            if job.prompt is not None:
                job.prompt.opened[1].phase("queue").__enter__()
                line = self._queue if self.state == "ready" else self._leaving
                line.append(job)
            self._changed.notify()
            return self.state == "ready"

    def withdraw(self, job: Job) -> None:
        """Its client has gone: out of the queue, or cancelled before the next layer or window."""
        job.abandon()
        with self._changed:
            if job in self._queue:
                self._queue.remove(job)
                self._leaving.append(job)
                self._changed.notify()

    def expire(self, job: Job) -> None:
        """Its time is up: what there is of the answer is all of it."""
        job.out_of_time = True
        waited = job in self._queue
        self.withdraw(job)
        if waited:
            job.post(_out_of_time())

    def stop(self) -> None:
        """No more requests: those in the queue are refused, the one that runs is finished."""
        with self._changed:
            if self.state != "failed":
                self.state = "stopping"
            while self._queue:
                job = self._queue.popleft()
                job.post(ApiError(503, "the server is stopping", code="stopping"))
                job.abandon()
                self._leaving.append(job)
            self._changed.notify()

    def stop_now(self) -> None:
        """The running answer ends too, as cancelled."""
        self.stop()
        if (job := self.current) is not None:
            job.post(ApiError(503, "the server was stopped", code="stopping"))
            job.abandon()

    def join(self, seconds: float | None = None) -> bool:
        """Waits for the engine to be closed; False if it still is not."""
        self._clerk.shutdown(wait=False, cancel_futures=True)
        if self._thread.is_alive():
            self._thread.join(seconds)
        return not self._thread.is_alive()

    # -- the clerk's thread ---------------------------------------------------------------

    def _prepare(self, answerer: Answerer, job: Job) -> Prompt:
        ask = job.ask
        try:
            if ask.messages is None:
                prompt = answerer.open_text(ask.text, start_ns=job.start_ns)
            elif answerer.template is None:
                raise ApiError(
                    400,
                    "the model has no chat template: use /v1/completions",
                    code="no_chat_template",
                )
            else:
                prompt = answerer.open_chat(
                    answerer.template,
                    ask.messages,
                    start_ns=job.start_ns,
                    **ask.template_values,
                )
        except Exception as error:
            raise from_exception(error) from error
        self._known[prompt.opened[0]] = job
        self._check_length(answerer, prompt)
        return prompt

    def _check_length(self, answerer: Answerer, prompt: Prompt) -> None:
        try:
            answerer.engine.check_prompt(prompt.tokens, 1)
        except Exception as error:
            name, ledger = prompt.opened
            answerer.engine.withdraw(name, ledger.close("failed"), error=type(error).__name__)
            raise from_exception(error) from error

    # -- the engine's thread -----------------------------------------------------------------

    def _work(self) -> None:
        try:
            with self._opener() as answerer:
                answerer.engine.on_record = self._file
                self.answerer = answerer
                self._enter("ready")
                tidy = answerer.engine.conversations.tidy
                while (job := self._next(tidy)) is not None:
                    self._run(answerer, job)
                self._let_go()
        except BaseException as error:
            self.failure = error
            self._enter("failed")

    def _enter(self, state: State) -> None:
        with self._changed:
            if self.state != "stopping" or state == "failed":
                self.state, self.since = state, time.time()
        self.on_state()

    def _hurried(self) -> bool:
        """Whether there is something better to do than to tidy."""
        return bool(self._queue or self._leaving) or self.state != "ready"

    def _next(self, tidy: Callable[[Callable[[], bool]], bool]) -> Job | None:
        """The next job; None when there will be none. Meanwhile conversations are parked."""
        while True:
            self._let_go()
            with self._changed:
                if self._queue:
                    self.current = self._queue.popleft()
                    self.current.running = True
                    return self.current
                if self.state == "stopping" and not self._preparing:
                    return None
                if self._leaving:
                    continue
            if not tidy(self._hurried):
                with self._changed:
                    if not self._hurried():
                        self._changed.wait()

    def _let_go(self) -> None:
        """Closes the ledgers of those who left the queue."""
        while self._leaving:
            job = self._leaving.popleft()
            if job.prompt is not None and self.answerer is not None:
                name, ledger = job.prompt.opened
                self.answerer.engine.withdraw(name, ledger.close("cancelled"))

    def _run(self, answerer: Answerer, job: Job) -> None:
        begun = time.monotonic()
        try:
            Answering(answerer, job, most=self._max_tokens).run()
        except Cancelled:
            if job.out_of_time:
                job.post(_out_of_time())
        except Exception as error:
            fault = from_exception(error)
            if fault.status >= 500:
                ours = not isinstance(error, SlotwiseError)  # a defect: say where it is
                log.error("request %s failed: %s", job.request, error, exc_info=ours)
            job.post(fault)
        finally:
            with self._changed:
                self.current = None
            self._seconds += 0.2 * (time.monotonic() - begun - self._seconds)

    def _file(self, record: RequestRecord) -> None:
        job = self._known.pop(record.request, None)
        if job is not None:
            job.record = record
        self._on_record(job, record)


def _out_of_time() -> ApiError:
    return ApiError(504, "the time limit was reached before the first token", code="time_limit")


def _nothing() -> None:
    """Nobody wants to know."""
