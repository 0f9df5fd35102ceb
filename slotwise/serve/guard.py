"""Who may come in: API keys, the names this server is called by, and pages of other origins.

Without a key the server listens on loopback only, which keeps other machines out but not the web
pages in this machine's browser: a page may send requests to 127.0.0.1, or be given that address
for its own name (DNS rebinding). So then only loopback's own names are answered, and a request
that a page of another origin sends is refused unless that origin was allowed.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slotwise.serve.faults import ApiError
from slotwise.serve.replies import dumps
from slotwise.serve.settings import ServeSettings

PUBLIC = frozenset({"/", "/health", "/page.css", "/page.js"})
"""Needs no key: what says nothing of anybody's conversation."""
SAFE = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
CORS = {
    "access-control-allow-methods": "GET, POST, OPTIONS",
    "access-control-allow-headers": "authorization, content-type, x-request-id",
    "access-control-expose-headers": "x-request-id, retry-after",
    "access-control-max-age": "600",
}


def fault_response(fault: ApiError) -> Response:
    return Response(
        dumps(fault.to_dict()),
        status_code=fault.status,
        headers=fault.headers,
        media_type="application/json",
    )


class Guard:
    """ASGI middleware around the whole app."""

    def __init__(self, app: ASGIApp, *, settings: ServeSettings) -> None:
        self._app, self._settings = app, settings
        self._keys = [key.encode() for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        allowed = origin in self._settings.cors_origins if origin else False
        extra = {**SAFE, **(_cors(origin) if origin and allowed else {})}

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                out = MutableHeaders(scope=message)
                for name, value in extra.items():
                    out.setdefault(name, value)
            await send(message)

        try:
            self._check(scope, headers, origin, allowed)
        except ApiError as fault:
            return await fault_response(fault)(scope, receive, sending)
        if scope["method"] == "OPTIONS" and allowed:
            return await Response(status_code=204)(scope, receive, sending)
        return await self._app(scope, receive, sending)

    def _check(self, scope: Scope, headers: Headers, origin: str | None, allowed: bool) -> None:
        host = headers.get("host", "")
        if not self._keys and not self._is_own_name(host):
            raise ApiError(
                403,
                f"this server is not called {host!r:.80}. Without an API key it answers to "
                "loopback's names only.",
                code="unknown_host",
            )
        if origin and not allowed and urlsplit(origin).netloc != host:
            raise ApiError(
                403,
                f"pages of {origin!r:.80} may not use this server (see --cors-origin)",
                code="foreign_origin",
            )
        if self._keys and scope["path"] not in PUBLIC and scope["method"] != "OPTIONS":
            self._check_key(headers)

    def _is_own_name(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name in {"localhost", self._settings.host, *self._settings.allowed_hosts}:
            return True
        try:
            return ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False

    def _check_key(self, headers: Headers) -> None:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        offered = given.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        raw = offered.encode("utf-8", "replace")
        # All of them are compared, so that the time says nothing of which one it was.
        matches = [hmac.compare_digest(raw, key) for key in self._keys]
        if True not in matches:
            raise ApiError(
                401,
                "no valid API key: send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )


def _cors(origin: str) -> Mapping[str, str]:
    return {
        **CORS,
        "access-control-allow-origin": origin,
        "vary": "origin",
        "cross-origin-resource-policy": "cross-origin",
    }
