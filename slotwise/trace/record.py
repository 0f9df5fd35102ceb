"""Everything one request leaves behind: the ledger to its first token, and what came after.

A `RequestRecord` holds plain numbers with their units in their names. How each was obtained, and
why one is null, is declared on its field and written as a table at the end of the record
(`codec.Record`). Settings are what was asked for, not results, and carry no `how`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from slotwise.trace.codec import Record, derived, measured, optional
from slotwise.trace.lanes import LaneTotal
from slotwise.trace.ledger import LedgerRecord, Status

FIRST_TOKENS = 64
"""The stretch of an answer over which refill policies are compared, its first token included."""

_NOT_REACHED = "no response reached this edge (run in this process, or ended before)"
RefillEnd = Literal["none", "running", "full", "cut_short"]
LookAheadMode = Literal["none", "auto", "on", "off"]
"""`none`: the model has no experts."""

_NOT_COUNTED = "nobody counted this"
_NO_FORECAST = "no earlier request of this engine to learn the rates from"


@dataclass(frozen=True, kw_only=True)
class Edges:
    """The four clock edges of a response, in ns after the ledger's start."""

    first_byte_ns: int | None = field(default=None, metadata=measured(null=_NOT_REACHED))
    """The first byte of the response, headers included."""
    first_event_ns: int | None = field(default=None, metadata=measured(null=_NOT_REACHED))
    first_token_ns: int | None = field(default=None, metadata=measured(null=_NOT_REACHED))
    """The first event with any token, content or reasoning: the end of the ledger."""
    first_content_ns: int | None = field(default=None, metadata=measured(null=_NOT_REACHED))


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Token counts. The last prompt token is read by the first window, not by the prompt read."""

    prompt: int = field(metadata=measured())
    reused: int = field(metadata=measured())
    """Prompt tokens whose state was there already."""
    read_planned: int = field(init=False, metadata=derived())
    """prompt - reused - 1, or 0 for a prompt that was refused."""
    read: int = field(metadata=measured())
    """Tokens the prompt read really finished; less than planned if it was cancelled or failed."""
    generated: int = field(metadata=measured())

    def __post_init__(self) -> None:
        object.__setattr__(self, "read_planned", max(0, self.prompt - self.reused - 1))


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What was known of the prompt, and what keeping conversations cost this request."""

    mode: Literal["off", "shadow", "on"]
    """`off`, `on`, or `shadow`: does the work of `on` and throws away what it finds."""
    engaged: int = field(default=0, metadata=measured())
    """Lookups made. 0 where the mode is `off`: the counter that proves which arm this was."""
    matched: int = field(default=0, metadata=measured())
    """Prompt tokens whose rows were found, whether or not they were used."""
    live: int = field(default=0, metadata=measured())
    """Of them in the state; `parked` counts from the start too."""
    parked: int = field(default=0, metadata=measured())
    reused: int = field(default=0, metadata=measured())
    restored_bytes: int = field(default=0, metadata=measured())
    restored_disk_bytes: int = field(default=0, metadata=measured())
    checkpoint_tokens: int = field(default=0, metadata=measured())
    """Parked while this request waited, because it would have written over them."""
    checkpoint_bytes: int = field(default=0, metadata=measured())
    idle_checkpoint_tokens: int = field(default=0, metadata=measured())
    """Parked between the request before this one and this one, while nobody waited."""
    idle_checkpoint_bytes: int = field(default=0, metadata=measured())
    idle_ns: int = field(default=0, metadata=measured())


@dataclass(frozen=True, kw_only=True)
class Loan:
    """Expert slots lent to the prompt read, and what that cost the read."""

    slots: int = field(metadata=measured())
    bytes: int = field(metadata=measured())
    read_misses: int | None = field(default=None, metadata=measured(null=_NOT_COUNTED))
    """Misses of the read on experts that were resident until the loan took their slots."""
    decode_misses: int | None = field(default=None, metadata=measured(null=_NOT_COUNTED))
    """Such misses after the read: what the refill did not bring back in time."""
    forgotten: int | None = field(default=None, metadata=measured(null=_NOT_COUNTED))
    """Experts that lost their slot; the others of the lent slots were moved, or there was none."""


@dataclass(frozen=True, kw_only=True)
class Refill:
    """Lent slots filled again, as far as it had come when the request ended; a trace says at the
    next loan what came of it (`events.RefillTotal`). `slots` proves that the policy acted."""

    policy: str
    slots: int = field(metadata=measured())
    bytes: int = field(metadata=measured())
    lane_ns: int | None = field(default=None, metadata=measured(null=_NOT_COUNTED))
    """Sum of the durations of its reads, beside the engine."""
    waited_ns: int = field(metadata=measured())
    """Time the request stood still for it before its first token."""
    saved_misses: int | None = field(default=None, metadata=measured(null=_NOT_COUNTED))
    """Experts the refill had brought back that decode then used."""
    end: RefillEnd = "none"
    """`none` was begun, `running` still at the end of the request, `full`, or `cut_short`."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The time to the first token as foretold before the read, from earlier requests' rates."""

    time_to_first_token_ns: int | None = field(default=None, metadata=derived(null=_NO_FORECAST))
    read_compute_ns: int | None = field(default=None, metadata=derived(null=_NO_FORECAST))
    read_wait_ns: int | None = field(default=None, metadata=derived(null=_NO_FORECAST))
    """Standing still for experts, after what the compute hides."""
    read_bytes: int | None = field(default=None, metadata=derived(null=_NO_FORECAST))
    """Experts the read has to fetch from the slow tier."""
    error_ns: int | None = field(
        default=None, metadata=derived(null="no forecast, or no first token to check it against")
    )
    """What it took, minus what was foretold."""


@dataclass(frozen=True, kw_only=True)
class DecodeRecord:
    """What followed the first token's first byte. Times start there."""

    windows: int = field(metadata=measured())
    tokens: int = field(metadata=measured())
    """Tokens after the first one."""
    wall_ns: int = field(metadata=measured())
    """From the first token's first byte to the end of the last window."""
    windows_ns: int = field(metadata=measured())
    """Inside windows; the rest of `wall_ns` lay between them (the reader of the tokens)."""
    first_64_tokens_ns: int | None = field(
        default=None,
        metadata=measured(null=f"the answer has fewer than {FIRST_TOKENS} tokens"),
    )
    """From the first token's first byte until the answer had 64 tokens."""
    expert_wait_ns: int = field(metadata=measured())
    """Inside windows, waiting for experts that were not resident."""


@dataclass(frozen=True, kw_only=True)
class ExpertCounts:
    """Traffic between the pool and the store in one stage of a request."""

    hits: int | None = field(default=None, metadata=measured(null=_NOT_COUNTED))
    """Experts asked for and resident, counted once per layer and chunk or window."""
    misses: int | None = field(default=None, metadata=measured(null=_NOT_COUNTED))
    bytes: int | None = field(default=None, metadata=measured(null=_NOT_COUNTED))
    """Read from the store."""
    mirror_hits: int | None = field(default=None, metadata=measured(null=_NOT_COUNTED))
    """Experts that came out of the mirror in host memory instead of the slow tier."""
    wait_ns: int | None = field(default=None, metadata=measured(null=_NOT_COUNTED))
    """Time the request stood still for experts."""


@dataclass(frozen=True, kw_only=True)
class LookAhead:
    """Experts read because the next layer would probably want them, in decode or in the prompt
    read. Those that were begun are used or wasted, but for a read that failed."""

    windows: int = field(metadata=measured())
    """Windows, or layers of the prompt read, that looked ahead: it was engaged."""
    predicted: int = field(metadata=measured())
    """Absent experts that were named for the next layer."""
    called_off: int = field(metadata=measured())
    """Of those, what no lane had begun when that layer's router had chosen."""
    used: int = field(metadata=measured())
    late: int = field(metadata=measured())
    """Of those used, what the request had to wait for still. They count as misses."""
    wasted: int = field(metadata=measured())
    bytes: int = field(metadata=measured())
    """Read from the store; part of `decode_experts.bytes` or `prefill_experts.bytes`."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings the request ran with, with automatic values resolved."""

    memory_bytes: int | None = None
    threads: int | None = None
    context_tokens: int | None = None
    chunk_tokens: int | None = None
    expert_slots: int | None = None
    io_lanes: int | None = None
    kv_type: str | None = None
    refill: str | None = None
    policy: str | None = None
    lookahead: LookAheadMode = "none"
    profile: str | None = None
    """Name of the profile's file, without its folder."""
    pack: str | None = None
    mirror_bytes: int | None = None
    """Host memory for copies of experts; null without a mirror."""


@dataclass(frozen=True, kw_only=True)
class RequestRecord(Record):
    """One request, from its last byte in to its last token out."""

    SCHEMA: ClassVar[str] = "slotwise.request/v1"

    request: str
    status: Status
    """Of the whole request; the ledger has its own, up to the first token."""
    ledger: LedgerRecord
    edges: Edges = Edges()
    tokens: Tokens
    conversation: Conversation | None = field(
        default=None, metadata=optional("the request ended before its conversation was looked up")
    )
    loan: Loan | None = field(default=None, metadata=optional("no expert slots were lent"))
    refill: Refill | None = field(default=None, metadata=optional("there was nothing to refill"))
    forecast: Forecast = Forecast()
    decode: DecodeRecord | None = field(
        default=None, metadata=optional("nothing was decoded after the first token")
    )
    prefill_experts: ExpertCounts = ExpertCounts()
    refill_experts: ExpertCounts = ExpertCounts()
    decode_experts: ExpertCounts = ExpertCounts()
    lookahead: LookAhead | None = field(default=None, metadata=optional("no window looked ahead"))
    read_ahead: LookAhead | None = field(
        default=None, metadata=optional("no layer of the prompt read looked ahead")
    )
    lanes: Mapping[str, LaneTotal] = field(default_factory=dict)
    """Overlapped work between the ledger's start and its end; never part of its sum."""
    lanes_complete: bool = True
    settings: Settings = Settings()

    def to_dict(self) -> dict[str, Any]:
        data = super().to_dict()
        if not self.lanes_complete:
            lane_numbers = [path for path in data["how"] if path.startswith("lanes.")]
            data["how"].update(dict.fromkeys(lane_numbers, "bounded"))
        return data

    @property
    def time_to_first_token_ns(self) -> int | None:
        """Last byte in to first token's first byte out; None if it never got there."""
        return self.ledger.wall_ns if self.ledger.status == "done" else None


class DecodeTally:
    """Adds up the windows that follow a first token; the decode path's counterpart of a ledger."""

    def __init__(self, *, start_ns: int) -> None:
        """`start_ns` is the end of the ledger: `LedgerRecord.end_ns`."""
        self._start_ns = self._end_ns = start_ns
        self._windows = self._tokens = self._windows_ns = self._expert_wait_ns = 0
        self._first_64_ns: int | None = None

    def window(self, start_ns: int, end_ns: int, *, tokens: int, expert_wait_ns: int = 0) -> None:
        """Count one window that produced `tokens` tokens (accepted drafts included)."""
        self._windows += 1
        self._tokens += tokens
        self._windows_ns += end_ns - start_ns
        self._expert_wait_ns += expert_wait_ns
        self._end_ns = end_ns
        if self._first_64_ns is None and 1 + self._tokens >= FIRST_TOKENS:
            self._first_64_ns = end_ns - self._start_ns

    def record(self) -> DecodeRecord | None:
        """The totals so far; None if there was no window."""
        if not self._windows:
            return None
        return DecodeRecord(
            windows=self._windows,
            tokens=self._tokens,
            wall_ns=self._end_ns - self._start_ns,
            windows_ns=self._windows_ns,
            first_64_tokens_ns=self._first_64_ns,
            expert_wait_ns=self._expert_wait_ns,
        )
