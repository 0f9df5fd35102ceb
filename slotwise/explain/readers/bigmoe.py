"""BigMoeOnEdge's run summaries (`generation:`, `prefill:`, `moe-stream:` ...) and its CSV.

One run is one process, so one life with one request. Its TTFT is prefill + model load. Decode
parts are per token and overlap when reads do, so they are facts, never phases that add up. A
run on mmap has no I/O counters: page faults are unknown, not zero.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from slotwise.explain.readers.common import INT, NUM, Shapes, request, size_warnings, to_ms
from slotwise.explain.readers.envelope import unwrapped
from slotwise.explain.record import Life, Phase, Request, Value

_GENERATION = re.compile(rf"generation: ({INT}) tokens, ({NUM}) s/token")
_PREFILL = re.compile(
    rf"prefill: ({INT}) tokens, ({NUM}) s\b.*?"
    rf"(?:\| model load ({NUM}) s)?(?: \| TTFT ({NUM}) s)?\s*$"
)
_STREAM = re.compile(
    rf"moe-stream: read ({NUM}) MiB.*?decode ({NUM}) s/token \(compute ({NUM})"
    rf"(?: \+ cache mgmt ({NUM}))? \+ flash I/O ({NUM}) s/token"
)
_CACHE = re.compile(rf"moe-cache: ({NUM})% hit, resident ({NUM}) MiB")
_STALL = re.compile(rf"moe-overlap: stall ({NUM}) s/token")
_FAULTS = re.compile(rf"compute: .*?({NUM}) major faults/token")
_CSV_HEAD = ("step", "steps", "wall_ms")
_ROW = re.compile(rf"-?{NUM}(?:,-?{NUM}){{2,15}}")
_KNOWN = re.compile(
    r"^(?:(?:peak_rss|mem_avail|batt_temp|cpu_temp)\w*=\d+|ENTRY:|EXIT:|=+ .* =+$|\d+% cpu=|"
    r"mode: |moe-\w|compute: |mtp: |ngram: )"
)
_NO_IO = "a run on mmap has no I/O counters: page faults are unknown, not zero"
_OVERLAP = "reads overlap compute: decode parts add up to more than a token and must not be added"
_CANNOT = (
    "what prefill waited for: byte and stall counters are per decode token",
    "time inside the operating system (page faults, throttling)",
)


@dataclass
class _Run:
    first: int
    last: int
    generated: int | None = None
    token_s: float | None = None
    prefill: tuple[int, float] | None = None
    load_s: float | None = None
    ttft_s: float | None = None
    parts: tuple[float, ...] = ()
    decode_s: float | None = None
    facts: dict[str, Value] = field(default_factory=dict)
    rows: int = 0
    rows_ms: float = 0.0
    rows_io: float = 0.0
    rows_hit: float = -1.0


class BigMoeReader:
    """A run begins at its `generation:` line (or at the header of a CSV)."""

    name = "bigmoe"

    def __init__(self, file: str) -> None:
        self._file = file
        self._runs: list[_Run] = []
        self._columns: list[str] = []
        self.unknown = Shapes("generation prefill tokens token tok model load TTFT moe read MiB")

    def sniff(self, lines: Sequence[str]) -> float:
        score = 0.0
        for _, line in map(unwrapped, lines):
            if line.startswith(("moe-stream:", "moe-cache:")) or (
                _GENERATION.search(line[:80]) or ("| model load" in line and _PREFILL.search(line))
            ):
                score += 0.5
            elif line.lstrip("\ufeff").startswith("step,steps,wall_ms"):
                score += 0.9
            if score >= 0.95:
                return 0.95
        return score

    def feed(self, line_no: int, line: str) -> None:
        _, line = unwrapped(line.lstrip("\ufeff"))
        if line.startswith("step,steps,"):
            self._columns = line.strip().split(",")[:32]
            self._runs.append(_Run(line_no, line_no))
        elif self._columns and _ROW.fullmatch(line.strip()):
            self._row(line_no, line.strip().split(","))
        elif not self._summary(line_no, line) and not _KNOWN.match(line):
            self.unknown.see(line)

    def _summary(self, line_no: int, line: str) -> bool:
        if found := _GENERATION.search(line[:200]):
            run = _Run(line_no, line_no, int(found[1]), float(found[2]))
            self._runs.append(run)
            return True
        if not self._runs:
            return False
        run = self._runs[-1]
        if found := _PREFILL.search(line):
            run.prefill = int(found[1]), float(found[2])
            run.load_s = float(found[3]) if found[3] else None
            run.ttft_s = float(found[4]) if found[4] else None
        elif found := _STREAM.search(line):
            run.facts["read_mib"] = Value.measured(float(found[1]))
            run.decode_s = float(found[2])
            run.parts = tuple(float(part) for part in found.groups()[2:] if part)
            for name, part in zip(
                ("compute", "cache_mgmt", "flash_io"), found.groups()[2:], strict=True
            ):
                if part:
                    run.facts[f"{name}_ms_per_token"] = Value.measured(to_ms(float(part)))
        elif found := _CACHE.search(line):
            run.facts["hit_percent"] = Value.measured(float(found[1]))
            run.facts["resident_mib"] = Value.measured(float(found[2]))
        elif found := _STALL.search(line):
            run.facts["stall_ms_per_token"] = Value.measured(to_ms(float(found[1])))
        elif found := _FAULTS.search(line):
            run.facts["major_faults_per_token"] = Value.measured(float(found[1]))
        else:
            return False
        run.last = line_no
        return True

    def _row(self, line_no: int, cells: list[str]) -> None:
        run = self._runs[-1]
        row = dict(zip(self._columns, cells, strict=False))
        run.last = line_no
        run.rows += 1
        run.rows_ms += float(row.get("wall_ms", 0))
        run.rows_io += float(row.get("io_ms", 0))
        run.rows_hit = max(run.rows_hit, float(row.get("cache_hit_pct", -1)))

    def finish(self) -> list[Life]:
        return [self._life(run) for run in self._runs]

    def _life(self, run: _Run) -> Life:
        streamed = bool(run.parts) or run.rows_io > 0 or run.rows_hit >= 0
        return Life(
            dialect=self.name,
            file=self._file,
            first_line=run.first,
            capabilities={"io counters": streamed, "prefill phases": False},
            requests=(_request(run, streamed),),
            cannot_tell=_CANNOT if streamed else (_NO_IO, *_CANNOT),
        )


def _request(run: _Run, streamed: bool) -> Request:
    warnings, facts = [], dict(run.facts)
    if run.parts and run.decode_s is not None and sum(run.parts) > run.decode_s + 0.0025:
        warnings.append(_OVERLAP)
    if not streamed:
        facts["flash_io_ms_per_token"] = Value.missing(_NO_IO)
    known: dict[str, Value] = {}
    phases: list[Phase] = []
    if run.prefill is not None:
        tokens, seconds = run.prefill
        known["prompt"] = known["read"] = Value.measured(tokens)
        known["reused"] = Value.measured(0)
        known["read_planned"] = Value.measured(tokens)
        known["prompt_ms"] = Value.measured(to_ms(seconds))
        warnings += size_warnings(known["read"])
        if run.load_s is not None:
            phases.append(Phase("model load", Value.measured(to_ms(run.load_s))))
            warnings.append("the time to first token holds the model's load (a cold start)")
        phases.append(Phase("prefill", Value.measured(to_ms(seconds)), tokens=tokens))
    if run.ttft_s is not None:
        known["ttft_ms"] = Value.measured(to_ms(run.ttft_s))
    if run.generated is not None and run.token_s is not None:
        known["generated"] = Value.measured(run.generated)
        why = "tokens x printed time per token"
        known["decode_ms"] = Value.derived(run.generated * run.token_s * 1e3, why)
    elif run.rows:
        known["generated"] = Value.measured(run.rows)
        known["decode_ms"] = Value.derived(round(run.rows_ms, 3), "sum of the steps")
    return request(
        0,
        (run.first, run.last),
        "done" if known else "incomplete",
        **known,
        phases=tuple(phases),
        warnings=tuple(warnings),
        cannot_tell=() if streamed else (_NO_IO,),
        facts=facts,
    )
