"""From a file to a network in memory: what is needed, what it costs, then the loading itself.

`blueprint` and its `plan` answer without reading a tensor, so that preflight can ask them too;
`load` does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from slotwise.engine.chunk import Shape, scratch_bytes, work_bytes
from slotwise.engine.decode import Windows, window_bytes
from slotwise.engine.dense import DenseWeights
from slotwise.engine.kv import KeyValueState, open_state, padded, state_bytes
from slotwise.engine.memory import Budget, MemoryPlan, available, divide
from slotwise.engine.settings import EngineSettings
from slotwise.engine.stages import Network
from slotwise.errors import Finding, Refused
from slotwise.experts.loader import Experts
from slotwise.experts.mirror import MirrorStore, mirror_bytes, mirror_order
from slotwise.experts.pool import experts_per_class, minimum_slots, region_offsets
from slotwise.experts.profile import load_profile, profile_findings
from slotwise.experts.store import ExpertStore, open_store
from slotwise.kernels.backend import Backend, Buffer, Memory, NoMemory
from slotwise.kernels.gemm import Crew
from slotwise.kernels.graph import Weights
from slotwise.models import ARCHITECTURES
from slotwise.models.base import Architecture
from slotwise.models.hyper import Hyper, read_hyper
from slotwise.models.layers import SlotTensors
from slotwise.weights.header import refusal
from slotwise.weights.layout import ExpertLayout, expert_layout
from slotwise.weights.shards import ModelFile

Progress = Callable[[str, int, int], None]
"""(what is being done, bytes done, bytes in all)"""


@dataclass(frozen=True)
class Blueprint:
    """A model as far as its header tells."""

    model: ModelFile
    architecture: Architecture
    layout: ExpertLayout | None
    dense: DenseWeights

    def plan(self, settings: EngineSettings) -> MemoryPlan:
        """Divides `settings.memory`. The plan's total may exceed the budget: the caller checks."""
        h, threads = self.architecture.hyper, settings.n_threads
        n_kv = padded(settings.context)
        chunk = Shape(min(settings.chunk, settings.context), n_kv, settings.gemm)
        least = self._shapes(minimum_slots(self.layout) if self.layout else [], n_kv)
        most = self._shapes(experts_per_class(self.layout) if self.layout else [], n_kv)
        windows, window_work = window_bytes(most, settings.context, threads)
        chunk_work = max(work_bytes(shapes, chunk, threads) for shapes in (least, most))
        needs = MemoryPlan(
            budget=Budget(settings.memory, "--memory")
            if settings.memory
            else available(n_vocab=h.n_vocab),
            dense=self.dense.nbytes,
            state=state_bytes(h, settings.context, settings.kv_type),
            windows=windows,
            work=max(window_work, chunk_work),
            scratch=scratch_bytes(least, chunk),
        )
        return divide(needs, self.layout, slots=settings.slots)

    def _shapes(self, slots: Sequence[int], n_kv: int) -> Network:
        """The network without memory, to measure graphs."""
        memory = NoMemory()
        state = KeyValueState(self.architecture.hyper, context=n_kv, kv_type="f32", memory=memory)
        return assemble(self, self.dense.shapes(), state, slots, memory)


def blueprint(model: ModelFile) -> Blueprint:
    """Raises `Refused` with everything that is wrong with keys, tensors and experts."""
    cls = ARCHITECTURES.get(model.arch)
    if cls is None:
        raise Refused([_unknown_architecture(model)])
    hyper = read_hyper(model.metadata, _n_vocab(model), model.path.name)
    if hyper.n_layers > len(model.tensors):  # or the table of tensors would have no end
        found = f"has {hyper.n_layers:,} layers and {len(model.tensors):,} tensors"
        raise Refused([refusal(model.path, "block-count", found, "a tensor for each layer")])
    architecture = cls(hyper)
    layout = expert_layout(model)
    if bool(layout) != bool(hyper.n_experts) or (layout and len(layout.layers) != hyper.n_layers):
        raise Refused([_missing_experts(model, hyper, layout)])
    return Blueprint(model, architecture, layout, DenseWeights(model, architecture.dense_tensors()))


def _n_vocab(model: ModelFile) -> int:
    info = model.tensors.get("token_embd.weight")
    return info.shape[1] if info is not None and len(info.shape) > 1 else 0


def _unknown_architecture(model: ModelFile) -> Finding:
    return Finding(
        level="refusal",
        code="architecture",
        where=model.path.name,
        found=f"architecture {model.arch!r}",
        expected=f"one of {', '.join(ARCHITECTURES)}",
        next_step="Use a model of a supported architecture.",
    )


def _missing_experts(model: ModelFile, h: Hyper, layout: ExpertLayout | None) -> Finding:
    return Finding(
        level="refusal",
        code="expert-layers",
        where=model.path.name,
        found=f"{len(layout.layers) if layout else 0} layers with experts",
        expected=f"experts in {h.n_layers if h.n_experts else 0} layers "
        f"(metadata: {h.n_experts} experts, {h.n_layers} layers)",
        next_step="Use a complete conversion of a supported architecture.",
    )


def budget_finding(plan: MemoryPlan, settings: EngineSettings) -> Finding | None:
    """The refusal when the budget cannot hold even the smallest pool."""
    if plan.budget.nbytes >= plan.minimum:
        return None
    mib = -(-plan.minimum // 2**20)
    return Finding(
        level="refusal",
        code="memory-budget",
        where=f"memory budget ({plan.budget.reason})",
        found=f"{plan.budget.nbytes / 2**20:,.0f} MiB",
        expected=f"at least {mib:,} MiB with --context {settings.context} --chunk {settings.chunk}",
        next_step=f"Give --memory {mib}MiB or more, or a smaller --context or --chunk.",
    )


def assemble(
    plan: Blueprint,
    dense: Weights,
    state: KeyValueState,
    slots: Sequence[int],
    arena: Memory,
) -> Network:
    """Ties weights, state and expert slots (per class, from the arena's start) together."""
    layout = plan.layout
    if layout is None:
        return Network(plan.architecture, dense, state.layers, keep=(state,))
    offsets = region_offsets(layout, slots)
    tensors = Weights(3 * len(layout.classes))
    arrays = []
    for slot_class, n, base in zip(layout.classes, slots, offsets, strict=False):
        gate, up, down = (
            tensors.add(
                f"{slot_class.index}.{p.name}",
                p.type,
                (p.n_in, p.n_out, n),
                arena,
                base + p.offset,
                slot_bytes=slot_class.slot_bytes,
            )
            for p in slot_class.projections
        )
        arrays.append(SlotTensors(gate, up, down))
    return Network(
        plan.architecture,
        dense,
        state.layers,
        slots=tuple(arrays),
        class_of=layout.class_of,
        keep=(state, tensors),
    )


@dataclass
class Loaded:
    """Everything in memory. `close` releases it in the right order."""

    blueprint: Blueprint
    settings: EngineSettings
    plan: MemoryPlan
    network: Network
    backend: Backend
    state: KeyValueState
    windows: Windows
    experts: Experts | None
    arena: Buffer | None
    store: ExpertStore | None
    crew: Crew | None
    resources: ExitStack

    @property
    def mirror_bytes(self) -> int | None:
        """Host memory for copies of experts; None without a mirror."""
        return self.store.size if isinstance(self.store, MirrorStore) else None

    def close(self) -> None:
        self.resources.close()


def load(
    model: ModelFile,
    settings: EngineSettings,
    *,
    on_event: Callable[..., None] | None = None,
    progress: Progress | None = None,
) -> Loaded:
    """Reads dense weights and fills the expert slots.

    Raises Refused (budget, profile, file), StoreError. Nothing stays open when it raises.
    """
    drawing = blueprint(model)
    plan = drawing.plan(settings)
    if finding := budget_finding(plan, settings):
        raise Refused([finding])
    with ExitStack() as stack:
        backend = Backend(settings.n_threads)
        stack.callback(backend.close)
        weights, dense_buffer = drawing.dense.load(progress=_named(progress, "dense weights"))
        stack.callback(dense_buffer.close)
        state, state_buffer = open_state(
            drawing.architecture.hyper, context=settings.context, kv_type=settings.kv_type
        )
        stack.callback(state_buffer.close)
        store = experts = arena = None
        if drawing.layout is not None:
            arena = Buffer(plan.arena)
            stack.callback(arena.close)
            store = _open_store(drawing, settings, backend, stack)
            experts = _open_experts(drawing, store, arena, plan, settings, on_event)
            stack.callback(experts.close)
            experts.warm(progress=_named(progress, "expert slots"))
            if isinstance(store, MirrorStore):
                store.fill(mirror_order(experts.pool.table, experts.policy.heat))
        network = assemble(drawing, weights, state, plan.slots, arena or NoMemory())
        crew = Crew(settings.gemm.threads) if settings.gemm else None
        if crew is not None:
            stack.callback(crew.close)
        windows = _open_windows(network, backend, plan, settings, stack)
        return Loaded(
            drawing,
            settings,
            plan,
            network,
            backend,
            state,
            windows,
            experts,
            arena,
            store,
            crew,
            stack.pop_all(),
        )


def _open_windows(
    network: Network,
    backend: Backend,
    plan: MemoryPlan,
    settings: EngineSettings,
    stack: ExitStack,
) -> Windows:
    buffer = Buffer(plan.windows)
    stack.callback(buffer.close)
    buffer.touch()
    windows = Windows(network, context=settings.context, memory=buffer, extents=[(0, buffer.size)])
    windows.warm_up(backend)
    return windows


def _open_store(
    drawing: Blueprint, settings: EngineSettings, backend: Backend, stack: ExitStack
) -> ExpertStore:
    """The slow tier, with a mirror in host memory before it where one is wanted."""
    layout = drawing.layout
    if layout is None:
        raise ValueError("a dense model has no experts to store")
    if settings.mirror is None:
        return open_store(drawing.model, layout, pack=settings.pack)
    memory = backend.host_memory(mirror_bytes(layout, settings.mirror))
    stack.callback(memory.close)
    return MirrorStore(open_store(drawing.model, layout, pack=settings.pack), memory)


def _open_experts(
    drawing: Blueprint,
    store: ExpertStore,
    arena: Buffer,
    plan: MemoryPlan,
    settings: EngineSettings,
    on_event: Callable[..., None] | None,
) -> Experts:
    profile = None
    if settings.profile is not None:
        findings = profile_findings(settings.profile, store.layout, drawing.model.digest)
        if any(f.level == "refusal" for f in findings):
            raise Refused(findings)
        profile = load_profile(settings.profile)
    return Experts(
        store,
        arena,
        slots=plan.slots,
        policy=settings.policy,
        io_lanes=settings.io_lanes,
        profile=profile,
        refill=settings.refill,
        lookahead=settings.lookahead,
        read_limit=settings.read_limit,
        on_event=on_event,
    )


def _named(progress: Progress | None, what: str) -> Callable[[int, int], None] | None:
    if progress is None:
        return None
    return lambda done, total: progress(what, done, total)
