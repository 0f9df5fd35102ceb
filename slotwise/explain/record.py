"""What was read from logs: values that say how they are known, phases, requests, lives.

Plain data and its JSON form. Nothing here parses, fits or draws. Durations are float
milliseconds and their fields end in ``_ms``; tokens, slots and bytes are whole numbers.
A reader may store numbers and names of its own closed vocabulary here, never log text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

SCHEMA = "slotwise.explain/v1"

How = Literal["measured", "derived", "bounded", "missing"]
Status = Literal["done", "cancelled", "incomplete", "failed"]

NAME_LIMIT = 32
WORD_LIMIT = 16
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 +/_:()-]*")
_WORDS = re.compile(r"[A-Za-z0-9]+")


@dataclass(frozen=True, slots=True)
class Value:
    """A number and how it is known. `value` is None when it is bounded or missing.

    measured: the log prints it. derived: computed from printed numbers, `why` says how.
    bounded: only `low` and `high` are known (either may be None: open). missing: `why`.
    """

    value: float | None
    how: How
    low: float | None = None
    high: float | None = None
    why: str = ""

    @classmethod
    def measured(cls, value: float) -> Value:
        return cls(value, "measured")

    @classmethod
    def derived(cls, value: float, why: str) -> Value:
        return cls(value, "derived", why=why)

    @classmethod
    def bounded(cls, low: float | None, high: float | None, why: str) -> Value:
        return cls(None, "bounded", low, high, why)

    @classmethod
    def missing(cls, why: str) -> Value:
        return cls(None, "missing", why=why)

    @property
    def known(self) -> bool:
        """Whether there is one number to calculate with (measured or derived)."""
        return self.value is not None

    def to_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {"value": self.value, "how": self.how}
        if self.how == "bounded":
            out |= {"low": self.low, "high": self.high}
        if self.why:
            out["why"] = self.why
        return out


@dataclass(frozen=True, slots=True)
class Phase:
    """One named stretch of time. Only phases of the lane ``request`` add up.

    Any other lane ("gpu timeline", "host", "stage 0", "lane 3") ran at the same time as
    something else and is never added to the sum.
    """

    name: str
    ms: Value
    lane: str = "request"
    contains: str = ""
    """What the bucket also holds: idle gaps, the previous chunk's callback, ..."""
    tokens: int | None = None
    slots: int | None = None
    bytes: int | None = None

    def to_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {"name": self.name, "lane": self.lane, "ms": self.ms.to_dict()}
        for key in ("contains", "tokens", "slots", "bytes"):
            value = getattr(self, key)
            if value not in (None, ""):
                out[key] = value
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request of one engine life. Token counts, clocks, phases and what is left over."""

    index: int
    """Position within its life, from 0."""
    lines: tuple[int, int]
    """First and last line in its file, from 1."""
    status: Status
    prompt: Value
    reused: Value
    read_planned: Value
    read: Value
    generated: Value
    prompt_ms: Value
    """The engine's own prompt clock."""
    ttft_ms: Value
    """Time to first token as a client sees it, where the log or a joined row tells."""
    decode_ms: Value
    phases: tuple[Phase, ...] = ()
    remainders: tuple[Phase, ...] = ()
    """What no phase explains. Never hidden; a negative one comes with a warning."""
    slots_lent: Value
    slots_refilled: Value
    cannot_tell: tuple[str, ...] = ()
    """What the log cannot say about this request, and which switch or version was missing."""
    warnings: tuple[str, ...] = ()
    first_of_life: bool = False
    warmed: bool = False
    """Whoever sent it had sent one of its size before: it is nobody's first."""
    facts: Mapping[str, Value] = field(default_factory=dict[str, Value])

    def to_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {
            "index": self.index,
            "lines": list(self.lines),
            "status": self.status,
            "first_of_life": self.first_of_life,
            "warmed": self.warmed,
        }
        for key in _REQUEST_VALUES:
            out[key] = getattr(self, key).to_dict()
        out["phases"] = [phase.to_dict() for phase in self.phases]
        out["remainders"] = [phase.to_dict() for phase in self.remainders]
        out["cannot_tell"] = list(self.cannot_tell)
        out["warnings"] = list(self.warnings)
        out["facts"] = {name: value.to_dict() for name, value in self.facts.items()}
        return out


_REQUEST_VALUES = (
    "prompt",
    "reused",
    "read_planned",
    "read",
    "generated",
    "prompt_ms",
    "ttft_ms",
    "decode_ms",
    "slots_lent",
    "slots_refilled",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One engine life: from a start to the next start or the end of the file."""

    dialect: str
    version: str = ""
    file: str
    """Base name only."""
    first_line: int
    capabilities: Mapping[str, bool] = field(default_factory=dict[str, bool])
    facts: Mapping[str, Value] = field(default_factory=dict[str, Value])
    requests: Sequence[Request] = ()
    notes: tuple[str, ...] = ()
    cannot_tell: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "dialect": self.dialect,
            "version": self.version,
            "file": self.file,
            "first_line": self.first_line,
            "capabilities": dict(self.capabilities),
            "facts": {name: value.to_dict() for name, value in self.facts.items()},
            "requests": [request.to_dict() for request in self.requests],
            "notes": list(self.notes),
            "cannot_tell": list(self.cannot_tell),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Everything read from the given files."""

    lives: tuple[Life, ...]
    unknown: Mapping[str, int] = field(default_factory=dict[str, int])
    """Redacted shapes of the lines no reader understood, and how often each came."""
    lines: int = 0
    bytes: int = 0
    files: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "units": {"_ms": "milliseconds", "tokens": "count", "bytes": "bytes"},
            "lives": [life.to_dict() for life in self.lives],
            "unknown": dict(self.unknown),
            "lines": self.lines,
            "bytes": self.bytes,
            "files": list(self.files),
            "unreadable": list(self.unreadable),
        }


def shown_name(name: str) -> str:
    """A file's name without what a terminal would obey or an encoding refuse."""
    return "".join(c if c.isprintable() else "?" for c in name)


def safe_name(text: str) -> str | None:
    """`text` as a phase name when it is harmless, else None.

    Phase names are parsed, not listed, so they pass a character allow-list, a limit of
    32 characters, and must not look like a path or a key: at most two slashes, no long
    word, few digits.
    """
    name = " ".join(text.split())
    if not name or len(name) > NAME_LIMIT or not _NAME.fullmatch(name):
        return None
    if name.count("/") > 2 or sum(c.isdigit() for c in name) > 3:
        return None
    if any(len(word) > WORD_LIMIT for word in _WORDS.findall(name)):
        return None
    return name
