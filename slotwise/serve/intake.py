"""A request's body, read within limits of size and time."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from slotwise.serve.faults import ApiError
from slotwise.trace.ledger import CLOCK

DRAIN_BYTES, DRAIN_SECONDS = 256 << 20, 10.0
"""How much of a body that is too large is still read, so that its sender hears why."""


async def read_body(request: Request, *, limit: int, seconds: float) -> tuple[bytes, int]:
    """(the body, when its last byte arrived). Raises ApiError 400, 408 or 413."""
    try:
        async with asyncio.timeout(seconds):
            body = await _collect(request, limit)
    except TimeoutError:
        message = f"the body did not arrive within {seconds:g} s"
        raise ApiError(408, message, code="slow_body", headers={"connection": "close"}) from None
    except ClientDisconnect:
        raise ApiError(400, "the connection ended before the body", code="cut_body") from None
    arrived = request.scope.get("slotwise.arrived")
    return body, arrived() if arrived else CLOCK()


async def _collect(request: Request, limit: int) -> bytes:
    length = request.headers.get("content-length", "")
    parts, size = [], 0
    if length.isdigit() and int(length) > limit:
        await _drain(request, limit)
    async for part in request.stream():
        size += len(part)
        if size > limit:
            await _drain(request, limit)
        parts.append(part)
    return b"".join(parts)


async def _drain(request: Request, limit: int) -> None:
    size = 0
    try:
        async with asyncio.timeout(DRAIN_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > DRAIN_BYTES:
                    break
    except (TimeoutError, ClientDisconnect):
        size = -1
    raise ApiError(
        413,
        f"the body is larger than {limit:,} bytes, which is all that is taken",
        code="body_too_large",
        headers={"connection": "close"},
    )
