"""Opens a model, one GGUF file or all shards of a split one, and says everything wrong at once.

Only headers are read. How shards belong together is in shard_set.py; what an architecture needs is
not known here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gguf.constants import Keys

from slotwise.errors import Finding, Refused
from slotwise.weights.header import Shard, TensorInfo, read_header, refusal, shown
from slotwise.weights.shard_set import Member, set_findings, sibling_files
from slotwise.weights.tensor_checks import tensor_findings

__all__ = ["ModelFile", "Shard", "TensorInfo", "inspect", "open_model"]


@dataclass(frozen=True, eq=False)
class ModelFile:
    """A model's headers. `metadata` is the first shard's, `tensors` all shards' by name."""

    shards: tuple[Shard, ...]
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @property
    def path(self) -> Path:
        return self.shards[0].path

    @property
    def arch(self) -> str:
        """`general.architecture`; "" only in a model that `inspect` has refused."""
        value = self.metadata.get(Keys.General.ARCHITECTURE)
        return value if isinstance(value, str) else ""

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of every shard's size and header: the same under another name. Tensor data
        is not read."""
        parts = [f"{s.size}\0{s.header_sha256}\n" for s in self.shards]
        return hashlib.sha256("".join(parts).encode()).hexdigest()


def open_model(path: Path) -> ModelFile:
    """The model that `path`, any one of its shards, belongs to. Refused holds all findings."""
    model, findings = inspect(path)
    if model is None or any(f.level == "refusal" for f in findings):
        raise Refused(findings)
    return model


def inspect(path: Path) -> tuple[ModelFile | None, list[Finding]]:
    """What the headers say, and what is wrong with them; never raises on what the files hold.

    The model is None when its first shard cannot be read. With refusals among the findings it may
    be incomplete, and serves only to find further problems.
    """
    members: list[Member] = []
    findings: list[Finding] = []
    for file in sibling_files(path):
        shard = None
        try:
            shard = read_header(file)
            findings += tensor_findings(shard)
        except Refused as refused:
            findings += refused.findings
        members.append(Member(file, shard))
    findings += set_findings(members)
    shards = [m.shard for m in sorted(members, key=lambda m: m.number) if m.shard]
    if not shards or min(m.number for m in members if m.shard) != 1:
        return None, findings
    model = ModelFile(tuple(shards), shards[0].metadata, {})
    for shard in shards:
        findings += _add(shard, model.tensors)
    if not model.arch:
        found = f"has no usable key {Keys.General.ARCHITECTURE}"
        findings.append(refusal(model.path, "key-missing", found, "the architecture's name"))
    return model, findings


def _add(shard: Shard, tensors: dict[str, TensorInfo]) -> Iterable[Finding]:
    """Adds the shard's tensors; one finding if an earlier shard has some of them already."""
    shared = [t.name for t in shard.tensors if t.name in tensors]
    shared = [name for name in shared if tensors[name].path != shard.path]
    if shared:
        first = tensors[shared[0]]
        found = f"has {len(shared):,} tensors that {first.path.name} has too, first "
        found += shown(first.name)
        yield refusal(shard.path, "duplicate-tensor", found, "each tensor in one shard")
    for tensor in shard.tensors:
        tensors.setdefault(tensor.name, tensor)
