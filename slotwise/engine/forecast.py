"""Foretells the time to the first token before a prompt is read.

Everything comes from this engine's own earlier requests: what reading a prompt of nearly that size
took, how long it stood still for each byte that it had to fetch, and what the steps around the read
took. Between two known sizes it is interpolated on logarithmic scales; beyond them a token costs
what it does at the nearest size. The first request has none; its forecast is missing. Nothing is
foretold with a number that was not measured here.

    first token = what passed so far + lending + reading + waiting for experts + first window + rest
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import median

import numpy as np
from numpy.typing import NDArray

from slotwise.trace.ledger import LedgerRecord
from slotwise.trace.record import Forecast

KEPT = 24
"""Requests that are learnt from: the newest."""
SAME_SIZE = 1.15
"""Reads whose tokens differ by less are of one size; the newest of them count."""
NEWEST = 3
WAIT = "read.expert_wait"
AROUND = ("lend", "refill")
AFTER = ("first_window", "sample", "emit")


@dataclass(frozen=True, kw_only=True)
class Read:
    """A prompt read as it is planned, in chunks."""

    tokens: int
    chunk: int

    @property
    def chunks(self) -> list[int]:
        whole, rest = divmod(self.tokens, self.chunk)
        return [self.chunk] * whole + [rest] * bool(rest)


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """What a read took, for each token or byte."""

    tokens: int
    compute: float
    """ns a token."""
    wait: float
    """ns for each byte that was read."""
    bytes: float
    """Bytes read for each byte that had been expected."""
    around: float
    """ns of lending and refilling a token of the widest chunk."""


class Forecaster:
    """Learns from the requests that reached their first token."""

    def __init__(self) -> None:
        self._seen: deque[_Seen] = deque(maxlen=KEPT)
        self._after: deque[int] = deque(maxlen=NEWEST)
        self._cold = True

    def forecast(self, read: Read, *, so_far_ns: int, missing_bytes: float) -> Forecast:
        """`missing_bytes` is what `expected_bytes` says of the read; empty if nothing is known."""
        if not self._after or (read.tokens and not self._seen):
            return Forecast()
        rest = so_far_ns + median(self._after)
        if not read.tokens:
            return _whole(rest, 0, 0, 0)
        compute = read.tokens * self._rate(read, lambda seen: seen.compute)
        nbytes = missing_bytes * self._rate(read, lambda seen: seen.bytes)
        wait = nbytes * self._rate(read, lambda seen: seen.wait)
        around = max(read.chunks) * self._rate(read, lambda seen: seen.around)
        return _whole(rest + compute + wait + around, compute, wait, nbytes)

    def learn(
        self, read: Read, ledger: LedgerRecord, *, missing_bytes: float, bytes_read: int
    ) -> None:
        """What a request really took. `missing_bytes` is what had been expected of it."""
        self._after.append(sum(ledger.ns(name) for name in AFTER))
        if not read.tokens:
            return
        if self._cold and len(self._seen) == NEWEST:
            self._cold = False  # the first request also met experts that had never been checked
            self._seen.popleft()
        reading = [n for n in ledger.phases if n.startswith("read.") and n != WAIT]
        self._seen.append(
            _Seen(
                tokens=read.tokens,
                compute=sum(ledger.ns(name) for name in reading) / read.tokens,
                wait=ledger.ns(WAIT) / max(bytes_read, 1),
                bytes=bytes_read / missing_bytes if missing_bytes else 1.0,
                around=sum(ledger.ns(name) for name in AROUND) / max(read.chunks),
            )
        )

    def _rate(self, read: Read, value: Callable[[_Seen], float]) -> float:
        """`value` at the read's size, between the nearest smaller and larger sizes seen."""
        below = max((s.tokens for s in self._seen if s.tokens <= read.tokens), default=None)
        above = min((s.tokens for s in self._seen if s.tokens >= read.tokens), default=None)
        near = [size for size in (below, above) if size is not None]
        left, right = (self._at(size, value) for size in (near[0], near[-1]))
        if near[0] == near[-1] or min(left, right) <= 0:
            return right if read.tokens == near[-1] else left
        share = log(read.tokens / near[0]) / log(near[-1] / near[0])
        return exp(log(left) + share * (log(right) - log(left)))

    def _at(self, size: int, value: Callable[[_Seen], float]) -> float:
        alike = [s for s in self._seen if max(s.tokens, size) <= SAME_SIZE * min(s.tokens, size)]
        return median(value(seen) for seen in alike[-NEWEST:])


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
    warm = np.clip(heat, 0.0, None)
    total = warm.sum(axis=1, keepdims=True)
    even = 1.0 / heat.shape[1]
    share = np.where(total > 0, warm / np.maximum(total, 1e-300), even)
    # A tenth of it spread evenly: what was not chosen so far may be.
    chance = np.minimum(1.0, n_used * (0.9 * share + 0.1 * even))
    absent = np.where(resident, 0.0, slot_bytes[:, None])
    each = Counter(chunks).items()  # nearly all are of one size
    return float(sum(times * (absent * (1.0 - (1.0 - chance) ** n)).sum() for n, times in each))
