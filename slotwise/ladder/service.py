"""The service file: how production is stopped, how it is started again, and how to see that it is.

TOML, one table `[production]`: `url`, `stop`, `start`, and how long each may take.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slotwise.errors import UsageError
from slotwise.ladder.arms import argv, read_toml, refuse_unknown

KEYS = {"url", "stop", "start", "stop_seconds", "ready_seconds", "log"}


@dataclass(frozen=True, kw_only=True)
class Service:
    """Production. Commands are lists of words, no shell reads them."""

    url: str
    stop: tuple[str, ...]
    start: tuple[str, ...]
    """May end at once (a service manager) or be the server itself."""
    stop_seconds: float = 120.0
    ready_seconds: float = 900.0
    log: str | None = None
    """Where output of `start` goes; nowhere without it."""

    @property
    def key(self) -> str:
        """Names the journal: one per production server."""
        return hashlib.sha256(self.url.rstrip("/").encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Service:
        return cls(**{**data, "stop": tuple(data["stop"]), "start": tuple(data["start"])})


def read_service(path: Path) -> Service:
    """The service of a file. Raises UsageError when it does not say all that is needed."""
    data, _ = read_toml(path)
    refuse_unknown(data, {"production"}, path)
    table = data.get("production")
    if not isinstance(table, dict):
        raise UsageError(f"{path}: no table [production]", next_step="See docs/ladder.md.")
    refuse_unknown(table, KEYS, path, "production.")
    if not isinstance(table.get("url"), str):
        raise UsageError(f"{path}: production.url is not there", next_step="The server's address.")
    log = table.get("log")
    return Service(
        url=table["url"],
        stop=argv(table.get("stop"), "production.stop", path),
        start=argv(table.get("start"), "production.start", path),
        stop_seconds=_seconds(table, "stop_seconds", Service.stop_seconds, path),
        ready_seconds=_seconds(table, "ready_seconds", Service.ready_seconds, path),
        log=str((path.parent / log).resolve()) if isinstance(log, str) else None,
    )


def _seconds(table: dict[str, Any], key: str, default: float, path: Path) -> float:
    value = table.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise UsageError(f"{path}: production.{key} is {value!r:.40}; expected seconds above 0")
    return float(value)
