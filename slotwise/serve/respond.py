"""Sends one job's answer over HTTP, streamed or whole, and notices when its client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from starlette.types import Receive, Scope, Send

from slotwise.serve.desk import Desk
from slotwise.serve.faults import ApiError
from slotwise.serve.guard import fault_response
from slotwise.serve.jobs import Done, Event, Job, Progress
from slotwise.serve.pieces import Piece
from slotwise.serve.replies import SSE_DONE, SSE_PING, Replies, dumps, error_event, sse
from slotwise.trace.ledger import LedgerRecord

Events = asyncio.Queue[Event]
HEADERS = [(b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]


class Gone(Exception):
    """The client hung up."""


def posting(events: Events) -> Callable[[Event], None]:
    """What the engine's thread posts arrives in `events`, in the loop that calls this."""
    loop = asyncio.get_running_loop()

    def post(event: Event) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody is left to hear it
            loop.call_soon_threadsafe(events.put_nowait, event)

    return post


class AnswerResponse:
    """An ASGI response. However it ends, the job is not left behind."""

    def __init__(
        self, job: Job, events: Events, replies: Replies, *, desk: Desk, ping: float, seconds: float
    ) -> None:
        self._job, self._events, self._replies = job, events, replies
        self._desk, self._ping, self._seconds = desk, ping, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        out = _Out(send, self._job)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._seconds, self._desk.expire, self._job)
        try:
            async with _watching(receive):
                if self._job.ask.stream:
                    await self._stream(out)
                else:
                    await self._whole(out)
        except Gone:
            pass
        except ApiError as fault:
            fault.headers["x-request-id"] = self._job.name
            await fault_response(fault)(scope, receive, send)
        finally:
            timer.cancel()
            self._desk.withdraw(self._job)

    async def _whole(self, out: _Out) -> None:
        pieces: list[Piece] = []
        while not isinstance(event := await self._events.get(), Done):
            if isinstance(event, ApiError):
                raise event
            if isinstance(event, Piece):
                pieces.append(event)
        body = dumps(self._replies.whole(pieces, event))
        await out.start(200, b"application/json", length=len(body))
        await out.write(body, more=False)

    async def _stream(self, out: _Out) -> None:
        while True:
            try:
                async with asyncio.timeout(self._ping):
                    event = await self._events.get()
            except TimeoutError:
                await out.event(SSE_PING)
                continue
            if isinstance(event, ApiError):
                if not out.started:
                    raise event
                await out.write(error_event(event) + SSE_DONE, more=False)
                return
            if isinstance(event, Done):
                last = b"".join(map(sse, self._replies.last_chunks(event)))
                await out.event(last + SSE_DONE, more=False)
                return
            await self._event(out, event)

    async def _event(self, out: _Out, event: Piece | Progress | LedgerRecord) -> None:
        if isinstance(event, Progress | LedgerRecord):
            await out.event(sse(self._replies.progress(event)))
            return
        await out.event(sse(self._replies.chunk(event)))
        stamps = self._job.stamps
        stamps.mark("first_token")
        if event.text:
            stamps.mark("first_content")
        if event.first:
            self._job.written.set()


class _Out:
    """One HTTP response being written; marks its edges."""

    def __init__(self, send: Send, job: Job) -> None:
        self._send, self._job = send, job
        self.started = False

    async def start(self, status: int, kind: bytes, *, length: int | None = None) -> None:
        headers = [
            (b"content-type", kind),
            (b"x-request-id", self._job.name.encode("ascii")),
            *HEADERS,
        ]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        self.started = True
        self._job.stamps.mark("first_byte")

    async def event(self, data: bytes, *, more: bool = True) -> None:
        if not self.started:
            await self.start(200, b"text/event-stream; charset=utf-8")
        await self.write(data, more=more)
        self._job.stamps.mark("first_event")

    async def write(self, data: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


@asynccontextmanager
async def _watching(receive: Receive) -> AsyncIterator[None]:
    """Raises Gone inside the block as soon as the client has hung up."""
    body = asyncio.current_task()
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        if body is not None:
            body.cancel()

    watcher: asyncio.Task[None] = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if gone and body is not None and body.uncancel() == 0:
            raise Gone from None
        raise
    finally:
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher
