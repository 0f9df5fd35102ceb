"""Server logs of llama.cpp, ik_llama.cpp and their forks, of all vintages.

Requests are followed per request slot and task id, so interleaved ones stay apart; blocks with
no id (`llama_print_timings`, copied timing blocks, JSON `timings`) are requests of their own.
A restart, and each port of a router's log, is a life of its own. Nothing inside
`prompt eval time` is split except where the log marks batches.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from slotwise.explain.readers.common import Shapes, duration_ms, request
from slotwise.explain.readers.llama_lines import (
    BENCH_HEAD,
    BENCH_ROW,
    BUILD,
    CACHE_UPDATE,
    CANCEL,
    CHECKPOINT,
    CONTEXT,
    DRAFTS,
    FAILED,
    IDS,
    IN_PROMPT,
    JSON_FIELD,
    LOADED,
    NEW_PROMPT,
    PROGRESS,
    PROGRESS_OLD,
    PROGRESS_TIMED,
    REMOVE,
    SHARED,
    SLOT,
    SLOTS,
    START,
    TIMING,
    TOOK,
    TOTALS_ROW,
    VERBOSE,
    Clock,
    between_ms,
    clock_of,
)
from slotwise.explain.readers.llama_request import MARKS_KEPT, Open
from slotwise.explain.record import Life, Request, Value

OPEN_LIMIT = 4096
PORTS_LIMIT = 64
_IK = re.compile(r"INFO \[|======== Prompt cache|generation eval time|batch_pending_prompt")
_NOISE = re.compile(
    "|".join(
        (
            "slots are idle",
            "done request",
            "log_server_r",
            "sampler chain",
            "Chat format",
            "selected slot by",
            "n_decoded",
            "n_gen =",
            "graphs reused",
            "statistics ",
            "cache state:",
            "- prompt 0x",
            "looking for better prompt",
            "found better prompt",
            "slot released",
            "sample time",
            "sampling time",
            "samplers time",
            "unaccounted time",
            "llama_model_loader",
            "buffer type overriden",
            "\\|---",
        )
    )
)
_READ_AND_NOT_NEEDED = (
    "prompt done",
    "prompt processing done",
    "init sampler",
    "restored context",
    "erased invalidated",
    "Checking checkpoint",
)
_VOCABULARY = """slot srv que id task INFO WARN ERR tid timestamp update_slots print_timing
    ms tokens second per n_tokens n_past prompt eval time total released launch context
    checkpoint MiB"""
_SURE = (SLOT, BENCH_HEAD, CACHE_UPDATE, re.compile(r'(?<!\\)"prompt_ms"\s*:'))
_GUARD = "whether 1 prompt token means 1 or 0: these programs print 1 for 0"
_LIFE_CANNOT = (
    "phases inside prompt eval; a client's time to first token (HTTP, queue) is not printed",
)


class _LifeState:
    """One process's requests: those open by slot, those finished, and what is pending."""

    def __init__(self, line_no: int) -> None:
        self.first_line = line_no
        self.done: list[Request] = []
        self.open: dict[int, Open] = {}
        self.current: Open | None = None
        self.pending_cache: Value | None = None
        self.cache_line = 0
        self.cache_start: Clock | None = None
        self.ik = self.classic = False
        self.ollama: dict[str, float] = {}
        self.json: dict[str, float] = {}
        self.json_last: tuple[float, float] | None = None
        self.totals: list[str] = []
        self.facts: dict[str, Value] = {}
        self.version = ""
        self.first_clock: Clock | None = None
        self.bench_columns = 0
        self.bench_rows = 0

    def used(self) -> bool:
        return bool(self.done or self.open or self.current)

    def close(self, item: Open) -> None:
        self.done.append(item.closed(len(self.done)))

    def switch(self, item: Open) -> None:
        """Make `item` the one that lines without an id belong to."""
        if self.current is not None and self.current is not item and self.current.slot is None:
            self.close(self.current)
        self.current = item

    def snapshot(self) -> list[Request]:
        """Finished and open requests in the order of their first lines."""
        still = {id(item): item for item in self.open.values()}
        if self.current is not None:
            still[id(self.current)] = self.current
        items = sorted(still.values(), key=lambda item: item.first)
        if self.pending_cache is not None:
            items.append(Open(self.cache_line, self.cache_line, cache=self.pending_cache))
        out = list(self.done)
        out += [item.closed(len(out) + n) for n, item in enumerate(items)]
        return out


class LlamaCppReader:
    """Reads one file. `finish` may be called again after more lines."""

    name = "llama.cpp"

    def __init__(self, file: str) -> None:
        self._file = file
        self._finished: list[Life] = []
        self._states: dict[str, _LifeState] = {}
        self.unknown = Shapes(_VOCABULARY)

    def sniff(self, lines: Sequence[str]) -> float:
        score = 0.0
        for line in lines:
            if "strata" in line[:40]:
                return 0.0
            if "prompt eval time" in line and TIMING.search(line):
                score += 0.5
            elif "kv cache rm [p0, end)" in line or any(p.search(line) for p in _SURE):
                score += 0.4
            elif line.startswith(("llama_", "print_info:", "ggml_", "srv ", "total duration:")):
                score += 0.1
            elif START.search(line) or IN_PROMPT.match(line) or _totals_head(line):
                score += 0.2
            if score >= 1.0:
                return 1.0
        return score

    def feed(self, line_no: int, line: str) -> None:
        state = self._state(line_no, line)
        if not self._take(state, line_no, line) and not _NOISE.search(line):
            self.unknown.see(line)

    def _state(self, line_no: int, line: str) -> _LifeState:
        """The life this line belongs to; a router puts its servers' ports in front."""
        port = ""
        if line.startswith("[") and line[1:7].partition("]")[0].isdigit():
            port = line[1:7].partition("]")[0]
        state = self._states.get(port)
        if state is None:
            if len(self._states) >= PORTS_LIMIT:
                return next(iter(self._states.values()))
            state = self._states[port] = _LifeState(line_no)
        elif ("build" in line or "load" in line) and state.used() and START.search(line):
            self._finished.append(self._life(state))
            state = self._states[port] = _LifeState(line_no)
        return state

    def _take(self, state: _LifeState, line_no: int, line: str) -> bool:
        if not state.ik and _IK.search(line):
            state.ik = True
        if "|" in line and (slot := SLOT.search(line)):
            item = _slot_item(state, line_no, slot)
            return item is None or _slot_line(state, item, line, slot[4])
        if "time" in line and "ms" in line and (timing := TIMING.search(line)):
            item = _timing_item(state, line_no, line, timing[1])
            _timing(item, timing, line_no, clock_of(line))
            return True
        if "[p0, end)" in line or "slot is processing task" in line:
            return _key_value(state, line_no, line)
        return _other(state, line_no, line)

    def finish(self) -> list[Life]:
        lives = list(self._finished)
        lives += [self._life(state) for state in self._states.values() if _tells(state)]
        return sorted(lives, key=lambda life: life.first_line)

    def _life(self, state: _LifeState) -> Life:
        requests = tuple(state.snapshot())
        return Life(
            dialect="ik_llama.cpp" if state.ik else "llama.cpp",
            version=state.version,
            file=self._file,
            first_line=state.first_line,
            capabilities={"phases": False, "request ids": any("task" in r.facts for r in requests)},
            facts=dict(state.facts),
            requests=requests,
            notes=tuple(_notes(state, requests)),
            cannot_tell=_LIFE_CANNOT if not state.classic else (*_LIFE_CANNOT, _GUARD),
        )


def _tells(state: _LifeState) -> bool:
    return state.used() or bool(state.facts or state.pending_cache or state.totals)


def _totals_head(line: str) -> bool:
    return "prompt tokens processed per request" in line


def _slot_item(state: _LifeState, line_no: int, slot: re.Match[str]) -> Open | None:
    """The open request of a slot line; a new task in a slot closes the one before."""
    number, task, text = int(slot[1] or slot[2]), int(slot[3]), slot[4]
    item = state.open.get(number)
    if task < 0 and item is None and "print_timing" not in slot[0]:
        return None
    if item is not None and task >= 0 and item.task not in (None, -1, task):
        state.close(state.open.pop(number))
        if state.current is item:
            state.current = None
        item = None
    if item is None:
        if len(state.open) >= OPEN_LIMIT:
            return None
        item = state.open[number] = Open(line_no, line_no, slot=number, task=task)
        if task >= 0 and state.pending_cache is not None and text.startswith("processing task"):
            item.cache, state.pending_cache = state.pending_cache, None
    item.last = line_no
    state.switch(item)
    return item


def _slot_line(state: _LifeState, item: Open, line: str, text: str) -> bool:
    if "time =" in text and (timing := TIMING.search(text)):
        _timing(item, timing, item.last, clock_of(line))
        return True
    if text.startswith("processing task"):
        item.launched = True
        _mark_shared(state)
    elif "end)" in text and (removed := REMOVE.search(text)):
        _mark(state, item, int(removed[1]), clock_of(line))
    elif text.startswith("new prompt") and (new := NEW_PROMPT.search(text)):
        item.prompt, item.launched = int(new[1]), True
        if context := CONTEXT.search(text):
            state.facts["context_tokens"] = Value.measured(int(context[1]))
    elif _progress(item, text) or _state_line(item, text):
        pass
    else:
        return not text or _NOISE.search(line) is not None
    return True


def _progress(item: Open, text: str) -> bool:
    if "n_tokens" not in text:
        return False
    if old := PROGRESS_OLD.search(text):
        item.batch(int(old[1]), int(old[2]))
    elif new := PROGRESS.search(text):
        if new[2]:
            item.batch(int(new[1]), int(new[2]))
    elif timed := PROGRESS_TIMED.search(text):
        if timed[3]:
            item.timed.append((int(timed[1]), float(timed[3]) * 1e3, float(timed[2])))
        item.untimed_read = max(item.untimed_read, int(timed[1]))
    else:
        return False
    del item.batches[MARKS_KEPT:], item.timed[MARKS_KEPT:]
    return True


def _state_line(item: Open, text: str) -> bool:
    if shared := SHARED.match(text):
        item.shared = int(shared[1])
    elif CHECKPOINT.match(text):
        item.checkpoints += 1
        if took := TOOK.search(text):
            item.checkpoint_ms += float(took[1])
            item.checkpoints_timed += 1
    elif text.startswith("forcing full prompt re-processing"):
        item.forced = True
    elif drafts := DRAFTS.search(text):
        item.drafts = int(drafts[1]), int(drafts[2])
    elif text.startswith("stop processing"):
        item.released = True
    else:
        return text.startswith(_READ_AND_NOT_NEEDED)
    return True


def _mark(state: _LifeState, item: Open, position: int, clock: Clock | None) -> None:
    if len(item.marks) < MARKS_KEPT:
        item.marks.append((position, clock))
    _mark_shared(state)


def _mark_shared(state: _LifeState) -> None:
    """Several slots that read or answer at the same time share the engine's batches."""
    busy = [o for o in state.open.values() if o.launched and not o.released and o.total_ms is None]
    if len(busy) > 1:
        for item in busy:
            item.shared_batches = item.shared_batches or item.prompt_ms is None


def _key_value(state: _LifeState, line_no: int, line: str) -> bool:
    """`INFO [ function] message | key=value ...` and its JSON form."""
    ids = {name: int(value) for name, value in IDS.findall(line)}
    slot = ids.get("id_slot", ids.get("slot_id", 0))
    task = ids.get("id_task", ids.get("task_id", -1))
    item = state.open.get(slot)
    if item is not None and item.task not in (None, -1, task):
        state.close(state.open.pop(slot))
        item = None
    if item is None:
        if len(state.open) >= OPEN_LIMIT:
            return True
        item = state.open[slot] = Open(line_no, line_no, slot=slot, task=task)
    item.last = line_no
    state.switch(item)
    if "[p0, end)" in line:
        _mark(state, item, ids.get("p0", 0), clock_of(line))
    else:
        item.launched = True
    return True


def _timing_item(state: _LifeState, line_no: int, line: str, kind: str) -> Open:
    """The request a timing line belongs to: by its ids, its header line, or its block."""
    ids = {name: int(value) for name, value in IDS.findall(line)}
    slot = ids.get("id_slot", ids.get("slot_id"))
    if slot is not None and slot in state.open:
        item = state.open[slot]
        if item.task in (None, -1, ids.get("id_task", ids.get("task_id", item.task))):
            state.switch(item)
            return item
    classic = "llama_print_timings" in line or "perf_" in line
    if classic and state.current is not None and state.current.slot is not None:
        state.current = None  # a program's own summary, not the slot's
    item = state.current
    fresh = kind in ("prompt eval", "load")
    if item is None or (fresh and item.prompt_ms is not None):
        if item is not None:
            if item.slot is not None:
                state.open.pop(item.slot, None)
            state.close(item)
        item = state.current = Open(line_no, line_no, slot=slot)
        item.task = ids.get("id_task", ids.get("task_id"))
        if slot is not None and len(state.open) < OPEN_LIMIT:
            state.open[slot] = item
    if classic:
        item.style, state.classic = "classic", True
    return item


def _timing(item: Open, timing: re.Match[str], line_no: int, clock: Clock | None) -> None:
    kind, ms, count = timing.groups()
    item.last = line_no
    if kind == "prompt eval":
        item.prompt_ms = float(ms)
        item.read = int(count) if count else None
        item.end = clock
    elif kind == "total":
        item.total_ms = float(ms)
    elif kind == "load":
        item.load_ms = float(ms)
    else:
        item.gen_ms = float(ms)
        item.generated = int(count) if count else None


def _other(state: _LifeState, line_no: int, line: str) -> bool:
    if state.first_clock is None:
        clock = clock_of(line)
        state.first_clock = clock if clock is not None and clock.kind == "engine" else None
    if ("prompt" in line or state.cache_start) and _cache_line(state, line_no, line):
        return True
    if ('"' in line or state.json) and _json_line(state, line_no, line):
        return True
    if "cancel task" in line and (cancel := CANCEL.search(line)):
        _flag(state, int(cancel[1]), "cancelled")
    elif "send_error" in line and (failed := FAILED.search(line)):
        _flag(state, int(failed[1]), "failed")
    elif ":" in line and (verbose := VERBOSE.match(line)):
        _ollama(state, line_no, verbose[1], verbose[2])
    elif "draft acceptance" in line and (drafts := DRAFTS.search(line)):
        if state.current is not None:
            state.current.drafts = int(drafts[1]), int(drafts[2])
    elif found := IN_PROMPT.match(line):
        state.classic = True
        state.switch(Open(line_no, line_no, style="classic", prompt=int(found[1])))
    elif "|" in line and _table(state, line_no, line):
        pass
    else:
        return _start_up(state, line)
    return True


def _flag(state: _LifeState, task: int, name: str) -> None:
    for item in state.open.values():
        if item.task == task:
            setattr(item, name, True)


def _cache_line(state: _LifeState, line_no: int, line: str) -> bool:
    """The prompt cache is updated before a slot is launched: in no prompt eval time."""
    if update := CACHE_UPDATE.search(line):
        state.pending_cache, state.cache_line = Value.measured(float(update[1])), line_no
        state.cache_start = None
    elif "updating prompt cache" in line:
        state.cache_start = clock_of(line)
        return True
    elif state.cache_start and (ms := between_ms(state.cache_start, clock_of(line))):
        why = "until the last line of the update that the log shows"
        state.pending_cache, state.cache_line = Value.bounded(round(ms, 3), None, why), line_no
    return state.pending_cache is not None and state.cache_line == line_no


def _json_line(state: _LifeState, line_no: int, line: str) -> bool:
    """A `timings` object of a response, on one line or pretty-printed over several."""
    found = JSON_FIELD.findall(line)
    if not found and not state.json:
        return False
    state.json.update((key, float(value)) for key, value in found)
    if "}" not in line or "prompt_ms" not in state.json:
        return True
    data, state.json = state.json, {}
    key = (data["prompt_ms"], data.get("prompt_n", -1.0))
    again = state.json_last == key and state.current is not None
    item = state.current if again and state.current is not None else None
    if item is None:
        item = Open(line_no, line_no, style="json")
        state.switch(item)
    state.json_last, item.last = key, line_no
    item.prompt_ms, item.gen_ms = data["prompt_ms"], data.get("predicted_ms")
    item.read, item.generated = _whole(data, "prompt_n"), _whole(data, "predicted_n")
    item.cached = _whole(data, "cache_n")
    if "draft_n" in data:
        item.drafts = _whole(data, "draft_n_accepted") or 0, _whole(data, "draft_n") or 0
    return True


def _whole(data: dict[str, float], key: str) -> int | None:
    return int(data[key]) if key in data else None


def _ollama(state: _LifeState, line_no: int, key: str, text: str) -> None:
    """Ollama's `--verbose` block; its rates are not read, they follow from the rest."""
    if key == "total duration" or (key == "prompt eval count" and key in state.ollama):
        state.ollama = {}
    if "duration" in key:
        state.ollama[key] = duration_ms(text) or 0.0
    elif key.endswith("count") and text.isdigit():
        state.ollama[key] = float(text[:12])
    got = state.ollama
    if key != "prompt eval duration" and key != "eval duration":
        return
    if state.current is None or state.current.style != "ollama" or key == "prompt eval duration":
        state.switch(Open(line_no, line_no, style="ollama"))
    item = state.current
    if item is None:
        return
    item.last, item.load_ms = line_no, got.get("load duration")
    item.total_ms = got.get("total duration")
    item.prompt_ms, item.gen_ms = got.get("prompt eval duration"), got.get("eval duration")
    item.read, item.generated = _whole(got, "prompt eval count"), _whole(got, "eval count")


def _table(state: _LifeState, line_no: int, line: str) -> bool:
    """Rows of sweep-bench and batched-bench, and a list of reads with their total time."""
    if BENCH_HEAD.search(line):
        state.bench_columns = line.count("|") - 1
        state.ik = state.ik or state.bench_columns == 7
    elif state.bench_columns and (row := BENCH_ROW.match(line)):
        cells = [float(cell) for cell in row[1].split("|") if cell.strip()]
        if len(cells) != state.bench_columns:
            return False
        state.done.append(_bench_request(len(state.done), line_no, cells))
        state.bench_rows += 1
    elif totals := TOTALS_ROW.match(line):
        reads = [int(n) for n in totals[1].split(",")]
        state.totals.append(
            f"{', '.join(map(str, reads))} tokens read by {len(reads)} requests took "
            f"{float(totals[2])} ms together; what each took is not told"
        )
        for n in reads:
            state.done.append(
                request(
                    len(state.done),
                    (line_no, line_no),
                    "done",
                    read=Value.measured(n),
                    prompt_ms=Value.missing("only the sum over all requests is told"),
                    facts={"prompt_ms_of_all": Value.measured(float(totals[2]))},
                )
            )
        del state.totals[MARKS_KEPT:]
    else:
        return False
    return True


def _bench_request(index: int, line_no: int, cells: list[float]) -> Request:
    wide = len(cells) == 10
    read, generated, total = cells[0], cells[1], cells[3 if wide else 2]
    seconds, answer = cells[4 if wide else 3], cells[6 if wide else 5]
    reused = Value.measured(0 if wide else total)
    return request(
        index,
        (line_no, line_no),
        "done",
        prompt=Value.derived(read + (reused.value or 0), "tokens in the cache + tokens read"),
        reused=reused,
        read=Value.measured(read),
        read_planned=Value.measured(read),
        generated=Value.measured(generated),
        prompt_ms=Value.measured(seconds * 1e3),
        decode_ms=Value.measured(answer * 1e3),
        cannot_tell=("a benchmark's row, not a served request: no time to first token",),
    )


def _start_up(state: _LifeState, line: str) -> bool:
    if LOADED.search(line):
        ms = between_ms(state.first_clock, clock_of(line))
        if ms is not None:
            why = "from the log's first clock to `model loaded`"
            state.facts.setdefault("load_ms", Value.derived(round(ms, 3), why))
    elif slots := SLOTS.search(line):
        state.facts["request_slots"] = Value.measured(int(slots[1]))
    elif START.search(line):
        if build := BUILD.search(line):
            state.version = f"build {int(build[1])}"
    else:
        return False
    return True


def _notes(state: _LifeState, requests: tuple[Request, ...]) -> list[str]:
    notes = list(state.totals)
    if state.bench_rows:
        notes.append(f"{state.bench_rows} rows are a benchmark's table, not served requests")
    reads = [r.read.value for r in requests if r.read.value and r.read.value > 1]
    if len(reads) > 1 and max(reads) >= 2 * min(reads):
        notes.append(
            f"reads range from {min(reads):.0f} to {max(reads):.0f} tokens: speeds at different "
            "lengths do not compare"
        )
    reused = [r.reused.value for r in requests if r.reused.how == "measured"]
    if len(reused) > 1 and not any(reused):
        notes.append(
            "no request reused anything: either prompts share no beginning or the client did "
            "not ask for it (cache_prompt); the log cannot tell which"
        )
    if state.ik:
        notes.append("llama.cpp before September 2024 printed the same lines as ik_llama.cpp")
    return notes
