"""What the engaged counters of a whole arm prove: in every sample, or once.

A lever that finds nothing to do in one sample (a refill with nothing left to read) is no fault of
that sample; an arm in which that was always so was never switched on, and none of it counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slotwise.ladder import counters
from slotwise.ladder.arms import Arm, Engaged


@dataclass(frozen=True, kw_only=True)
class Proof:
    """How often one counter of an arm said that the lever was engaged, by size in tokens."""

    counter: str
    expected: str
    every_sample: bool
    counted: bool
    """A number that moved, not only a setting."""
    held: Mapping[int, int]
    of: Mapping[int, int]

    @property
    def never(self) -> bool:
        return bool(self.of) and not any(self.held.values())

    @property
    def never_at(self) -> list[int]:
        return [size for size, n in self.held.items() if not n]

    @property
    def words(self) -> str:
        held, of = sum(self.held.values()), sum(self.of.values())
        return f"{self.counter} is {self.expected} in {held} of {of} samples"


def unproven(arm: Arm, values: Sequence[Any], *, of_trace: bool) -> str:
    """Why a sample does not count by the counters that every sample has to satisfy."""
    for engaged, value in zip(arm.engaged, values, strict=True):
        if engaged.every_sample and (engaged.source == "trace") == of_trace:
            why = counters.verdict(engaged, value)
            if why:
                return why
    return ""


def proofs(arm: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> Iterator[Proof]:
    """One per counter of an arm of a record, over its warm samples that can be used."""
    usable = [s for s in samples if s["arm"] == arm["name"] and s["status"] == "ok"]
    warm = [s for s in usable if not s["cold"]]
    sizes = sorted({s["target_tokens"] for s in warm})
    for position, data in enumerate(arm["engaged"]):
        engaged = Engaged.from_dict(data)
        own = {n: [s["engaged"][position] for s in warm if s["target_tokens"] == n] for n in sizes}
        yield Proof(
            counter=engaged.counter, expected=engaged.expected, every_sample=engaged.every_sample,
            counted=not isinstance(engaged.equals, str | bool),
            held={n: sum(map(engaged.holds, values)) for n, values in own.items()},
            of={n: len(values) for n, values in own.items()},
        )  # fmt: skip


def judge_arms(data: Mapping[str, Any]) -> None:
    """Refuses all samples of an arm whose lever never engaged."""
    for arm in data["arms"]:
        for proof in list(proofs(arm, data["samples"])):
            if proof.never:
                _refuse(arm["name"], proof, data["samples"])


def _refuse(name: str, proof: Proof, samples: Sequence[dict[str, Any]]) -> None:
    why = (
        f"the arm's lever never engaged: {proof.counter} is {proof.expected} in none of its "
        f"{sum(proof.of.values())} samples"
    )
    for sample in samples:
        if sample["arm"] == name and sample["status"] == "ok":
            sample["status"], sample["why"] = "refused", why
