"""One HTTP client for measuring: a chunk is stamped when it leaves the socket, before it is parsed.

A network backend below the HTTP library takes the stamps; JSON is only read when the answer is
complete. Redirects are not followed, proxies are not used, nothing is retried.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpcore2
from httpcore2 import ConnectionPool, NetworkBackend, NetworkStream, Response, SyncBackend

from slotwise import __version__
from slotwise.errors import SlotwiseError, UsageError

LARGEST_ANSWER = 256 << 20
SMALL_SECONDS = 30.0
FAILURES = (
    httpcore2.NetworkError,
    httpcore2.ProtocolError,
    httpcore2.TimeoutException,
    httpcore2.ProxyError,
    OSError,
)


class NoAnswer(SlotwiseError):
    """The server could not be reached, broke off, or said something that is no answer."""


@dataclass
class Stamps:
    """Monotonic ns: when the last write began, and when the first and the last read returned."""

    wrote_ns: int | None = None
    first_read_ns: int | None = None
    read_ns: int = 0


class _Stream(NetworkStream):
    """A stream that stamps its reads and writes."""

    def __init__(self, inner: NetworkStream, stamps: Stamps) -> None:
        self._inner, self._stamps = inner, stamps

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = self._inner.read(max_bytes, timeout)
        now = self._stamps.read_ns = time.perf_counter_ns()
        if self._stamps.first_read_ns is None and data:
            self._stamps.first_read_ns = now
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if buffer:  # before the call: on a busy machine the answer can be there when it returns
            self._stamps.wrote_ns = time.perf_counter_ns()
        self._inner.write(buffer, timeout)

    def close(self) -> None:
        self._inner.close()

    def start_tls(self, *arguments: Any, **named: Any) -> NetworkStream:
        return _Stream(self._inner.start_tls(*arguments, **named), self._stamps)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


class _Backend(NetworkBackend):
    def __init__(self, stamps: Stamps) -> None:
        self._inner, self._stamps = SyncBackend(), stamps

    def connect_tcp(self, *arguments: Any, **named: Any) -> NetworkStream:
        return _Stream(self._inner.connect_tcp(*arguments, **named), self._stamps)

    def connect_unix_socket(self, *arguments: Any, **named: Any) -> NetworkStream:
        return _Stream(self._inner.connect_unix_socket(*arguments, **named), self._stamps)

    def sleep(self, seconds: float) -> None:
        self._inner.sleep(seconds)


@dataclass(kw_only=True)
class Answer:
    """What came back for one streamed request. Stamps are monotonic ns; no text is kept."""

    began_ns: int
    sent_ns: int | None = None
    first_byte_ns: int | None = None
    first_event_ns: int | None = None
    first_content_ns: int | None = None
    last_byte_ns: int | None = None
    token_ns: list[int] = field(default_factory=list[int])
    """Events that carried text of any kind."""
    http_status: int | None = None
    finish: str | None = None
    blocks: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """usage, timings, metrics, slotwise: the last one of each."""
    error: str = ""
    remark: str = ""
    """What the server said of its error. To be shown, never to be kept."""


BLOCKS = ("usage", "timings", "metrics", "slotwise")


@dataclass
class Client:
    """Talks to one server. `key` is sent as a bearer token and appears nowhere else."""

    url: str
    key: str = field(default="", repr=False)
    timeout: float = 600.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(
                f"{self.url} is no address of a server", next_step="Like http://127.0.0.1:8080"
            )
        if parts.username or parts.password:
            raise UsageError(
                "the address holds a password", next_step="Put the key into OPENAI_API_KEY."
            )
        self.url = self.url.rstrip("/").removesuffix("/v1")
        self._stamps = Stamps()
        self._pool = ConnectionPool(
            max_connections=1, keepalive_expiry=0.0, network_backend=_Backend(self._stamps)
        )

    def close(self) -> None:
        self._pool.close()

    def get(self, path: str, *, seconds: float = SMALL_SECONDS) -> tuple[int, dict[str, str], Any]:
        """(status, headers, JSON or text) of a small page. Raises NoAnswer."""
        with self._open("GET", path, None, {}, seconds) as response:
            headers = {k.decode("latin-1").lower(): v.decode("latin-1")
                       for k, v in response.headers}  # fmt: skip
            return response.status, headers, _parsed(_bounded(response, 16 << 20, seconds))

    def post(self, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        """(status, JSON or text) of a small call. Raises NoAnswer."""
        with self._open("POST", path, body, {}, self.timeout) as response:
            return response.status, _parsed(_bounded(response, LARGEST_ANSWER, self.timeout))

    def stream(self, path: str, body: Mapping[str, Any], *, request_id: str) -> Answer:
        """Sends one request and takes its events. What goes wrong is in the answer's `error`."""
        answer = Answer(began_ns=time.perf_counter_ns())
        chunks: list[tuple[int, bytes]] = []
        try:
            with self._open("POST", path, body, {"X-Request-Id": request_id}, None) as response:
                answer.http_status = response.status
                for chunk in _bounded(response, LARGEST_ANSWER, self.timeout):
                    chunks.append((self._stamps.read_ns, chunk))
        except NoAnswer as error:
            answer.error = str(error)
        answer.sent_ns, answer.first_byte_ns = self._stamps.wrote_ns, self._stamps.first_read_ns
        if chunks:
            answer.last_byte_ns = chunks[-1][0]
        _understand(answer, chunks)
        return answer

    @contextmanager
    def _open(
        self, method: str, path: str, body: Any, headers: dict[str, str], seconds: float | None
    ) -> Iterator[Response]:
        stamps = self._stamps
        stamps.wrote_ns = stamps.first_read_ns = None
        content = None if body is None else json.dumps(body).encode()
        limit = self.timeout if seconds is None else seconds
        sent: dict[bytes | str, bytes | str] = {"User-Agent": f"slotwise/{__version__}", **headers}
        if content is not None:
            sent["Content-Type"] = "application/json"
        if self.key:
            sent["Authorization"] = f"Bearer {self.key}"
        timeout = {"connect": min(limit, 30.0), "read": limit, "write": limit, "pool": limit}
        try:
            with self._pool.stream(
                method, self.url + path, headers=sent, content=content,
                extensions={"timeout": timeout},
            ) as response:  # fmt: skip
                yield response
        except FAILURES as error:
            raise NoAnswer(f"{_reason(error)}") from error


def _reason(error: Exception) -> str:
    match error:
        case httpcore2.ConnectError() | httpcore2.ConnectTimeout():
            return "no connection"
        case httpcore2.TimeoutException():
            return "nothing came in time"
        case httpcore2.ProtocolError() | httpcore2.ReadError() | httpcore2.WriteError():
            return "the connection broke off"
    return type(error).__name__


def _bounded(response: Response, limit: int, seconds: float) -> Iterator[bytes]:
    """The chunks of an answer that ends: neither endless nor for ever kept alive."""
    length, end = 0, time.monotonic() + seconds
    for chunk in response.iter_stream():
        length += len(chunk)
        if length > limit:
            raise NoAnswer(f"an answer of more than {limit >> 20} MiB")
        if time.monotonic() > end:
            raise NoAnswer(f"the answer took longer than {seconds:g} s")
        yield chunk


def _parsed(chunks: Iterator[bytes]) -> Any:
    data = b"".join(chunks)
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return data.decode("utf-8", errors="replace")


def events(chunks: list[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """(stamp, data) of each server-sent event; the stamp is that of the chunk that ends it."""
    data: list[bytes] = []
    rest = b""
    for stamp, chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield stamp, b"\n".join(data)
                data = []
    if rest.startswith(b"data:"):
        data.append(rest[5:].removeprefix(b" "))
    if data and chunks:
        yield chunks[-1][0], b"\n".join(data)


def _understand(answer: Answer, chunks: list[tuple[int, bytes]]) -> None:
    """Fills in edges and blocks from the chunks."""
    if answer.http_status != 200:
        if answer.http_status is not None:
            answer.error = f"HTTP {answer.http_status}"
            answer.remark = b"".join(c for _, c in chunks)[:500].decode(errors="replace")
        return
    ended = False
    for stamp, data in events(chunks):
        if answer.first_event_ns is None:
            answer.first_event_ns = stamp
        if data == b"[DONE]":
            ended = True
            continue
        event = _parsed(iter((data,)))
        if not isinstance(event, dict):
            answer.error = answer.error or "an event that is no JSON object"
            continue
        _event(answer, event, stamp)
    if answer.first_event_ns is None:
        answer.error = answer.error or "no event came: the server did not stream"
    elif not answer.token_ns:
        answer.error = answer.error or "the answer has no token"
    elif not ended and answer.finish is None:
        answer.error = answer.error or "the answer broke off before its end"


def _event(answer: Answer, event: dict[str, Any], stamp: int) -> None:
    if "error" in event:  # also a status 200 can end in one
        answer.error = answer.error or "an error came in the stream"
        answer.remark = str(event["error"])[:500]
    for name in BLOCKS:
        if isinstance(event.get(name), dict):
            answer.blocks[name] = event[name]
    choices = event.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        return
    if isinstance(choice.get("finish_reason"), str):
        answer.finish = choice["finish_reason"]
    delta = choice.get("delta")
    delta = delta if isinstance(delta, dict) else {}
    content = delta.get("content") or choice.get("text")
    thought = delta.get("reasoning_content") or delta.get("reasoning")
    if content or thought or delta.get("tool_calls"):
        answer.token_ns.append(stamp)
        if content and answer.first_content_ns is None:
            answer.first_content_ns = stamp
