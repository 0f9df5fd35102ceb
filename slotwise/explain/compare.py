"""Two arms, phase by phase: what moved, by how much, and how much of the difference it explains.

An arm is everything read from one set of logs. Requests are matched by prompt size and reuse, never
pooled over sizes. What differs between the arms beside the thing under test is listed with every
comparison; what makes a comparison meaningless refuses it (`errors.Refused`) unless forced.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from slotwise.errors import Finding, Refused
from slotwise.explain.grouping import by_size_and_reuse, label, size_of
from slotwise.explain.margin import DEFAULT, Margin, inside
from slotwise.explain.record import Life, Reading, Request
from slotwise.explain.stats import (
    Difference,
    Estimate,
    difference,
    mean,
    paired_difference,
)
from slotwise.explain.summary import drawn_words, group_requests, in_memory, phase_names

FORCE = "Pass --force-compare to compare all the same; the result then says so."
MODEL_WORDS = ("slot bytes", "blob bytes", "experts", "model")
"""Facts with one of these in their name describe the model; those with -- are settings."""
SAME_WITHIN = 0.02
"""Facts calculated from rounded log numbers differ a little between pool sizes."""
FEWEST_PAIRS = 3


@dataclass(frozen=True, kw_only=True)
class Matched:
    """Requests of both arms with the same prompt size and the same kind of reuse."""

    label: str
    a: tuple[Request, ...]
    b: tuple[Request, ...]


@dataclass(frozen=True, kw_only=True)
class Change:
    """One phase, remainder or clock in both arms."""

    name: str
    lane: str
    a: Estimate
    b: Estimate
    by: Difference
    verdict: str
    """moved / moved, within the margin / did not move / not shown to move / no interval / absent.

    "did not move" is an equivalence: the whole interval lies inside the margin.
    """


@dataclass(frozen=True, kw_only=True)
class SizeComparison:
    """One prompt size. outer = sum of the phases' changes + unexplained, exactly."""

    label: str
    n_a: int
    n_b: int
    margin_ms: float
    outer: Change
    phases: tuple[Change, ...]
    overlapped: tuple[Change, ...]
    """Phases of other lanes: shown, never added."""
    explained_ms: float
    explained_share: float | None
    """Of the outer difference; None when that is not shown to differ from zero."""
    unexplained: Change
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Arms A and B. `forced` holds what would have refused it."""

    names: tuple[str, str]
    margin: str
    """In words: how small a change counts as none."""
    sizes: tuple[SizeComparison, ...]
    hidden: tuple[str, ...]
    unmatched: tuple[str, ...]
    forced: tuple[str, ...]
    warnings: tuple[str, ...]


def compare(
    a: Reading, b: Reading, *, names: tuple[str, str], force: bool = False,
    margin: Margin = DEFAULT, interleaved: bool = False,
) -> Comparison:  # fmt: skip
    """Compares two arms. Raises Refused when they are not comparable and `force` is not set.

    `interleaved` says that whoever took them let the arms take turns.
    """
    both = zip("AB", (a, b), strict=True)
    drawn = [f"arm {arm}: {w}" for arm, of in both for life in of.lives for w in drawn_words(life)]
    a, b = in_memory(a), in_memory(b)
    matched, unmatched = match(a, b)
    findings = objections(a, b, matched, names=names)
    if findings and not (force and _any_requests(a, b)):
        raise Refused(findings)
    if not matched:
        matched = [Matched(label="all sizes together (forced)", a=used(a), b=used(b))]
    sizes = [s for s in (_compare_size(m, margin=margin) for m in matched) if s is not None]
    if not sizes:
        raise Refused([_finding("no-times", "no size has a known time in both arms", "times")])
    tests = sum(1 + len(s.phases) for s in sizes)
    warnings = [*(f"FORCED although {f.found}" for f in findings), *drawn]
    if tests >= 5:
        warnings.append(
            f"{tests} intervals at 95 %: about {tests * 0.05:.1g} of them would show a change "
            "where there is none"
        )
    if not interleaved:
        warnings.append(
            "the arms were not interleaved in one log: slow drift between them is not seen"
        )
    return Comparison(
        names=names, margin=margin.words, sizes=tuple(sizes),
        hidden=tuple(hidden_differences(a, b, matched)), unmatched=tuple(unmatched),
        forced=tuple(f.found for f in findings), warnings=tuple(warnings),
    )  # fmt: skip


def used(reading: Reading) -> tuple[Request, ...]:
    """The warm, finished requests of all lives in order.

    The first of a life counts only where no life has a warm one of its size and reuse.
    """
    chosen: list[Request] = []
    for life in reading.lives:
        indices = {i for g in group_requests(life.requests) for i in g.used}
        chosen += [r for r in life.requests if r.index in indices]
    cold: set[int] = set()
    for members in by_size_and_reuse(chosen):
        first = {id(r) for r in members if r.first_of_life}
        cold |= first if len(first) < len(members) else set()
    return tuple(r for r in chosen if id(r) not in cold)


def match(a: Reading, b: Reading) -> tuple[list[Matched], list[str]]:
    """Groups found in both arms, and in words those found in one only."""
    arm_a, arm_b = used(a), [replace(r) for r in used(b)]  # told apart even if both are one log
    in_a = {id(r) for r in arm_a}
    requests = [*arm_a, *arm_b]
    matched, unmatched = [], []
    for members in by_size_and_reuse(requests):
        sides = [[r for r in members if (id(r) in in_a) == (side == 0)] for side in (0, 1)]
        title = label(members)
        if all(sides):
            matched.append(Matched(label=title, a=tuple(sides[0]), b=tuple(sides[1])))
        else:
            unmatched.append(f"{title}: only in arm {'AB'[bool(sides[1])]}")
    return matched, unmatched


def hidden_differences(a: Reading, b: Reading, matched: Sequence[Matched]) -> list[str]:
    """What differs between the arms beside their times, in words."""
    found = []
    for title, of in (("dialect", _dialects), ("version", _versions), ("switches on", _switches)):
        left, right = of(a), of(b)
        if left != right:
            found.append(f"{title}: A {_words(left)}, B {_words(right)}")
    facts_a, facts_b = _facts(a), _facts(b)
    for name in sorted({*facts_a, *facts_b}):
        left, right = facts_a.get(name, set()), facts_b.get(name, set())
        if left != right:
            found.append(f"{name}: A {_words(left)}, B {_words(right)}")
    for m in matched:
        found += _hidden_in(m)
    return found


def outer_clock(requests: Sequence[Request]) -> tuple[str, Callable[[Request], float | None]]:
    """The widest clock that every request has: first token, else the prompt clock."""
    if all(r.ttft_ms.known for r in requests):
        return "first token", lambda r: r.ttft_ms.value
    return "prompt clock", lambda r: r.prompt_ms.value


def _compare_size(m: Matched, *, margin: Margin) -> SizeComparison | None:
    clock, outer_of = outer_clock([*m.a, *m.b])
    a = [r for r in m.a if outer_of(r) is not None]
    b = [r for r in m.b if outer_of(r) is not None]
    if not a or not b:
        return None
    pairs = _pairs(a, b)
    names = phase_names([*a, *b])
    notes = [f"{name}: not known in every request, so it is in the unexplained part"
             for name in names if not _known_everywhere(name, [*a, *b])]  # fmt: skip
    names = [n for n in names if _known_everywhere(n, [*a, *b])]

    limit = margin.ms(mean([outer_of(r) or 0.0 for r in a]).value)

    def change(name: str, lane: str, of: Callable[[Request], float | None]) -> Change:
        return _change(name, lane, a, b, pairs, of, limit=limit)

    phases = tuple(change(n, "request", lambda r, n=n: _sum(r, n)) for n in names)
    outer = change(clock, "outer", outer_of)
    rest = change(
        "unexplained", "remainder",
        lambda r: (outer_of(r) or 0.0) - sum(_sum(r, n) for n in names),
    )  # fmt: skip
    explained = sum(p.by.estimate.value for p in phases)
    share = explained / outer.by.estimate.value if outer.by.moved else None
    if share is None:
        notes.append("the outer difference is not shown to differ from zero: no share is given")
    return SizeComparison(
        label=m.label, n_a=len(a), n_b=len(b), margin_ms=limit, outer=outer, phases=phases,
        overlapped=tuple(_overlapped(a, b, pairs, limit=limit)), explained_ms=explained,
        explained_share=share, unexplained=rest,
        warnings=tuple(dict.fromkeys([*notes, *outer.by.estimate.warnings])),
    )  # fmt: skip


def _change(
    name: str, lane: str, a: Sequence[Request], b: Sequence[Request],
    pairs: Sequence[tuple[Request, Request]], of: Callable[[Request], float | None], *,
    limit: float,
) -> Change:  # fmt: skip
    left, right = [of(r) or 0.0 for r in a], [of(r) or 0.0 for r in b]
    if pairs:
        by = paired_difference([(of(x) or 0.0, of(y) or 0.0) for x, y in pairs])
    else:
        by = difference(left, right)
    verdict = _verdict(by, limit=limit, absent=not any(left) and not any(right))
    return Change(name=name, lane=lane, a=mean(left), b=mean(right), by=by, verdict=verdict)


def _verdict(by: Difference, *, limit: float, absent: bool) -> str:
    if absent:
        return "absent"
    if not by.estimate.has_interval:
        return "no interval"
    small = inside(by.estimate, limit)
    if by.moved:
        return "moved, within the margin" if small else "moved"
    return "did not move" if small else "not shown to move"


def _overlapped(
    a: Sequence[Request], b: Sequence[Request], pairs: Sequence[tuple[Request, Request]], *,
    limit: float,
) -> list[Change]:  # fmt: skip
    keys = dict.fromkeys(
        (p.lane, p.name) for r in [*a, *b] for p in r.phases if p.lane != "request"
    )
    changes = []
    for lane, name in keys:
        if _known_everywhere(name, [*a, *b], lane=lane, required=True):
            of = partial(_sum, name=name, lane=lane)
            changes.append(_change(name, lane, a, b, pairs, of, limit=limit))
    return changes


def _pairs(a: Sequence[Request], b: Sequence[Request]) -> list[tuple[Request, Request]]:
    """Pairs by exact prompt size and order when both arms hold the same sizes; else none."""
    if Counter(map(size_of, a)) != Counter(map(size_of, b)):
        return []
    waiting: defaultdict[float | None, list[Request]] = defaultdict(list)
    for r in b:
        waiting[size_of(r)].append(r)
    pairs = [(r, waiting[size_of(r)].pop(0)) for r in a]
    return pairs if len(pairs) >= FEWEST_PAIRS else []


def _sum(request: Request, name: str, lane: str = "request") -> float:
    return sum(
        p.ms.value for p in request.phases
        if p.lane == lane and p.name == name and p.ms.value is not None
    )  # fmt: skip


def _known_everywhere(
    name: str, requests: Sequence[Request], *, lane: str = "request", required: bool = False
) -> bool:
    for r in requests:
        found = [p for p in r.phases if p.lane == lane and p.name == name]
        if (required and not found) or any(p.ms.value is None for p in found):
            return False
    return True


def objections(
    a: Reading, b: Reading, matched: Sequence[Matched], *, names: tuple[str, str]
) -> list[Finding]:
    where = f"{names[0]} against {names[1]}"
    found = []
    if not _any_requests(a, b):
        empty = "AB"[bool(used(a))]
        return [replace(_finding("empty-arm", f"arm {empty} has no finished request",
                                 "warm, finished requests in both arms"), where=where,
                        next_step="Give logs with finished requests in both arms.")]  # fmt: skip
    if _dialects(a) != _dialects(b):
        found.append(_finding("other-engine", _both("engines", a, b, _dialects), "one engine"))
    elif _versions(a) != _versions(b):
        found.append(
            _finding("other-revision", _both("engine revisions", a, b, _versions), "one revision")
        )
    facts_a, facts_b = _facts(a), _facts(b)
    for name in sorted({*facts_a} & {*facts_b}):
        about_model = any(w in name for w in MODEL_WORDS) and not name.startswith("--")
        if about_model and not _alike(facts_a[name], facts_b[name]):
            text = f"{name} differs: A {_words(facts_a[name])}, B {_words(facts_b[name])}"
            found.append(_finding("other-model", text, "the same model"))
    if not matched:
        sizes = [_words({int(size_of(r) or 0) for r in used(x)}) for x in (a, b)]
        text = f"no prompt size with the same reuse is in both arms: A {sizes[0]}, B {sizes[1]}"
        found.append(_finding("other-sizes", text, "common prompt sizes"))
    return [replace(f, where=where) for f in found]


def _finding(code: str, found: str, expected: str) -> Finding:
    return Finding(
        level="refusal", code=code, where="compare", found=found, expected=expected, next_step=FORCE
    )


def _hidden_in(m: Matched) -> list[str]:
    found = []
    for title, of in (
        ("reused tokens", lambda r: r.reused.value),
        ("prompt tokens", lambda r: r.prompt.value),
        ("lent slots", lambda r: r.slots_lent.value),
        ("first of its engine life", lambda r: r.first_of_life),
    ):
        left, right = sorted({of(r) for r in m.a}, key=str), sorted({of(r) for r in m.b}, key=str)
        if left != right:
            found.append(f"{m.label}: {title}: A {_words(left)}, B {_words(right)}")
    if len(m.a) != len(m.b):
        found.append(f"{m.label}: {len(m.a)} requests in A, {len(m.b)} in B")
    return found


def _any_requests(a: Reading, b: Reading) -> bool:
    return bool(used(a)) and bool(used(b))


def _dialects(reading: Reading) -> set[str]:
    return {life.dialect for life in reading.lives}


def _versions(reading: Reading) -> set[str]:
    return {life.version or "version not said" for life in reading.lives}


def _switches(reading: Reading) -> set[str]:
    return {name for life in reading.lives for name, on in life.capabilities.items() if on}


def _facts(reading: Reading) -> dict[str, set[float]]:
    facts: dict[str, set[float]] = {}
    for life in reading.lives:
        for name, number in _settings(life):
            facts.setdefault(name, set()).add(number)
    return facts


def _alike(a: set[float], b: set[float]) -> bool:
    return any(math.isclose(x, y, rel_tol=SAME_WITHIN) for x in a for y in b)


def _settings(life: Life) -> list[tuple[str, float]]:
    return [(n, v.value) for n, v in life.facts.items() if v.value is not None]


def _both(title: str, a: Reading, b: Reading, of: Callable[[Reading], set[str]]) -> str:
    return f"other {title}: A {_words(of(a))}, B {_words(of(b))}"


def _words(values: Sequence[object] | set[object] | set[str] | set[float] | set[int]) -> str:
    if not values:
        return "none"
    shown = [f"{v:g}" if isinstance(v, float) else str(v) for v in sorted(values, key=str)]
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")
