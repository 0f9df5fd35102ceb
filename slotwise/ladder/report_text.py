"""A ladder's report on a terminal, and as JSON. Nothing is computed here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from slotwise.explain import wording
from slotwise.explain.json_out import plain
from slotwise.explain.report_arms import comparison
from slotwise.explain.report_parts import bullets, heading, plain_table, sentence
from slotwise.explain.report_summary import read_cost, terms
from slotwise.explain.stats import Estimate
from slotwise.ladder.report import ArmReport, LadderReport, Row, Share

REPORT_SCHEMA = "slotwise.ladder-report/v1"
SHARES = ("first_token", "read", "refill", "conversation", "rest")
Cell = Callable[[Row], str]


def terminal(report: LadderReport) -> RenderableType:
    """Arms one after the other, then against the first, then what there is to be careful of."""
    parts: list[RenderableType] = [*_head(report.record)]
    for arm in report.arms:
        parts += [Text(""), *_arm(arm)]
    shared = {s.names for s in report.shares}
    for result in report.comparisons:
        if result.names not in shared:
            parts += [Text(""), comparison(result)]
    if report.shares:
        parts += [Text(""), *_shares(report.shares)]
        parts += bullets([f"also differs: {t}" for c in report.comparisons for t in c.hidden])
    parts.append(Text(""))
    parts += bullets([f"not compared: {text}" for text in report.not_compared], style="yellow")
    parts += bullets([f"warning: {text}" for text in report.warnings], style="yellow")
    return Group(*parts)


def document(report: LadderReport) -> dict[str, Any]:
    """The report as one JSON document; the raw samples are in the record."""
    head = {k: report.record[k] for k in ("run", "status", "started", "ended", "plan", "service")}
    return {"schema": REPORT_SCHEMA, **head, **plain({
        "arms": report.arms, "comparisons": report.comparisons, "shares": report.shares,
        "not_compared": report.not_compared, "warnings": report.warnings,
    })}  # fmt: skip


def headline(record: Mapping[str, Any]) -> str:
    """What ran where, in one sentence."""
    servers = [server for arm in record["arms"] for server in arm["servers"]]
    known = dict.fromkeys(
        " ".join(filter(None, (s["software"], s["version"]))) or "a server" for s in servers
    )
    models = dict.fromkeys(m["name"] for s in servers for m in s["models"])
    return f"{', '.join(known) or 'no server'} with {', '.join(models) or 'no model'}"


def columns(rows: Sequence[Row]) -> list[tuple[str, Cell]]:
    """The columns of the table that some row can fill."""
    able: list[tuple[str, Callable[[Row], Any], Cell]] = [
        ("tokens", lambda r: r.tokens, lambda r: f"{r.tokens:,.0f}"),
        ("read", lambda r: r.read, lambda r: _estimate(r.read)),
        ("refill", lambda r: r.refill, lambda r: _estimate(r.refill)),
        ("lent slots", lambda r: r.lent, lambda r: _whole(r.lent)),
        ("refill per slot", lambda r: r.per_slot, lambda r: _value(r.per_slot)),
        ("checkpoint", lambda r: r.checkpoint, lambda r: _estimate(r.checkpoint)),
        ("prompt clock", lambda r: r.prompt_clock, lambda r: _estimate(r.prompt_clock)),
        ("first token", lambda r: r.first_token, lambda r: _estimate(r.first_token)),
        ("between events", lambda r: r.next_token, lambda r: _value(r.next_token)),
        ("n", lambda r: r.n, lambda r: str(r.n)),
    ]
    return [(name, cell) for name, of, cell in able if any(of(r) is not None for r in rows)]


def counts(arm: ArmReport) -> list[str]:
    """How many samples are in no number, and why."""
    return [f"{n} of {sum(arm.statuses.values())} samples: {why}" for why, n in arm.reasons.items()]


def _head(record: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield heading(f"Ladder of {headline(record)}")
    plan, machine = record["plan"], record["machine"]
    sizes = ", ".join(f"{size:,}" for size in plan["sizes"])
    yield sentence(
        f"{plan['samples']} samples of {sizes} tokens per arm beside the cold ones, seed "
        f"{plan['seed']}; text: {plan['text']['name']}; client on {machine.get('processor')}"
    )
    pairing = record["pairing"]
    if pairing is not None:
        yield sentence(
            f"{pairing['paired']} of {len(record['samples'])} samples paired with a trace: "
            f"{pairing['method']}"
        )
    service = record["service"]
    if service is not None:
        state = "restored" if service["restored"] else "NOT RESTORED"
        yield sentence(f"production {state}: HTTP {service['http_status']}")


def _arm(arm: ArmReport) -> Iterator[RenderableType]:
    yield heading(f"Arm {arm.name}: mean ms, 95 % interval")
    if arm.rows:
        yield _table(arm.rows)
        yield from read_cost(arm.read)
        if arm.first_token is not None:
            fit = arm.first_token
            yield sentence(f"first token: {wording.formula(fit)} (n = {fit.n})")
            yield from bullets([*terms(fit), *fit.warnings])
        if arm.refill is not None:
            yield sentence(f"refill: {wording.estimate_text(arm.refill.rate.terms[0])}")
            yield from bullets([arm.refill.words])
    else:
        yield sentence("no usable sample")
    if arm.first_rows:
        yield sentence("its first samples, while the server was cold:")
        yield _table(arm.first_rows)
    if arm.proofs:
        yield sentence(f"switched on: {'; '.join(proof.words for proof in arm.proofs)}")
    yield from bullets(counts(arm), style="yellow")


def shares_rows(shares: Sequence[Share]) -> list[tuple[str, ...]]:
    """(arms, size, then the changes of the first token and of what it is made of)."""
    return [
        (f"{s.names[1]} - {s.names[0]}", s.label,
         *(wording.change_text(getattr(s, part)) for part in SHARES))
        for s in shares
    ]  # fmt: skip


def _shares(shares: Sequence[Share]) -> Iterator[RenderableType]:
    yield heading("Where the difference lies: change in ms, 95 % interval")
    table = None
    for arms, *row in shares_rows(shares):
        if table is None or arms != table.title:
            if table is not None:
                yield table
            table = plain_table("size", *(part.replace("_", " ") for part in SHARES))
            table.title, table.title_justify = arms, "left"
            for column, part in zip(table.columns[1:], SHARES, strict=True):
                column.min_width = max(map(len, part.split("_")))
        table.add_row(*row)
    if table is not None:
        yield table
    yield sentence("conversation is lookup, restore and checkpoint; the four add up")
    yield sentence("every phase: slotwise explain compare RECORD:ARM RECORD:ARM")


def _table(rows: Sequence[Row]) -> RenderableType:
    shown = columns(rows)
    table = plain_table(*(name for name, _ in shown))
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        table.add_row(*(cell(row) for _, cell in shown))
    return table


def _estimate(estimate: Estimate | None) -> str:
    """`45.1 ± 2.0`; the interval itself where it is not symmetric."""
    if estimate is None:
        return "-"
    text = wording.number(estimate.value)
    if estimate.low is None or estimate.high is None:
        return text
    below, above = estimate.value - estimate.low, estimate.high - estimate.value
    if abs(above - below) > 1e-6 * max(above, below):
        return f"{text} {wording.interval_text(estimate)}"
    return f"{text} ± {wording.number(above)}"


def _value(estimate: Estimate | None) -> str:
    return "-" if estimate is None else wording.number(estimate.value)


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
