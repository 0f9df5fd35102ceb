"""What preflight found, as data, as JSON and as lines of text. Checks nothing itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gguf.constants import Keys

from slotwise.errors import Finding, Refused
from slotwise.weights.catalog import dense_tensors
from slotwise.weights.ggml_types import type_name
from slotwise.weights.layout import ExpertLayout
from slotwise.weights.shards import ModelFile

SCHEMA = "slotwise.check/v1"


@dataclass(frozen=True)
class MemoryNeed:
    """The smallest memory budget that works, in bytes, and what it is made of."""

    nbytes: int
    explanation: str


@dataclass(frozen=True, kw_only=True)
class PreflightReport:
    """The findings, the facts about the model, and the smallest memory that works if known."""

    path: Path
    findings: tuple[Finding, ...]
    facts: dict[str, Any] = field(default_factory=dict)
    """`model_facts`, or empty when the model could not be opened."""
    memory: int | None = None
    """The budget asked about, bytes."""
    need: MemoryNeed | None = None
    """None when it could not be computed."""

    @property
    def refused(self) -> bool:
        return any(f.level == "refusal" for f in self.findings)

    @property
    def exit_code(self) -> int:
        return Refused.exit_code if self.refused else 0

    def raise_if_refused(self) -> None:
        if self.refused:
            raise Refused(self.findings)

    def to_dict(self) -> dict[str, Any]:
        """The document of `slotwise check --json`; sizes in bytes, null where not known."""
        return {
            "schema": SCHEMA,
            "model": str(self.path),
            "refused": self.refused,
            "findings": [asdict(f) for f in self.findings],
            "facts": self.facts,
            "memory_bytes": self.memory,
            "memory_needed_bytes": self.need.nbytes if self.need else None,
            "memory_explanation": self.need.explanation if self.need else None,
        }


def model_facts(model: ModelFile, layout: ExpertLayout | None) -> dict[str, Any]:
    """What the model is, in plain JSON types; sizes in bytes."""
    types: defaultdict[str, dict[str, int]] = defaultdict(lambda: {"tensors": 0, "bytes": 0})
    for tensor in model.tensors.values():
        types[type_name(tensor.type)]["tensors"] += 1
        types[type_name(tensor.type)]["bytes"] += tensor.nbytes
    return {
        "architecture": model.arch,
        "name": _printable(model.metadata.get(Keys.General.NAME)),
        "files": [{"name": s.path.name, "bytes": s.size} for s in model.shards],
        "bytes": sum(shard.size for shard in model.shards),
        "tensors": len(model.tensors),
        "types": dict(sorted(types.items(), key=lambda item: -item[1]["bytes"])),
        "dense_bytes": sum(tensor.nbytes for tensor in dense_tensors(model)),
        "experts": _expert_facts(layout) if layout else None,
    }


def _expert_facts(layout: ExpertLayout) -> dict[str, Any]:
    return {
        "layers": layout.n_moe_layers,
        "per_layer": layout.n_experts,
        "used": layout.n_used,
        "total": layout.n_total,
        "slot_bytes": [slot.slot_bytes for slot in layout.classes],
        "bytes": layout.total_bytes,
    }


def _printable(value: object) -> str:
    text = value if isinstance(value, str) else ""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[:120])


def report_lines(report: PreflightReport) -> Iterator[str]:
    """The report for a terminal, one line each, without markup."""
    if report.facts:
        yield from _fact_lines(report.facts)
    if need := report.need:
        budget = f", given {shown_size(report.memory)}" if report.memory is not None else ""
        yield f"memory: needs at least {shown_size(need.nbytes)}{budget} ({need.explanation})"
    for finding in sorted(report.findings, key=lambda f: f.level != "refusal"):
        yield f"{finding.level} [{finding.code}] {finding.where}"
        yield f"    found: {finding.found}"
        yield f"    expected: {finding.expected}"
        yield f"    to do: {finding.next_step}"
    refusals = sum(f.level == "refusal" for f in report.findings)
    warnings = len(report.findings) - refusals
    verdict = "would refuse" if refusals else "would run"
    yield f"{report.path.name}: {verdict}; refusals: {refusals}, warnings: {warnings}"


def _fact_lines(facts: dict[str, Any]) -> Iterator[str]:
    name = f" {facts['name']!r}" if facts["name"] else ""
    files = f"{len(facts['files'])} files" if len(facts["files"]) > 1 else "1 file"
    yield f"model: {_printable(facts['architecture'])}{name}, {files}, {shown_size(facts['bytes'])}"
    types = ", ".join(f"{kind} {shown_size(use['bytes'])}" for kind, use in facts["types"].items())
    yield f"tensors: {facts['tensors']:,} ({types})"
    if experts := facts["experts"]:
        shape = f"{experts['layers']} layers x {experts['per_layer']}, top-{experts['used']}"
        slots = " or ".join(shown_size(nbytes) for nbytes in experts["slot_bytes"])
        whole = f"{experts['total']:,} expert slots of {slots}, {shown_size(experts['bytes'])}"
        yield f"experts: {shape}; all of them: {whole}"
    yield f"dense weights: {shown_size(facts['dense_bytes'])}"


def shown_size(nbytes: int) -> str:
    """Bytes in the largest binary unit that is not below 1."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} B"
