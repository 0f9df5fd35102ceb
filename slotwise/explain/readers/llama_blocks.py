"""llama.cpp lines that name no slot: timing blocks, `timings` JSON, tables, Ollama, start-up."""

from __future__ import annotations

from slotwise.explain.readers.common import duration_ms, request
from slotwise.explain.readers.llama_life import OPEN_LIMIT, LifeState
from slotwise.explain.readers.llama_lines import (
    BENCH_HEAD,
    BENCH_ROW,
    BENCH_TEST,
    BUILD,
    CACHE_TOOK,
    CANCEL,
    CLI_RATES,
    DRAFTS,
    FAILED,
    IDS,
    IN_PROMPT,
    JSON_FIELD,
    LOADED,
    SLOTS,
    START,
    TOTALS_ROW,
    VERBOSE,
    between_ms,
    clock_of,
)
from slotwise.explain.readers.llama_request import MARKS_KEPT, Open
from slotwise.explain.record import Request, Value

_BENCH = ("a benchmark's row, not a served request: no time to first token",)


def timing_item(state: LifeState, line_no: int, line: str, kind: str) -> Open:
    """The request a timing line belongs to: by its ids, its header line, or its block."""
    ids = {name: int(value) for name, value in IDS.findall(line)}
    slot = ids.get("id_slot", ids.get("slot_id"))
    if slot is not None and slot in state.open:
        item = state.open[slot]
        if item.task in (None, -1, ids.get("id_task", ids.get("task_id", item.task))):
            state.switch(item)
            return item
    classic = "llama_print_timings" in line or "perf_" in line
    without_ids = "print_timings:" in line and not classic
    if (classic or without_ids) and state.current is not None and state.current.slot is not None:
        state.current = None  # a program's own summary, not the slot's
    item = state.current
    fresh = kind in ("prompt eval", "load")
    if item is None or (fresh and item.prompt_ms is not None):
        item = _fresh_item(state, line_no, ids, item)
    if classic:
        item.style, state.classic = "classic", True
    elif without_ids and item.slot is None:
        item.style = "print"
    return item


def _fresh_item(state: LifeState, line_no: int, ids: dict[str, int], old: Open | None) -> Open:
    if old is not None and old.slot is not None:
        state.open.pop(old.slot, None)
        state.close(old)
        state.current = None
    slot = ids.get("id_slot", ids.get("slot_id"))
    item = Open(line_no, line_no, slot=slot)
    state.switch(item)
    item.task = ids.get("id_task", ids.get("task_id"))
    if slot is not None and len(state.open) < OPEN_LIMIT:
        state.open[slot] = item
    return item


def other_line(state: LifeState, line_no: int, whole: str, line: str) -> bool:
    """Take a line that names no slot and times nothing; whether it was understood.

    `whole` still has its clock in front.
    """
    if state.first_clock is None:
        clock = clock_of(whole)
        state.first_clock = clock if clock is not None and clock.kind == "engine" else None
    if ("prompt" in line or state.cache_start) and _cache_line(state, line_no, whole):
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
        return _start_up(state, whole)
    return True


def _flag(state: LifeState, task: int, name: str) -> None:
    """Mark the open request of this task; one that no slot had taken is only counted."""
    found = False
    for item in state.open.values():
        if item.task == task:
            setattr(item, name, True)
            found = True
    if not found and task > state.highest_task:
        state.count(f"{name}_before_a_slot")


def _cache_line(state: LifeState, line_no: int, line: str) -> bool:
    """The prompt cache is updated before a slot is launched: in no prompt eval time."""
    if took := CACHE_TOOK.search(line):
        before = state.pending_cache
        ms = float(took[2])
        if took[1] != "update" and before is not None and before.how == "measured":
            ms += before.value or 0.0
        state.pending_cache, state.cache_line = Value.measured(round(ms, 3)), line_no
        state.cache_start = None
    elif "updating prompt cache" in line:
        state.cache_start = clock_of(line)
        return True
    elif state.cache_start and (ms := between_ms(state.cache_start, clock_of(line))):
        why = "until the last line of the update that the log shows"
        state.pending_cache, state.cache_line = Value.bounded(round(ms, 3), None, why), line_no
    return state.pending_cache is not None and state.cache_line == line_no


def _json_line(state: LifeState, line_no: int, line: str) -> bool:
    """A `timings` object of a response, on one line or pretty-printed over several."""
    found = JSON_FIELD.findall(line)
    if not found and not state.json:
        return False
    state.json.update((key, float(value)) for key, value in found)
    if "}" not in line or "prompt_ms" not in state.json:
        return True
    data, state.json = state.json, {}
    key = (round(data["prompt_ms"], 2), _whole(data, "prompt_n"))
    if key in state.recent:
        return True  # the log itself told this request's timings
    item = state.answer
    if item is None or state.answer_key != key:
        if item is not None:
            state.close(item)
        item = state.answer = Open(line_no, line_no, style="json")
    state.answer_key, item.last = key, line_no
    item.prompt_ms, item.gen_ms = data["prompt_ms"], data.get("predicted_ms")
    item.read, item.generated = _whole(data, "prompt_n"), _whole(data, "predicted_n")
    item.cached = _whole(data, "cache_n")
    if "draft_n" in data:
        item.drafts = _whole(data, "draft_n_accepted") or 0, _whole(data, "draft_n") or 0
    return True


def _whole(data: dict[str, float], key: str) -> int | None:
    return int(data[key]) if key in data else None


def _ollama(state: LifeState, line_no: int, key: str, text: str) -> None:
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


def _table(state: LifeState, line_no: int, line: str) -> bool:
    """Rows of the bench programs, and a list of reads with their total time."""
    if BENCH_HEAD.search(line):
        state.bench_columns = line.count("|") - 1
        state.ik = state.ik or state.bench_columns == 7
    elif state.bench_columns and (row := BENCH_ROW.match(line)):
        cells = [float(cell) for cell in row[1].split("|") if cell.strip()]
        if len(cells) != state.bench_columns:
            return False
        state.done.append(_bench_request(len(state.done), line_no, cells))
        state.bench_rows += 1
    elif test := BENCH_TEST.search(line):
        state.done.append(_test_request(len(state.done), line_no, test.groups()))
        state.bench_rows += 1
    elif totals := TOTALS_ROW.match(line):
        _totals(state, line_no, [int(n) for n in totals[1].split(",")], float(totals[2]))
    else:
        return False
    return True


def _totals(state: LifeState, line_no: int, reads: list[int], ms: float) -> None:
    state.totals.append(
        f"{', '.join(map(str, reads))} tokens read by {len(reads)} requests took "
        f"{ms} ms together; what each took is not told"
    )
    for n in reads:
        state.done.append(
            request(
                len(state.done),
                (line_no, line_no),
                "done",
                read=Value.measured(n),
                prompt_ms=Value.missing("only the sum over all requests is told"),
                facts={"prompt_ms_of_all": Value.measured(ms)},
            )
        )
    del state.totals[MARKS_KEPT:]


def _bench_request(index: int, line_no: int, cells: list[float]) -> Request:
    """sweep-bench and batched-bench: seconds are printed. In the latter B sequences share it."""
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
        facts={"sequences": Value.measured(cells[2])} if wide else {},
        cannot_tell=_BENCH,
    )


def _test_request(index: int, line_no: int, test: tuple[str, ...]) -> Request:
    """llama-bench: a mean rate over repetitions; the time follows from it."""
    kind, count, depth, rate = test[0], int(test[1]), int(test[2] or 0), float(test[3])
    why = "tokens / the mean rate of the repetitions"
    ms = Value.derived(count / rate * 1e3, why) if rate > 0 else Value.missing("no rate")
    known: dict[str, Value] = {"reused": Value.measured(depth)}
    if kind == "pp":
        known["prompt"] = Value.derived(depth + count, "depth + tokens read")
        known["read"] = known["read_planned"] = Value.measured(count)
        known["prompt_ms"] = ms
    else:
        known["generated"], known["decode_ms"] = Value.measured(count), ms
    return request(index, (line_no, line_no), "done", **known, cannot_tell=_BENCH)


def _start_up(state: LifeState, line: str) -> bool:
    if LOADED.search(line):
        ms = between_ms(state.first_clock, clock_of(line))
        if ms is not None:
            why = "from the log's first clock to `model loaded`"
            state.facts.setdefault("load_ms", Value.derived(round(ms, 3), why))
    elif slots := SLOTS.search(line):
        state.fact("request_slots", int(slots[1]))
    elif START.search(line):
        if build := BUILD.search(line):
            state.version = f"build {int(build[1])}"
    elif rates := CLI_RATES.search(line):
        state.fact("read_tokens_per_s_as_printed", float(rates[1]))
        state.fact("decode_tokens_per_s_as_printed", float(rates[2]))
    else:
        return False
    return True
