"""Every reason not to start, at once: the answer of `slotwise check`, and what `run` asks first.

A list of independent checks over one model; none of them raises, and one check's refusal does not
hide another's. What only the rooms above know (architectures, profiles, the memory plan) comes in
as `Upstairs`, because imports point downwards. Nothing is loaded and no memory is reserved.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

from slotwise.errors import Finding, Refused, SlotwiseError
from slotwise.weights.header import REDOWNLOAD, refusal, shown
from slotwise.weights.layout import ExpertLayout, expert_layout
from slotwise.weights.pack_index import check_pack, default_pack_path
from slotwise.weights.preflight_report import (
    MemoryNeed,
    PreflightReport,
    model_facts,
    shown_size,
)
from slotwise.weights.shards import ModelFile, inspect
from slotwise.weights.vocabulary import read_vocabulary

_FEW = 8


class TensorNeed(Protocol):
    """One tensor an architecture reads; slotwise/models has the lists. `shape` in ggml order."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def optional(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class Upstairs:
    """What only the rooms above this one know; the caller hands it down."""

    architectures: Collection[str]
    requirements: Callable[[ModelFile], Iterable[TensorNeed]]
    """The tensors the model's architecture reads; Refused for keys that are missing or senseless.
    Called for known architectures only, with a `block_count` that the file can have."""
    check_profile: Callable[[Path, ExpertLayout, str], Iterable[Finding]]
    """For a profile's file, the layout and `ModelFile.digest`."""
    plan: Callable[..., MemoryNeed]
    """``plan(model, layout, context=, chunk=, kv_type=)``: the smallest memory budget."""


@dataclass(frozen=True)
class _Subject:
    """The model and what is asked about it; the layout only where the model has a sound one."""

    model: ModelFile
    upstairs: Upstairs
    memory: int | None
    profile: Path | None
    pack: Path | None
    deep: bool
    progress: Callable[[int, int], None] | None
    settings: dict[str, Any]
    layout: ExpertLayout | None = None


def run_preflight(
    path: Path,
    *,
    upstairs: Upstairs,
    memory: int | None = None,
    profile: Path | None = None,
    pack: Path | None = None,
    deep: bool = False,
    progress: Callable[[int, int], None] | None = None,
    context: int = 4096,
    chunk: int = 2048,
    kv_type: str = "f16",
) -> PreflightReport:
    """Every refusal and warning for the model that `path`, any one of its files, belongs to.

    `memory` is in bytes (None: none to check), `pack` a pack's folder (None: the usual place);
    `deep` reads the whole pack, with `progress` (bytes done, of all). Never raises on contents.
    """
    model, findings = inspect(path)
    if model is None:
        return PreflightReport(path=path, findings=tuple(findings), memory=memory)
    settings = {"context": context, "chunk": chunk, "kv_type": kv_type}
    subject = _Subject(model, upstairs, memory, profile, pack, deep, progress, settings)
    whole = not _refused(findings)
    findings += _run(_architecture, subject)
    if whole:
        findings += _run(_requirements, subject)
        layout, more = _layout(model)
        findings += more
        subject = replace(subject, layout=layout)
    need, more = _plan(subject) if not _refused(findings) else (None, [])
    for check in (_tokenizer, _context, _profile, _pack):
        findings += _run(check, subject)
    return PreflightReport(
        path=path,
        findings=(*findings, *more),
        facts=model_facts(model, subject.layout),
        memory=memory,
        need=need,
    )


def _refused(findings: Iterable[Finding]) -> bool:
    return any(f.level == "refusal" for f in findings)


def _run(check: Callable[[_Subject], Iterable[Finding]], subject: _Subject) -> list[Finding]:
    try:
        return list(check(subject))
    except Exception as error:
        return _raised(error, subject.model.path, check.__name__.strip("_"))


def _raised(error: Exception, where: Path, what: str) -> list[Finding]:
    """An exception out of a check as findings; metadata can be wrong in ways nobody thought of."""
    if isinstance(error, Refused):
        return list(error.findings)
    code, found = f"{what}-failed", f"{type(error).__name__}: {error}"
    step = f"{REDOWNLOAD} If other programs read it, report this as a bug."
    if isinstance(error, SlotwiseError):
        found, step = str(error), error.next_step
    return [refusal(where, code, found, f"a file that passes the check of its {what}", step)]


def _architecture(subject: _Subject) -> Iterator[Finding]:
    arch, known = subject.model.arch, subject.upstairs.architectures
    if arch and arch not in known:
        found = f"has the architecture {shown(arch)}, which is not supported"
        step = "Use a model of a supported architecture."
        yield refusal(subject.model.path, "architecture", found, f"one of {', '.join(known)}", step)


def _requirements(subject: _Subject) -> Iterator[Finding]:
    model = subject.model
    if model.arch not in subject.upstairs.architectures:
        return
    layers = model.metadata.get(f"{model.arch}.block_count")
    if type(layers) is int and layers > len(model.tensors):
        found = f"has {model.arch}.block_count = {layers:,} and {len(model.tensors):,} tensors"
        yield refusal(model.path, "block-count", found, "a tensor for each layer at least")
        return
    needs = list(subject.upstairs.requirements(model))
    missing = [n.name for n in needs if n.name not in model.tensors and not n.optional]
    if missing:
        found = f"lacks {len(missing):,} tensors: {', '.join(missing[:_FEW])}"
        found += ", ..." if len(missing) > _FEW else ""
        yield refusal(model.path, "tensor-missing", found, f"all tensors of {model.arch}")
    present = [(model.tensors[n.name], n.shape) for n in needs if n.name in model.tensors]
    crooked = [(tensor, shape) for tensor, shape in present if not _same(tensor.shape, shape)]
    if crooked:
        tensor, shape = crooked[0]
        found = f"has the shape {list(tensor.shape)}"
        found += f" (and {len(crooked) - 1:,} more tensors)" if len(crooked) > 1 else ""
        where = f"{tensor.path}: tensor {tensor.name}"
        yield refusal(where, "tensor-shape", found, f"{list(shape)} by the model's keys")


def _same(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Equal but for dimensions of 1 at the end, which writers add or leave away as they like."""
    return all(a == b for a, b in zip_longest(shape, other, fillvalue=1))


def _layout(model: ModelFile) -> tuple[ExpertLayout | None, list[Finding]]:
    try:
        return expert_layout(model), []
    except Refused as refused:
        return None, list(refused.findings)


def _tokenizer(subject: _Subject) -> Iterator[Finding]:
    for finding in read_vocabulary(subject.model.metadata)[1]:
        yield replace(finding, where=f"{subject.model.path}: {finding.where}")


def _context(subject: _Subject) -> Iterator[Finding]:
    context = subject.settings["context"]
    trained = subject.model.metadata.get(f"{subject.model.arch}.context_length")
    if type(trained) is int and context > trained:
        found = f"was trained on {trained:,} tokens of context, {context:,} are asked for"
        step = f"Answers may get worse; ask for {trained:,} at most."
        finding = refusal(subject.model.path, "context-long", found, f"at most {trained:,}", step)
        yield replace(finding, level="warning")


def _profile(subject: _Subject) -> Iterable[Finding]:
    if subject.layout is None or subject.profile is None:
        return []
    check = subject.upstairs.check_profile
    return check(subject.profile, subject.layout, subject.model.digest)


def _pack(subject: _Subject) -> Iterable[Finding]:
    if subject.layout is None:
        return []
    folder = subject.pack or default_pack_path(subject.model)
    deep, progress = subject.deep, subject.progress
    findings = check_pack(folder, subject.model, subject.layout, deep=deep, progress=progress)
    if subject.pack is None:
        return findings
    # A pack that was asked for by name and is not there is no fallback.
    return [replace(finding, level="refusal") for finding in findings]


def _plan(subject: _Subject) -> tuple[MemoryNeed | None, list[Finding]]:
    path, memory = subject.model.path, subject.memory
    try:
        need = subject.upstairs.plan(subject.model, subject.layout, **subject.settings)
    except Exception as error:
        return None, _raised(error, path, "memory-plan")
    if memory is None or memory >= need.nbytes:
        return need, []
    found = f"gets a memory budget of {memory:,} bytes ({shown_size(memory)})"
    expected = f"at least {need.nbytes:,} bytes ({shown_size(need.nbytes)}): {need.explanation}"
    step = f"Give --memory {-(-need.nbytes // (1 << 20))}MiB or more, or a shorter --context."
    return need, [refusal(path, "memory-too-small", found, expected, step)]
