"""One chunk of a prompt in memory: its tensors, and how much they and its graphs take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slotwise.engine.expert_gemm import GemmUse, gemm_fields, rounded_bytes
from slotwise.engine.places import Field, Places, fields, pair_fields
from slotwise.engine.stages import Network, Stages
from slotwise.kernels.backend import PAGE, Backend, Memory, NoMemory
from slotwise.kernels.gemm import Crew, HostProducts
from slotwise.kernels.graph import Graph
from slotwise.kernels.planner import DoesNotFitError, Extent

WORK_LIMIT = 16 << 20
"""Bytes; bounds ggml's own table of slots x pairs by splitting a wave into several graphs."""
WORK_PER_SLOT_AND_PAIR = 8
MOST_PAIRS = 1024
"""Bounds the intermediates of one graph; larger ones are not faster."""


@dataclass(frozen=True)
class Shape:
    """What decides a chunk's memory: `n_tokens` over `n_kv` positions, and the products' kind."""

    n_tokens: int
    n_kv: int
    gemm: GemmUse | None = None

    @property
    def dense_gemm(self) -> bool:
        """Whether dense weights are multiplied by tiles."""
        return self.gemm is not None and self.n_tokens >= self.gemm.from_rows

    def fields(self, network: Network) -> dict[str, Field]:
        h, n = network.architecture.hyper, self.n_tokens
        wanted = fields(h, n, self.n_kv) | pair_fields(h, n)
        if self.gemm is not None and self._uses_gemm(network, self.gemm):
            wanted |= gemm_fields(h, n, threads=self.gemm.threads)
        return wanted

    def _uses_gemm(self, network: Network, gemm: GemmUse) -> bool:
        """An expert gets each token at most once."""
        least = min([gemm.from_rows, *(gemm.least(slots) for slots in network.slots)])
        return self.n_tokens >= least


class Batch:
    """A chunk's places in `extents` of `memory`, and what builds graphs over them. Without a
    crew its graphs are only measured, if the shape uses one."""

    def __init__(
        self,
        network: Network,
        shape: Shape,
        memory: Memory,
        extents: Sequence[Extent],
        *,
        crew: Crew | None = None,
    ) -> None:
        self.shape, self.n_tokens = shape, shape.n_tokens
        self.places = Places(shape.fields(network), memory, extents)
        host = None
        if shape.dense_gemm:
            host = HostProducts(crew, self.places.array("tiles") if crew else None)
        self.stages = Stages(network, self.places, shape.n_tokens, shape.n_kv, host=host)
        self.pairs_at_once = pairs_at_once(network)

    def run(self, g: Graph, backend: Backend) -> None:
        g.finish(self.places.buffer, self.places.rest)
        g.run(backend)


def pairs_at_once(network: Network) -> int:
    """How many pairs one graph may hold; ggml also keeps a table of all slots x pairs."""
    if not network.slots:
        return 0
    most = max(s.gate.contents.ne[2] for s in network.slots)
    at_least = network.architecture.hyper.n_used
    return max(at_least, min(MOST_PAIRS, WORK_LIMIT // (WORK_PER_SLOT_AND_PAIR * most)))


def fits(network: Network, shape: Shape, extents: Sequence[Extent]) -> bool:
    """Whether a chunk can be computed in `extents`."""
    try:
        places, graphs = _all_graphs(network, shape, extents)
    except DoesNotFitError:
        return False
    return all(g.fits(places.rest) for g in graphs)


def _all_graphs(
    network: Network, shape: Shape, extents: Sequence[Extent]
) -> tuple[Places, list[Graph]]:
    """One graph of each kind, only to be measured."""
    h = network.architecture.hyper
    batch = Batch(network, shape, NoMemory(), extents)
    places, stages = batch.places, batch.stages
    graphs = [stages.new_graph() for _ in range(3)]
    stages.attention(graphs[0], 0, places.leaf(graphs[0], "x_in"))
    if not h.n_experts:
        x = stages.dense_ffn(graphs[1], 0, places.leaf(graphs[1], "x_mid"))
        places.receive(graphs[1], "x_in", x)
        return places, graphs[:2]
    stages.router(graphs[1], 0, places.leaf(graphs[1], "x_mid"))
    places.receive(graphs[2], "x_in", stages.pair_combine(graphs[2], 0))
    count = min(shape.n_tokens * h.n_used, batch.pairs_at_once)
    for slot_class in range(len(network.slots)):
        g = stages.new_graph()
        stages.pair_experts(g, network.class_of.index(slot_class), 0, count)
        graphs.append(g)
    return places, graphs


def scratch_bytes(network: Network, shape: Shape) -> int:
    """Bytes, in one stretch, that such a chunk computes in."""
    places, graphs = _all_graphs(network, shape, [(0, 1 << 62)])
    return places.end + max(g.measure() for g in graphs) + PAGE


def work_bytes(network: Network, shape: Shape, threads: int) -> int:
    """Bytes ggml allocates beside our buffers for such a chunk."""
    _, graphs = _all_graphs(network, shape, [(0, 1 << 62)])
    beside = 0 if shape.gemm is None else threads * rounded_bytes(network, shape.n_tokens)
    return max(g.work_bytes(threads) for g in graphs) + beside
