"""Foretells the time to the first token before a prompt is read.

Everything comes from this engine's own earlier requests: what a chunk and a token of reading cost,
how fast the slow tier delivered, how much of that the compute hid, and what the steps around the
read took. The first request has none; its forecast is missing. Nothing is foretold with a number
that was not measured here, so a forecast says what this machine does, not what it should do.

    first token = what passed so far + lending + reading + waiting for experts + first window + rest
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from slotwise.trace.ledger import LedgerRecord
from slotwise.trace.record import Forecast

KEPT = 16
"""Requests the rates are learnt from: the newest."""
NEW_SHARE = 0.3
"""Weight of the newest request in a running mean."""
DISTINCT = 1.25
"""Prompts differ in size from here on; only then do they tell a chunk's cost from a token's."""
WAIT, LEND = "read.expert_wait", "lend"
AFTER = ("first_window", "sample", "emit")


@dataclass(frozen=True, kw_only=True)
class Read:
    """A prompt read as it is planned: `tokens` from position `start` on, in chunks."""

    tokens: int
    start: int
    chunk: int

    @property
    def chunks(self) -> list[int]:
        whole, rest = divmod(self.tokens, self.chunk)
        return [self.chunk] * whole + [rest] * bool(rest)

    def costs(self) -> NDArray[np.float64]:
        """What the compute grows with: tokens, chunks, and positions that tokens look at."""
        positions = self.tokens * (self.start + self.tokens / 2)
        return np.array([self.tokens, len(self.chunks), positions], float)


class _Mean:
    """A running mean; None until something was added."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, value: float) -> None:
        before = value if self.value is None else self.value
        self.value = before + NEW_SHARE * (value - before)


class Forecaster:
    """Learns from finished requests. `bandwidth` in bytes a second is the slow tier's, measured
    when the slots were filled; None if nothing was read then."""

    def __init__(self, *, bandwidth: float | None) -> None:
        self._bandwidth = bandwidth
        self._reads: deque[tuple[Read, int]] = deque(maxlen=KEPT)
        self._hidden, self._bytes = _Mean(), _Mean()
        self._lend, self._refill = _Mean(), _Mean()
        self._after = {name: _Mean() for name in AFTER}

    def forecast(self, read: Read, *, so_far_ns: int, missing_bytes: float) -> Forecast:
        """`missing_bytes` is what `expected_bytes` says of the read; empty if nothing is known."""
        after = [mean.value for mean in self._after.values()]
        if any(value is None for value in after) or (read.tokens and not self._reads):
            return Forecast()
        rest = so_far_ns + sum(value or 0.0 for value in after)
        if not read.tokens:
            return _whole(rest, 0, 0, 0)
        compute = self._compute_ns(read)
        nbytes = missing_bytes * (self._bytes.value if self._bytes.value is not None else 1.0)
        wait = self._wait_ns(nbytes, compute)
        widest = max(read.chunks)
        around = widest * ((self._lend.value or 0.0) + (self._refill.value or 0.0))
        return _whole(rest + compute + wait + around, compute, wait, nbytes)

    def learn(
        self, read: Read, ledger: LedgerRecord, *, missing_bytes: float, bytes_read: int
    ) -> None:
        """What a request that reached its first token really took. `missing_bytes` is what had
        been expected of it."""
        for name, mean in self._after.items():
            mean.add(ledger.ns(name))
        if not read.tokens:
            return
        compute = _compute_ns(ledger)
        if missing_bytes:
            self._bytes.add(bytes_read / missing_bytes)
        io = self._io_ns(bytes_read)
        if io and compute:
            hidden = (io - ledger.ns(WAIT)) / min(io, compute)
            self._hidden.add(max(-2.0, min(1.0, hidden)))
        widest = max(read.chunks)
        self._lend.add(ledger.ns(LEND) / widest)
        self._refill.add(ledger.ns("refill") / widest)
        self._reads.append((read, compute))

    def _io_ns(self, nbytes: float) -> float:
        return nbytes / self._bandwidth * 1e9 if self._bandwidth else 0.0

    def _wait_ns(self, nbytes: float, compute: float) -> float:
        io = self._io_ns(nbytes)
        hidden = self._hidden.value if self._hidden.value is not None else 1.0
        return max(0.0, io - hidden * min(io, compute))

    def _compute_ns(self, read: Read) -> float:
        """Least squares over the kept reads, with as many costs as their sizes can tell apart."""
        sizes = sorted(kept.tokens for kept, _ in self._reads)
        columns = min(3, 1 + sum(b >= DISTINCT * a for a, b in pairwise(sizes)))
        costs = np.stack([kept.costs() for kept, _ in self._reads])
        took = np.array([ns for _, ns in self._reads], float)
        weights = 1.0 / took  # a small read's error counts as much as a large one's
        for n in range(columns, 0, -1):
            scale = costs[:, :n].max(axis=0)
            matrix = costs[:, :n] / scale * weights[:, None]
            rates = np.linalg.lstsq(matrix, np.ones(len(took)), rcond=None)[0] / scale
            if n == 1 or (rates >= 0).all():
                return float(read.costs()[:n] @ rates)
        return 0.0


def _compute_ns(ledger: LedgerRecord) -> int:
    reading = (name for name in ledger.phases if name.startswith("read.") and name != WAIT)
    return max(1, sum(ledger.ns(name) for name in reading))


def _whole(total: float, compute: float, wait: float, nbytes: float) -> Forecast:
    return Forecast(
        time_to_first_token_ns=int(total),
        read_compute_ns=int(compute),
        read_wait_ns=int(wait),
        read_bytes=int(nbytes),
    )


def expected_bytes(
    chunks: Sequence[int],
    heat: NDArray[np.float64],
    resident: NDArray[np.bool_],
    slot_bytes: NDArray[np.int64],
    n_used: int,
) -> float:
    """Bytes that chunks of so many tokens will have to read.

    `heat` and `resident` [layers, experts], `slot_bytes` [layers]. An expert is taken to be chosen
    for each token with a chance of its share of its layer's heat, times the experts a token is
    routed to; who is resident is taken not to change from chunk to chunk.
    """
    uniform = np.full_like(heat, 1.0 / heat.shape[1])
    total = heat.sum(axis=1, keepdims=True)
    warm = np.clip(heat, 0.0, None)
    share = np.where(total > 0, warm / np.maximum(warm.sum(axis=1, keepdims=True), 1e-300), uniform)
    # Some of it spread evenly: what was not chosen so far may be.
    chance = np.minimum(1.0, n_used * (0.9 * share + 0.1 * uniform))
    absent = np.where(resident, 0.0, slot_bytes[:, None])
    return float(sum((absent * (1.0 - (1.0 - chance) ** n)).sum() for n in chunks))
