"""Hands the checks of `weights/preflight.py` what only the rooms above it know."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from slotwise.engine.loading import blueprint
from slotwise.engine.memory import available
from slotwise.engine.settings import EngineSettings
from slotwise.experts.profile import profile_findings
from slotwise.models import ARCHITECTURES
from slotwise.models.base import TensorSpec
from slotwise.models.hyper import read_hyper
from slotwise.weights.layout import ExpertLayout
from slotwise.weights.preflight import Upstairs, run_preflight
from slotwise.weights.preflight_report import MemoryNeed, PreflightReport
from slotwise.weights.shards import ModelFile


def check_model(
    path: Path,
    *,
    memory: int | None = None,
    profile: Path | None = None,
    pack: Path | None = None,
    deep: bool = False,
    context: int = 4096,
    chunk: int = 2048,
    kv_type: str = "f16",
    progress: Callable[[int, int], None] | None = None,
) -> PreflightReport:
    """Every reason not to run, for the budget given or what `auto` would take."""
    budget = available().nbytes if memory is None else memory
    return run_preflight(
        path,
        upstairs=Upstairs(
            architectures=ARCHITECTURES,
            requirements=_requirements,
            check_profile=profile_findings,
            plan=partial(_plan, budget),
        ),
        memory=budget,
        profile=profile,
        pack=pack,
        deep=deep,
        progress=progress,
        context=context,
        chunk=chunk,
        kv_type=kv_type,
    )


def _requirements(model: ModelFile) -> list[TensorSpec]:
    embedding = model.tensors.get("token_embd.weight")
    n_vocab = embedding.shape[1] if embedding and len(embedding.shape) > 1 else 0
    hyper = read_hyper(model.metadata, n_vocab, model.path.name)
    return ARCHITECTURES[model.arch](hyper).dense_tensors()


def _plan(
    budget: int,
    model: ModelFile,
    layout: ExpertLayout | None,
    *,
    context: int,
    chunk: int,
    kv_type: str,
) -> MemoryNeed:
    """The smallest budget, and what `budget` would be spent on."""
    settings = EngineSettings(memory=max(budget, 1), context=context, chunk=chunk, kv_type=kv_type)  # type: ignore[arg-type]
    plan = blueprint(model).plan(settings)
    parts = ", ".join(f"{name} {nbytes / 2**20:,.0f} MiB" for name, nbytes in plan.parts().items())
    if layout is not None:
        parts += f"; {sum(plan.slots):,} expert slots for {layout.n_total:,} experts"
        parts += f", {plan.scratch / 2**20:,.0f} MiB of them lent to a full chunk of a prompt"
    return MemoryNeed(nbytes=plan.minimum, explanation=parts)
