"""HTTP/1.1 by uvicorn and h11, with what they lack: a deadline for a request's head, and when a
request's last byte arrived."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from slotwise.trace.ledger import CLOCK

HEAD_BYTES = 64 << 10
"""Longest request line and headers together."""


class Protocol(H11Protocol):
    """One connection."""

    head_seconds = 30.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._arrived_ns = 0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._arrived_ns = CLOCK()
        before = self.scope
        if self._deadline is None and self.conn.their_state is h11.IDLE:
            self._expect_head()  # the first bytes of another request on this connection
        super().data_received(data)
        if self.scope is not before:
            # The request's task has not begun: it only does when this call has returned.
            self.scope["slotwise.arrived"] = self._arrived  # type: ignore[typeddict-unknown-key]
        if self.conn.their_state is not h11.IDLE:
            self._forget_deadline()

    def _arrived(self) -> int:
        return self._arrived_ns

    def _expect_head(self) -> None:
        self._deadline = self.loop.call_later(self.head_seconds, self._head_is_late)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _head_is_late(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(
                b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
            )
            self.transport.close()
