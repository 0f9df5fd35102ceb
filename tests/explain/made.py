"""Requests, lives and readings made by hand for the tests of what comes after the readers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slotwise.explain.record import Life, Phase, Reading, Request, Value

READS = (127, 457, 1609)
READ_MS = (252.0, 432.0, 1245.0)
REFILL_MS = (71.7, 82.6, 188.2)
SLOTS = (225, 259, 589)
BOOKKEEPING_MS = 56.0

MISSING = Value.missing("not printed")


def measured(name: str, ms: float, **more: Any) -> Phase:
    return Phase(name, Value.measured(ms), **more)


def request(
    index: int,
    *,
    prompt: int,
    phases: Sequence[Phase],
    prompt_ms: float | None = None,
    reused: int = 0,
    slots: int = 0,
    **more: Any,
) -> Request:
    known = sum(p.ms.value or 0.0 for p in phases if p.lane == "request")
    clock = known if prompt_ms is None else prompt_ms
    rest = Value.derived(clock - known, "a subtraction, not a phase")
    fields: dict[str, Any] = {
        "index": index,
        "lines": (index * 10 + 1, index * 10 + 9),
        "status": "done",
        "prompt": Value.measured(prompt),
        "reused": Value.measured(reused),
        "read_planned": Value.measured(prompt - reused),
        "read": Value.measured(prompt - reused),
        "generated": Value.measured(8),
        "prompt_ms": Value.measured(clock),
        "ttft_ms": MISSING,
        "decode_ms": MISSING,
        "phases": tuple(phases),
        "remainders": (Phase("prompt_ms - (lent + read + refilled)", rest),),
        "slots_lent": Value.measured(slots),
        "slots_refilled": Value.measured(slots),
        "first_of_life": index == 0,
    }
    return Request(**(fields | more))


def slot_request(
    index: int, *, read: int, read_ms: float, refill_ms: float, slots: int, rest: float, **more: Any
) -> Request:
    phases = [
        measured("read (batched)", read_ms, tokens=read),
        measured("refill", refill_ms, slots=slots),
    ]
    clock = read_ms + refill_ms + rest
    return request(index, prompt=read + 1, phases=phases, prompt_ms=clock, slots=slots, **more)


def table_of_document_two() -> Life:
    """The three requests of the table this kit started from."""
    rows = zip(READS, READ_MS, REFILL_MS, SLOTS, strict=True)
    requests = [
        slot_request(i, read=t, read_ms=r, refill_ms=f, slots=s, rest=BOOKKEEPING_MS)
        for i, (t, r, f, s) in enumerate(rows)
    ]
    return life(requests)


def ladder(
    *,
    repeats: int = 6,
    rest: float = 56.0,
    refill: float = 0.32,
    noise: float = 1.0,
    first: int = 0,
) -> list[Request]:
    """Three sizes, repeated in turn; 100 ms + 0.7 ms/token, `refill` ms per slot, small noise."""
    wobble = (0.3, -0.8, 0.9, -0.2, 0.6, -0.7, 0.1, -0.4, 0.8, -0.6)
    requests: list[Request] = []
    for turn in range(repeats):
        for step, tokens in enumerate((200, 800, 2000)):
            i = len(requests)
            n = noise * wobble[(3 * turn + 5 * step) % len(wobble)]
            slots = 150 + tokens // 4
            requests.append(
                slot_request(
                    i, read=tokens, read_ms=100 + 0.7 * tokens + n,
                    refill_ms=slots * refill + n / 10, slots=slots, rest=rest + n / 3,
                )
            )  # fmt: skip
    return requests


def life(requests: Sequence[Request], **more: Any) -> Life:
    fields: dict[str, Any] = {
        "dialect": "strata", "version": "0.1.41", "file": "engine.log", "first_line": 1,
        "capabilities": {"lend lines": True}, "facts": {"slot bytes": Value.measured(1_900_000)},
        "requests": tuple(requests),
    }  # fmt: skip
    return Life(**(fields | more))


def awkward() -> Life:
    """A cancelled request of an old version: bounds, gaps, lanes, a shorter read than planned."""
    phases = (
        measured("lend", 2.0),
        measured("read (batched)", 600.0, tokens=2048, contains="the draft layer"),
        Phase("refill", Value.bounded(0.0, 200.0, "not timed"), slots=300),
        Phase("checkpoint", Value.missing("no line for it")),
        measured("GPU timeline", 400.0, lane="gpu timeline"),
        measured("gpu: qsa attn", 250.0, lane="gpu timeline", contains="idle gaps"),
        measured("gpu: gdn", 150.0, lane="gpu timeline"),
        measured("host: staging", 30.0, lane="host"),
        measured("host: setup", 0.1, lane="host"),
    )
    cut = request(
        0, prompt=3000, prompt_ms=900.0, phases=phases, status="cancelled",
        read=Value.measured(2048), ttft_ms=Value.bounded(900.0, None, "no first token"),
        warnings=("the read prints its plan",), cannot_tell=("draft time: STRATA_X was off",),
    )  # fmt: skip
    return life([cut], version="", cannot_tell=("queueing: not in this log",))


def reading(*lives: Life) -> Reading:
    return Reading(lives=lives, lines=100, bytes=4000, files=tuple(v.file for v in lives))
