"""One Strata engine life while it is read: start-up facts, capabilities, its requests."""

from __future__ import annotations

import copy
from functools import lru_cache

from slotwise.explain.readers import strata_grammar as g
from slotwise.explain.readers import strata_prefill as prefill
from slotwise.explain.readers.strata_draft import Draft
from slotwise.explain.readers.strata_ordinary import Ordinary
from slotwise.explain.readers.strata_prefill import Counters
from slotwise.explain.readers.strata_request import (
    NO_CLIENT,
    NO_DECODE,
    NO_PREFILL,
    NO_TRACE,
    LifeView,
    build,
    measured,
)
from slotwise.explain.record import Life, Request, Value
from slotwise.explain.requests import Requests

GIB = 1 << 30
_same_view = lru_cache(maxsize=64)(LifeView)
"""Equal views are one object, kept once."""

_SERVE_KNOWN = (
    "KV streaming: ", "stage ", "CUDA", "lookup chain: ", "mtp top2: ", "exchange rotation: ",
    "asynchronous adaptive tier: ", "STATE_HASH ", "DRAFT_PREFILL ", "SNAPSHOT_VERIFY ", "pin=",
    "message boundary checkpoint: ", "VRAM ", "expert profile saved ", "swap ", "resident RAM: ",
    "concurrent driver on ", "prompt chunk ", "stall report ", "accepted-row adaptive ",
    "serial cache barrier ", "that is little room ",
)  # fmt: skip


class LifeState:
    """Collects one life. `build` may be called at any time.

    What is known of a request is kept, and made into a `Request` when somebody looks at it.
    """

    def __init__(self, file: str, first_line: int) -> None:
        self.file, self.first_line = file, first_line
        self.version = ""
        self.up = self.headed = self.host_clock = False
        self.facts: dict[str, Value] = {}
        self.requests = Requests(_request)
        self.notes: list[str] = []
        self.counters = Counters()
        self.trace_lines = self.trace_switch = False
        self.lent_lines = self.refilled_lines = False
        self.prefill_lines = self.host_lines = self.chunk_lines = False
        self.decode_lines = self.batch_lines = self.done_lines = False
        self.a_of_b = self.pcie_tail = self.own_buffers = self.split = False

    def copy(self) -> LifeState:
        """A copy to which requests can be added without touching this one."""
        other = copy.copy(self)
        other.requests, other.notes = self.requests.copy(), list(self.notes)
        other.counters = self.counters.copy()
        return other

    @property
    def has_requests(self) -> bool:
        return bool(self.requests)

    @property
    def seen_anything(self) -> bool:
        return bool(self.requests or self.facts or self.version or self.headed or self.notes)

    def counter_fell(self, draft: Draft) -> bool:
        """Whether `host staging` of an unsplit request is below what it was before."""
        if not draft.runs:
            return False
        values = [run.staging for run in draft.runs if run.kind == "run" and run.staging]
        known = [run.staging for run in draft.runs if run.staging is not None]
        if len(values) != 1 or len(known) != 1 or self.split:
            return False
        return self.counters.fell("host staging/run", values[0])

    def tier(self, name: str, value: float) -> Value:
        return self.counters.delta(name, [value])

    def add(self, draft: Draft) -> None:
        self._note_kinds(draft)
        view, before = self._view(), {}
        if draft.runs:
            before = dict(self.counters.last)
            placed = prefill.place(draft.runs, draft.batched_tokens, split=self.split)
            self.counters.skip(placed)
            self.split |= "stage 0" in placed.lanes
        self.requests.append((draft, view, before))

    def add_ordinary(self, request: Ordinary) -> None:
        self.first_line = self.first_line or request.first
        self.trace_lines = True
        self.lent_lines |= b" lent " in request.head
        self.refilled_lines |= b" refilled " in request.head
        self.decode_lines |= b" decode timing" in request.tail
        self.note_tail(request)
        self.requests.append((request, self._view(), {}))

    def note_tail(self, request: Ordinary) -> None:
        """What a line tells of the whole life as soon as it is read."""
        self.pcie_tail |= b" over PCIe" in request.tail

    def _view(self) -> LifeView:
        return _same_view(
            self.lent_lines or self._new_enough(),
            self.own_buffers,
            self.prefill_lines,
            self.decode_lines,
            self.host_clock,
            self.split,
        )

    def _new_enough(self) -> bool:
        """Loans are printed from 0.1.32 on, but not by the SYCL forks."""
        numbers = tuple(int(n) for n in self.version.partition("-")[0].split(".") if n)
        return numbers >= (0, 1, 32) and "sycl" not in self.version

    def _note_kinds(self, draft: Draft) -> None:
        self.first_line = self.first_line or draft.first
        self.trace_lines |= draft.traced
        self.lent_lines |= "lend" in draft.parts
        self.refilled_lines |= "refill" in draft.parts
        self.decode_lines |= draft.decode is not None
        self.done_lines |= draft.done is not None
        if draft.runs:
            self.prefill_lines = True
            self.host_lines |= any(run.has_host for run in draft.runs)
            self.chunk_lines |= any(run.kind == "chunk" for run in draft.runs)

    # --- start-up lines

    def start_header(self, arguments: str) -> None:
        self.headed = True
        for match in g.OPTION.finditer(arguments[:8192]):
            self.facts[f"--{match[1]}"] = measured(float(match[2]))

    def generate_line(self, text: str, line_no: int) -> bool:
        """A line after ``strata generate: ``. They all belong to the start-up."""
        self.first_line = self.first_line or line_no
        if match := g.ENGINE_UP.match(text):
            self.version, self.up = match[1], True
            self.host_clock |= "vulkan" in match[1]
        elif match := g.CACHE_SLOTS.match(text):
            slots, size = int(match[1]), float(match[2]) * GIB
            self.facts["slots"] = measured(slots)
            if slots > 0:
                why = "VRAM of the expert cache / its slots; printed to 0.01 GiB"
                self.facts["slot bytes"] = Value.derived(round(size / slots), why)
        elif text.startswith("GPU 0: ") and "vulkan" in text.lower():
            self.host_clock = True
        return True

    def serve_line(self, text: str) -> bool:
        """A line after ``strata serve: `` that belongs to no request."""
        if match := g.CHUNK_AUTO.match(text):
            self.facts["chunk tokens"] = measured(int(match[1]))
        elif match := g.BORROWS.match(text):
            self.facts["slots the prompt path borrows"] = measured(int(match[1]))
            if int(match[1]) > 0:
                why = "GiB the prompt path borrows / slots; printed to 0.01 GiB"
                size = round(float(match[2]) * GIB / int(match[1]))
                self.facts.setdefault("slot bytes", Value.derived(size, why))
        elif text.startswith(g.OWN_BUFFERS):
            self.own_buffers = True
        else:
            return text.startswith(_SERVE_KNOWN) or " MiB of VRAM free with" in text
        return True

    # --- result

    def capabilities(self) -> dict[str, bool]:
        return {
            "trace": self.trace_lines or self.trace_switch,
            "lent lines": self.lent_lines,
            "refilled lines": self.refilled_lines,
            "prefill timing": self.prefill_lines,
            "prefill host line": self.host_lines,
            "prefill chunk lines": self.chunk_lines,
            "decode timing": self.decode_lines,
            "cancelled reads (A of B)": self.a_of_b,
            "PCIe reads in the hit rate": self.pcie_tail,
            "batch": self.batch_lines,
            "protocol lines": self.done_lines,
            "layer split": self.split,
            "GPU timeline by a host clock": self.host_clock,
        }

    def build(self) -> Life:
        missing = [
            text
            for text, there in (
                (NO_TRACE, self.trace_lines or self.trace_switch),
                (NO_PREFILL, self.prefill_lines),
                (NO_DECODE, self.decode_lines),
                (NO_CLIENT, False),
            )
            if not there
        ]
        return Life(
            dialect="strata",
            version=self.version,
            file=self.file,
            first_line=self.first_line,
            capabilities=self.capabilities(),
            facts=dict(self.facts),
            requests=self.requests.copy(),
            notes=tuple(self.notes),
            cannot_tell=tuple(missing),
        )


def _request(index: int, kept: tuple[Draft | Ordinary, LifeView, dict[str, float]]) -> Request:
    draft, view, before = kept
    if isinstance(draft, Ordinary):
        draft = draft.read()
    return build(draft, view, index=index, counters=Counters(before))
