"""A routing trace: which experts the router chose, window by window, to replay policies on.

Recorded only when asked for. It holds shapes and expert ids: no text, no token ids. Format
`slotwise.routing/v1`, JSON lines; the first says what the model looks like,

    {"schema": "slotwise.routing/v1", "model": {"name": ..., "digest": ...}, "experts": E,
     "used": k, "class_of": [slot class of each layer], "slot_bytes": [bytes of each class]}

then one line a step, layer by layer: a decode window lists experts as routed, a chunk of the
prompt lists them once, with the tokens each. A `resident` line says who was in the pool just then.

    {"resident": [[0, 4, ...], ... L rows]}
    {"stage": "read", "tokens": 512, "experts": [[0, 1, ...], ...], "counts": [[90, 7, ...], ...]}
    {"stage": "decode", "tokens": 1, "experts": [[3, 17, 4, 30], ...]}
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from slotwise.errors import Refused, SlotwiseError
from slotwise.weights.header import refusal, shown
from slotwise.weights.layout import ExpertLayout, SlotClass
from slotwise.weights.pack_journal import replace_file

SCHEMA = "slotwise.routing/v1"
MAX_BYTES = 1 << 30
MAX_LAYERS, MAX_EXPERTS = 1024, 8192
MAX_SLOT_BYTES = 1 << 40

Stage = Literal["read", "decode"]
Bools = NDArray[np.bool_]

_RECORD = "Record one with `slotwise run --routing FILE`."


@dataclass(frozen=True)
class Call:
    """One layer of one step. `counts` is None in a decode window, where an expert may repeat."""

    moe_index: int
    experts: NDArray[np.int32]
    counts: NDArray[np.int32] | None


@dataclass(frozen=True)
class Step:
    """A window or a chunk. A step that was cancelled has fewer layers than the model."""

    stage: Stage
    tokens: int
    calls: tuple[Call, ...]
    resident: Bools | None = None
    """[layers, experts]: who was in the pool when it began, where that was noted."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """What was recorded. `layout` knows sizes only: its classes have no projections."""

    layout: ExpertLayout
    steps: tuple[Step, ...] = field(repr=False)
    model_name: str = ""
    model_digest: str = ""

    def tokens(self, stage: Stage) -> int:
        """Tokens of all steps of a stage."""
        return sum(step.tokens for step in self.steps if step.stage == stage)

    def segments(self) -> Iterator[tuple[Bools | None, tuple[Step, ...]]]:
        """The steps, cut where it is known who was resident, each with that (or None)."""
        begin = 0
        for i in range(1, len(self.steps) + 1):
            if i == len(self.steps) or self.steps[i].resident is not None:
                yield self.steps[begin].resident, self.steps[begin:i]
                begin = i


class RoutingRecorder:
    """Notes what the router chooses, on the engine's thread; about 5 us a layer."""

    def __init__(self, layout: ExpertLayout) -> None:
        self._layout = layout
        self._steps: list[tuple[Stage, int, Bools | None]] = []
        self._step_calls = array("q")
        self._layers, self._lengths, self._counted = array("i"), array("i"), array("b")
        self._experts, self._counts = array("i"), array("i")
        self._last = layout.n_moe_layers
        self._stage: Stage | None = None
        self._resident: Bools | None = None

    def begin(self, stage: Stage, table: NDArray[np.int32]) -> None:
        """What is added next belongs to `stage`. The first time, and whenever the stage changes,
        notes who is resident by the pool's `table`."""
        if stage != self._stage:
            self._stage, self._resident, self._last = stage, table >= 0, self._layout.n_moe_layers

    def add(
        self, moe_index: int, experts: NDArray[np.int32], counts: NDArray[np.integer] | None
    ) -> None:
        """The router's choice for one layer. A step goes through the layers in ascending order."""
        if moe_index <= self._last and self._stage is not None:
            uses = len(experts) if counts is None else int(counts.sum())
            self._steps.append((self._stage, uses // self._layout.n_used, self._resident))
            self._step_calls.append(0)
            self._resident = None
        self._last = moe_index
        self._step_calls[-1] += 1
        self._layers.append(moe_index)
        self._lengths.append(len(experts))
        self._counted.append(counts is not None)
        self._experts.extend(experts.tolist())
        self._counts.extend([0] * len(experts) if counts is None else counts.tolist())

    def routing(self, *, model_name: str = "", model_digest: str = "") -> Routing:
        """What was noted so far."""
        calls = self._calls()
        steps = tuple(
            Step(stage, tokens, tuple(next(calls) for _ in range(n)), resident)
            for (stage, tokens, resident), n in zip(self._steps, self._step_calls, strict=True)
        )
        return Routing(
            layout=self._layout, steps=steps, model_name=model_name, model_digest=model_digest
        )

    def _calls(self) -> Iterator[Call]:
        experts, counts = np.array(self._experts, np.int32), np.array(self._counts, np.int32)
        at = 0
        for layer, n, counted in zip(self._layers, self._lengths, self._counted, strict=True):
            here = slice(at, at + n)
            yield Call(layer, experts[here], counts[here] if counted else None)
            at += n


def save_routing(path: Path, routing: Routing) -> None:
    """Writes the whole file or leaves the old one. Raises SlotwiseError when it cannot."""
    layout = routing.layout
    head = {
        "schema": SCHEMA,
        "model": {"name": routing.model_name, "digest": routing.model_digest},
        "experts": layout.n_experts,
        "used": layout.n_used,
        "class_of": list(layout.class_of),
        "slot_bytes": [c.slot_bytes for c in layout.classes],
    }
    lines = [head, *(line for step in routing.steps for line in _step_lines(step))]
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    try:
        replace_file(path, text)
    except OSError as error:
        raise SlotwiseError(
            f"{path} cannot be written: {error.strerror or error}",
            next_step="Check the folder, its permissions and the room on the disk.",
        ) from error


def _step_lines(step: Step) -> Iterator[dict[str, Any]]:
    if step.resident is not None:
        yield {"resident": [np.flatnonzero(row).tolist() for row in step.resident]}
    line: dict[str, Any] = {"stage": step.stage, "tokens": step.tokens}
    line["experts"] = [call.experts.tolist() for call in step.calls]
    if any(call.counts is not None for call in step.calls):
        line["counts"] = [call.counts.tolist() for call in step.calls if call.counts is not None]
    yield line


def load_routing(path: Path) -> Routing:
    """Raises Refused, naming the line and what was expected, for anything but a routing trace."""
    number = 1
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise _BadRoutingError(f"is over {MAX_BYTES:,} bytes", "a smaller trace")
        lines = raw.splitlines()
        head = _json(lines[0]) if lines else None
        layout, name, digest = _parse_head(head)
        steps: list[Step] = []
        resident = None
        for line in lines[1:]:
            number += 1
            found = _json(line)
            if isinstance(found, dict) and "resident" in found:
                resident = _parse_resident(found["resident"], layout)
            else:
                steps.append(_parse_step(found, layout, resident))
                resident = None
    except (OSError, ValueError) as error:
        finding = refusal(path, "routing", f"cannot be read: {error}", "a readable file", _RECORD)
        raise Refused([finding]) from None
    except _BadRoutingError as bad:
        where = f"{path}:{number}"
        raise Refused([refusal(where, "routing", bad.found, bad.expected, _RECORD)]) from None
    return Routing(layout=layout, steps=tuple(steps), model_name=name, model_digest=digest)


class _BadRoutingError(Exception):
    """Why a line is not part of a routing trace."""

    def __init__(self, found: str, expected: str) -> None:
        super().__init__(found)
        self.found, self.expected = found, expected


def _json(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        cause = str(error) or type(error).__name__
        raise _BadRoutingError(f"is not JSON ({cause[:120]})", "one JSON object a line") from None


def _parse_head(head: Any) -> tuple[ExpertLayout, str, str]:
    head = head if isinstance(head, dict) else {}
    if head.get("schema") != SCHEMA:
        raise _BadRoutingError(f"has the schema {shown(str(head.get('schema')))}", SCHEMA)
    class_of = _whole(head.get("class_of"), "class_of", most=MAX_LAYERS - 1)
    slot_bytes = _whole(head.get("slot_bytes"), "slot_bytes", most=MAX_SLOT_BYTES)
    experts, used = head.get("experts"), head.get("used")
    found = f"says {len(class_of)} layers, {shown(str(used))} of {shown(str(experts))} experts"
    expected = "at least one layer, and no more used than there are"
    if type(experts) is not int or type(used) is not int:
        raise _BadRoutingError(found, expected)
    if not 1 <= used <= experts <= MAX_EXPERTS or not 1 <= len(class_of) <= MAX_LAYERS:
        raise _BadRoutingError(found, expected)
    if set(class_of) != set(range(len(slot_bytes))) or min(slot_bytes) < 1:
        raise _BadRoutingError("has classes that do not fit together", "bytes for each slot class")
    model = head.get("model")
    model = model if isinstance(model, dict) else {}
    layout = ExpertLayout(
        n_experts=experts,
        n_used=used,
        layers=tuple(range(len(class_of))),
        classes=tuple(SlotClass(i, (), n) for i, n in enumerate(slot_bytes)),
        class_of=tuple(class_of),
    )
    return layout, str(model.get("name", "")), str(model.get("digest", ""))


def _parse_step(line: Any, layout: ExpertLayout, resident: Bools | None) -> Step:
    line = line if isinstance(line, dict) else {}
    stage, tokens = line.get("stage"), line.get("tokens")
    if stage not in ("read", "decode") or type(tokens) is not int or tokens < 1:
        found = f"has stage {shown(str(stage))} with {shown(str(tokens))} tokens"
        raise _BadRoutingError(found, "read or decode, and how many tokens")
    rows = _rows(line.get("experts"), "experts", most=layout.n_experts - 1)
    counts = None
    if "counts" in line:
        counts = _rows(line["counts"], "counts", most=tokens * layout.n_used)
        if [len(row) for row in counts] != [len(row) for row in rows]:
            raise _BadRoutingError("has counts that do not match its experts", "one for each")
        if any(len(np.unique(row)) != len(row) for row in rows):
            raise _BadRoutingError("names an expert twice", "each once, with its count")
    if not 1 <= len(rows) <= layout.n_moe_layers:
        found = f"has {len(rows)} layers of experts"
        raise _BadRoutingError(found, f"1 to {layout.n_moe_layers}")
    calls = (Call(i, row, counts[i] if counts else None) for i, row in enumerate(rows))
    return Step(stage, tokens, tuple(calls), resident)


def _parse_resident(rows: Any, layout: ExpertLayout) -> Bools:
    experts = _rows(rows, "resident", most=layout.n_experts - 1)
    if len(experts) != layout.n_moe_layers:
        raise _BadRoutingError(f"has {len(experts)} rows resident", f"{layout.n_moe_layers} rows")
    resident = np.zeros((layout.n_moe_layers, layout.n_experts), bool)
    for row, ids in zip(resident, experts, strict=True):
        row[ids] = True
    return resident


def _rows(found: Any, what: str, *, most: int) -> list[NDArray[np.int32]]:
    if not isinstance(found, list):
        raise _BadRoutingError(f"has no list of {what}", "a list for each layer")
    return [np.array(_whole(row, what, most=most), np.int32) for row in found]


def _whole(found: Any, what: str, *, most: int) -> list[int]:
    """A list of whole numbers from 0 to `most`."""
    if not isinstance(found, list) or any(type(n) is not int for n in found):
        raise _BadRoutingError(f"has {what} {shown(str(found)[:80])}", "a list of whole numbers")
    if found and not 0 <= min(found) <= max(found) <= most:
        raise _BadRoutingError(f"has {what} from {min(found)} to {max(found)}", f"0 to {most}")
    return found
