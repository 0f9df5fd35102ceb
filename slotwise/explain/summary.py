"""What the requests of one engine life say together: medians by size, and what things cost.

Requests are grouped by prompt size and by how much of it was reused. Unfinished ones are left out,
and so is the first of each group (the life's first, or first use of a size: graphs are captured,
kernels compiled); both are listed. Nothing is parsed and nothing is drawn here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from random import Random
from typing import TypeVar

from slotwise.explain.fit import (
    Fit,
    Floor,
    RateCheck,
    constant_rate,
    floor_then_line,
    repeated_sizes,
    straight_line,
    two_costs,
)
from slotwise.explain.grouping import by_size_and_reuse, label
from slotwise.explain.join import Joined, Row, join
from slotwise.explain.record import Life, Phase, Reading, Request
from slotwise.explain.stats import Estimate, mean, median

REMAINDER = "remainder"
OUTER = "outer"
_ORDER = {"request": 0, REMAINDER: 1, OUTER: 2}
MOST_REQUESTS = 5_000
MOST_SAMPLES = 20_000
COLD_APART_FROM = 4
"""The first request of a size stands apart when at least this many have that size."""


Sample = TypeVar("Sample")


@dataclass(frozen=True, kw_only=True)
class Typical:
    """Median and mean of one phase, remainder or outer clock over a group."""

    name: str
    lane: str
    how: str
    median: float
    mean: Estimate
    of: int
    """Requests in the group; `mean.n` of them have a number here."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Requests of about the same size and the same kind of reuse."""

    label: str
    used: tuple[int, ...]
    cold: tuple[int, ...]
    """Indices of first requests, kept apart from the numbers."""
    rows: tuple[Typical, ...]


@dataclass(frozen=True, kw_only=True)
class ReadCost:
    """Fixed and per-token cost of the prompt read, over parts or requests."""

    what: str
    n: int
    line: Fit | None
    floor: Floor | None
    """Shown beside the line where the straight line failed its test or could not be tested."""
    why_not: str = ""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Everything said about one life beyond its requests."""

    groups: tuple[Group, ...]
    read: ReadCost
    refill: RateCheck | None
    refill_why_not: str
    costs: Fit | None
    """Prompt clock = fixed + per token + per lent slot; refused where those cannot be separated."""
    left_out: tuple[tuple[int, str], ...]
    """(request index, why it is in no median and no fit)."""
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Explained:
    """A reading and one summary per life."""

    reading: Reading
    summaries: tuple[Summary, ...]
    joined: Joined | None = None
    """How requests (numbered over all lives) were paired with benchmark rows, when asked to."""

    @property
    def anything(self) -> bool:
        """Whether at least one request with a time was found."""
        return any(
            r.prompt_ms.known or r.ttft_ms.known or any(p.ms.known for p in r.phases)
            for life in self.reading.lives
            for r in life.requests
        )


def explain(reading: Reading, *, rows: Sequence[Row] | None = None) -> Explained:
    """Summaries of every life; with benchmark `rows` their times are joined to the requests."""
    joined = None
    if rows is not None:
        joined = join([r for life in reading.lives for r in life.requests], rows)
        left = iter(joined.requests)
        lives = [replace(v, requests=tuple(islice(left, len(v.requests)))) for v in reading.lives]
        reading = replace(reading, lives=tuple(lives))
    summaries = tuple(summarise(life) for life in reading.lives)
    return Explained(reading=reading, summaries=summaries, joined=joined)


def drawn(requests: Sequence[Request]) -> Sequence[Request]:
    """At most 5,000 of the requests, at random and in order, the first among them."""
    if len(requests) <= MOST_REQUESTS:
        return requests
    others = Random(0).sample(range(1, len(requests)), MOST_REQUESTS - 1)
    return [requests[i] for i in (0, *sorted(others))]


def in_memory(reading: Reading) -> Reading:
    """The reading with the drawn requests of each life only, each of them one object."""
    lives = [replace(life, requests=tuple(drawn(life.requests))) for life in reading.lives]
    return replace(reading, lives=tuple(lives))


def drawn_words(life: Life) -> list[str]:
    """That not all requests are in the numbers, where that is so."""
    n = len(life.requests)
    if n <= MOST_REQUESTS:
        return []
    return [f"{MOST_REQUESTS:,} of {n:,} requests, drawn at random, are in these numbers"]


def summarise(life: Life) -> Summary:
    """Medians by size, costs of read and refill, and what was left out of them."""
    requests = drawn(life.requests)
    groups = group_requests(requests)
    by_index = {r.index: r for r in requests}
    used = [by_index[i] for g in groups for i in g.used]
    used.sort(key=lambda r: r.index)
    cold = [(i, "first of its life or size: kept apart") for g in groups for i in g.cold]
    grouped = {i for g in groups for i in (*g.used, *g.cold)}
    unused = [(r.index, _why_unused(r)) for r in requests if r.index not in grouped]
    refill, why_not = refill_cost(used)
    warnings = drawn_words(life)
    if any(by_index[i].first_of_life for g in groups for i in g.used):
        warnings.append(
            "the first request of this engine life is among the numbers, because no other has its "
            "size; first requests are slower"
        )
    if not groups:
        warnings.append("no finished request with a known size: no medians, no fits")
    return Summary(
        groups=groups, read=read_cost(used), refill=refill, refill_why_not=why_not,
        costs=slot_and_token_cost(used), left_out=tuple(sorted(cold + unused)),
        warnings=tuple(warnings),
    )  # fmt: skip


def group_requests(requests: Sequence[Request]) -> tuple[Group, ...]:
    """Finished requests by prompt size and reused tokens, smallest first."""
    usable = [r for r in requests if r.status == "done"]
    groups = [_group(sorted(g, key=lambda r: r.index)) for g in by_size_and_reuse(usable)]
    return tuple(groups)


def read_cost(requests: Sequence[Request]) -> ReadCost:
    """fixed + per-token cost of the read, from its parts where they are timed."""
    parts, what, notes = _read_samples(requests)
    sizes = len(set(repeated_sizes([x for x, _ in parts]))) if parts else 0
    if sizes < 2:
        why = "no timed read with known tokens" if not parts else "only one size was read"
        return ReadCost(
            what=what, n=len(parts), line=None, floor=None, warnings=tuple(notes),
            why_not=f"{why}: fixed and per-token cost cannot be told apart",
        )  # fmt: skip
    parts, thinned = _at_most(parts)
    x, y = [p[0] for p in parts], [p[1] for p in parts]
    line = straight_line(x, y, name=what, per="token", warnings=[*notes, *thinned])
    floor = None
    if line.lack_of_fit is None or line.lack_of_fit.rejects:
        floor = floor_then_line(x, y, name=what, per="token")
        if floor is not None and floor.squares > sum(p.residual**2 for p in line.points):
            floor = None
    return ReadCost(what=what, n=len(parts), line=line, floor=floor)


def refill_cost(requests: Sequence[Request]) -> tuple[RateCheck | None, str]:
    """Cost per refilled slot, or None and why."""
    samples = []
    for r in requests:
        ms, slots = phase_ms(r, "refill"), _refilled(r)
        if ms is not None and slots:
            samples.append((slots, ms))
    if not samples:
        return None, "no refill with both its slots and its time"
    samples, thinned = _at_most(samples)
    x, y = [s[0] for s in samples], [s[1] for s in samples]
    return constant_rate(x, y, name="refill", per="slot", warnings=thinned), ""


def slot_and_token_cost(requests: Sequence[Request]) -> Fit | None:
    """Prompt clock split into per token and per lent slot; None where that is not the question."""
    rows = [
        (r.read.value, r.slots_lent.value, r.prompt_ms.value)
        for r in requests
        if not r.reused.value and r.slots_lent.value
    ]
    known = [(t, s, y) for t, s, y in rows if t is not None and s is not None and y is not None]
    if len(known) < 4 or len({t for t, _, _ in known}) < 2:
        return None
    known, _ = _at_most(known)
    tokens, slots, y = ([float(v) for v in column] for column in zip(*known, strict=True))
    return two_costs(tokens, slots, y, name="prompt clock", per=("token", "slot"))


def phase_ms(request: Request, name: str) -> float | None:
    """Summed ms of the request-lane phases of this name; None when absent or not known."""
    found = [p.ms.value for p in request.phases if p.lane == "request" and p.name == name]
    known = [v for v in found if v is not None]
    return sum(known) if known and len(known) == len(found) else None


def phase_names(requests: Iterable[Request], *, remainders: bool = False) -> list[str]:
    """Names of the phases that add up, or of their remainders, in order of first use."""
    phases = (p for r in requests for p in (r.remainders if remainders else r.phases))
    return list(dict.fromkeys(p.name for p in phases if p.lane == "request"))


def reads_of(request: Request) -> list[Phase]:
    """The phases that read the prompt: timed parts first, the ledger's read.* otherwise."""
    reads = [p for p in request.phases if p.lane == "request" and p.name.startswith("read")]
    batched = [p for p in reads if p.name == "read (batched)"]
    return batched or reads


def _read_samples(
    requests: Sequence[Request],
) -> tuple[list[tuple[float, float]], str, list[str]]:
    fresh = [r for r in requests if not r.reused.value]
    parts = _parts(fresh)
    notes: list[str] = []
    several = sum(batched_parts(r) > 1 for r in requests)
    if several:
        notes.append(f"{several} requests were read in several parts and timed in sum: left out")
    if len({x for x, _ in parts}) < 2 and len({x for x, _ in _parts(requests)}) >= 2:
        fresh, parts = list(requests), _parts(requests)
        notes.append("some of these reads continued a reused prefix: depth is in the cost too")
    if parts:
        return parts, "read (batched)", notes
    whole = [(r.read.value, _whole_read(r)) for r in fresh]
    samples = [(x, y) for x, y in whole if x and y is not None]
    if samples:
        return samples, "read, all phases", notes
    clock = [(r.read.value, r.prompt_ms.value) for r in fresh]
    samples = [(x, y) for x, y in clock if x and y is not None]
    if samples:
        notes.append("the read is not timed by itself: this is the whole prompt clock")
    return samples, "prompt clock", notes


def batched_parts(request: Request) -> int:
    """Batched parts the prompt was read in, by the reader's count where it gives one."""
    phases = sum(p.lane == "request" and p.name == "read (batched)" for p in request.phases)
    counted = request.facts.get("batched parts")
    return int(counted.value) if counted is not None and counted.value is not None else phases


def _parts(requests: Iterable[Request]) -> list[tuple[float, float]]:
    """(tokens, ms) of batched reads; a sum over several parts is no sample of one part's cost."""
    samples = []
    for r in requests:
        reads = [p for p in reads_of(r) if p.name == "read (batched)" and p.tokens]
        if len(reads) == batched_parts(r):
            samples += [(float(p.tokens or 0), p.ms.value) for p in reads if p.ms.known]
    return [(x, y) for x, y in samples if y is not None]


def _at_most(samples: list[Sample]) -> tuple[list[Sample], list[str]]:
    """At most 20,000 samples drawn at random, in order, and a note when some are left out."""
    if len(samples) <= MOST_SAMPLES:
        return samples, []
    # not every k-th: the sizes of a ladder come in turn, and k could hit one size only
    chosen = sorted(Random(0).sample(range(len(samples)), MOST_SAMPLES))
    note = f"{MOST_SAMPLES:,} of {len(samples):,} samples, drawn at random, are in this fit"
    return [samples[i] for i in chosen], [note]


def _whole_read(request: Request) -> float | None:
    reads = [p.ms.value for p in reads_of(request)]
    known = [v for v in reads if v is not None]
    return sum(known) if known and len(known) == len(reads) else None


def _refilled(request: Request) -> float | None:
    slots = [p.slots for p in request.phases if p.lane == "request" and p.name == "refill"]
    if slots and all(s is not None for s in slots):
        return float(sum(s for s in slots if s is not None))
    return request.slots_refilled.value


def _group(members: Sequence[Request]) -> Group:
    first, cold = members[0], []
    of_its_size = len(members) >= COLD_APART_FROM and not first.warmed
    if len(members) >= 2 and (first.first_of_life or of_its_size):
        cold = [first]
    used = members[len(cold) :]
    return Group(
        label=label(members),
        used=tuple(r.index for r in used),
        cold=tuple(r.index for r in cold),
        rows=tuple(sorted(_typical(used), key=lambda row: _ORDER.get(row.lane, len(_ORDER)))),
    )


def _typical(requests: Sequence[Request]) -> Iterable[Typical]:
    series: dict[tuple[str, str], list[dict[str, float]]] = {}
    for i, r in enumerate(requests):
        clocks = (("prompt clock", r.prompt_ms), ("first token", r.ttft_ms))
        entries = [(p.name, p.lane, p.ms) for p in r.phases]
        entries += [
            (p.name, REMAINDER if p.lane == "request" else p.lane, p.ms) for p in r.remainders
        ]
        entries += [(name, OUTER, value) for name, value in clocks]
        for name, lane, ms in entries:
            if ms.value is not None:
                column = series.setdefault((name, lane), [])
                column += [{} for _ in range(i + 1 - len(column))]
                column[i][ms.how] = column[i].get(ms.how, 0.0) + ms.value
    for (name, lane), column in series.items():
        values = [sum(cell.values()) for cell in column if cell]
        ways = {how for cell in column for how in cell}
        yield Typical(
            name=name, lane=lane, how="measured" if ways == {"measured"} else "derived",
            median=median(values), mean=mean(values), of=len(requests),
        )  # fmt: skip


def _why_unused(request: Request) -> str:
    if request.status != "done":
        return f"{request.status}: its times are not those of a whole request"
    return "its size is not known"
