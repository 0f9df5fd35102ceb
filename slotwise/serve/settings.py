"""What a user may choose about the server; checked once, before it listens."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from slotwise.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Raises `UsageError` for a value that makes no sense, and for an open door."""

    host: str = "127.0.0.1"
    port: int = 8080
    """0 takes any free port."""
    api_keys: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    """Further names of the model, the first of which it is listed under."""
    queue: int = 32
    """Requests that may wait; the next one is refused with 429."""
    max_body: int = 8 << 20
    max_tokens: int | None = None
    """Longest answer; None: what the context leaves."""
    max_seconds: float = 600.0
    """Of one request, waiting included."""
    body_seconds: float = 30.0
    """For a request's head, and again for its body, to arrive."""
    ping_seconds: float = 5.0
    """A stream with nothing to say gets a comment this often."""
    cors_origins: tuple[str, ...] = ()
    keep_requests: int = 64
    """Ended requests that /v1/requests shows."""
    allowed_hosts: tuple[str, ...] = ()
    """Names this server may be called by, beside its own address."""

    def __post_init__(self) -> None:
        for name in ("queue", "max_body", "max_seconds", "body_seconds", "ping_seconds"):
            if getattr(self, name) <= 0:
                flag = name.replace("_", "-")
                raise UsageError(f"--{flag} is {getattr(self, name)}, expected more than 0")
        if not 0 <= self.port <= 65535:
            raise UsageError(f"--port is {self.port}, expected 0 to 65535")
        if any(not key.strip() or not key.isascii() for key in self.api_keys):
            raise UsageError("an API key is empty or not ASCII", next_step="Choose another one.")
        if not self.api_keys and not self.on_loopback:
            raise UsageError(
                f"--host {self.host} can be reached from other machines, and there is no --api-key",
                next_step="Give --api-key, or leave --host at 127.0.0.1.",
            )

    @property
    def on_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def settings_from(options: Mapping[str, Any]) -> ServeSettings:
    """Server settings out of the verb's options."""
    names = {f.name for f in fields(ServeSettings)}
    return ServeSettings(**{k: v for k, v in options.items() if k in names})
