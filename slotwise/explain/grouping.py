"""Which requests may be put together: about the same size, and the same kind of reuse.

A request that does not say whether it reused anything is neither new nor a hit. Where the prompt's
size is not known, the tokens that were read stand for it, and the label says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from slotwise.explain.record import Request

SIZE_GAP = 0.1
SIZE_GAP_TOKENS = 16


def size_of(request: Request) -> float | None:
    """Prompt tokens, or read tokens where the prompt is not known; None without either."""
    return request.prompt.value if request.prompt.known else request.read.value


def by_size_and_reuse(requests: Iterable[Request]) -> list[list[Request]]:
    """Groups of requests with a known size, smallest first."""
    known = [r for r in requests if size_of(r) is not None]
    groups: list[list[Request]] = []
    for prompt_known in (True, False):
        alike = [r for r in known if r.prompt.known == prompt_known]
        for cluster in _clusters(alike, lambda r: size_of(r) or 0.0):
            groups += _by_reuse(cluster)
    return groups


def label(requests: Sequence[Request]) -> str:
    """`prompt 165 to 168 tokens, new`"""
    what = "prompt" if requests[0].prompt.known else "read"
    sizes = token_range(size_of(r) for r in requests)
    reused = [r.reused.value for r in requests]
    if reused[0] is None:
        kind = "reuse not said"
    elif reused[0] == 0:
        kind = "new"
    else:
        kind = f"{span(token_range(reused))} reused"
    return f"{what} {span(sizes)} tokens, {kind}"


def token_range(values: Iterable[float | None]) -> tuple[int, int]:
    """Lowest and highest of the known counts; (0, 0) when none is known."""
    known = [int(v) for v in values if v is not None]
    return (min(known), max(known)) if known else (0, 0)


def span(values: tuple[int, int]) -> str:
    low, high = values
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _by_reuse(requests: Sequence[Request]) -> list[list[Request]]:
    # 0 reused and 1 reused are different kinds of request, however close the numbers are
    new = [r for r in requests if r.reused.value == 0]
    hits = [r for r in requests if r.reused.value]
    unsaid = [r for r in requests if r.reused.value is None]
    return [g for g in (new, unsaid) if g] + _clusters(hits, lambda r: r.reused.value or 0.0)


def _clusters(requests: Sequence[Request], size: Callable[[Request], float]) -> list[list[Request]]:
    """Splits where neighbouring sizes differ by more than 10 % and more than 16 tokens."""
    clusters: list[list[Request]] = []
    last = 0.0
    for r in sorted(requests, key=size):
        if not clusters or size(r) - last > max(SIZE_GAP * last, SIZE_GAP_TOKENS):
            clusters.append([])
        clusters[-1].append(r)
        last = size(r)
    return clusters
