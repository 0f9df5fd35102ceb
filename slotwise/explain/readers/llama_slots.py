"""llama.cpp lines that name a request slot: `slot NAME: id .. | task ..`, key=value, oldest."""

from __future__ import annotations

import re

from slotwise.explain.readers.llama_life import LifeState
from slotwise.explain.readers.llama_lines import (
    CHECKPOINT,
    CONTEXT,
    DRAFTS,
    IDS,
    NEW_PROMPT,
    OLD_SLOT,
    PROGRESS,
    PROGRESS_OLD,
    PROGRESS_TIMED,
    REMOVE,
    SHARED,
    TIMING,
    TOOK,
    TRUNCATED,
    Clock,
    clock_of,
)
from slotwise.explain.readers.llama_request import MARKS_KEPT, Open

_NOT_NEEDED = (
    "prompt done",
    "prompt processing done",
    "init sampler",
    "restored context",
    "erased invalidated",
    "Checking checkpoint",
    "n_past was set to",
    "cache reuse",
    "acc per pos",
    "statistics",
    "selected slot",
    "n_decoded",
    "n_gen =",
    "graphs reused",
)


def slot_line(state: LifeState, line_no: int, head: str, number: int, task: int, text: str) -> bool:
    """Take a line that names a slot; whether it was understood. `head` has the line's clock."""
    if task < 0 and number not in state.open and "time =" not in text and text:
        return True
    item = state.slot(number, task, line_no)
    if item is None:
        return True
    if text.startswith("prompt processing"):
        return _progress(item, text)
    if text.startswith("processing task"):
        _launched(state, item, task)
    elif "end)" in text and (removed := REMOVE.search(text)):
        mark(state, item, int(removed[1]), clock_of(head))
    elif "time =" in text and (timing := TIMING.search(text)):
        timed(state, item, timing, line_no, clock_of(head))
    elif text.startswith("new prompt") and (new := NEW_PROMPT.search(text)):
        item.prompt, item.launched = int(new[1]), True
        if context := CONTEXT.search(text):
            state.fact("context_tokens", int(context[1]))
    else:
        return _progress(item, text) or _other(item, text) or text.startswith(_NOT_NEEDED)
    return True


def _launched(state: LifeState, item: Open, task: int) -> None:
    item.launched = True
    state.highest_task = max(state.highest_task, task)
    _take_cache(state, item)
    state.shared()


def _take_cache(state: LifeState, item: Open) -> None:
    """The prompt cache was updated for the request that is launched next."""
    if state.pending_cache is not None:
        item.cache, state.pending_cache = state.pending_cache, None


def timed(
    state: LifeState, item: Open, timing: re.Match[str], line_no: int, clock: Clock | None
) -> None:
    """One line of a timing block; the prompt's ends what a response said of the same request."""
    item.timing(timing, line_no, clock)
    if timing[1] == "prompt eval" and item.prompt_ms is not None:
        key = (round(item.prompt_ms, 2), item.read)
        state.recent.append(key)
        if state.answer is not None and state.answer_key == key:
            item.cached = state.answer.cached
            state.answer = None


def _progress(item: Open, text: str) -> bool:
    if "n_tokens" not in text:
        return False
    if new := PROGRESS.search(text):
        if new[2]:
            item.batch(int(new[1]), int(new[2]))
    elif found := PROGRESS_TIMED.search(text):
        if found[3]:
            item.timed.append((int(found[1]), float(found[3]) * 1e3, float(found[2])))
        item.untimed_read = max(item.untimed_read, int(found[1]))
    elif old := PROGRESS_OLD.search(text):
        item.batch(int(old[1]), int(old[2]))
    elif text.startswith(("prompt done", "prompt processing done")):
        item.prompt_done = True
    else:
        return False
    del item.batches[MARKS_KEPT:], item.timed[MARKS_KEPT:]
    return True


def _other(item: Open, text: str) -> bool:
    if shared := SHARED.match(text):
        item.shared = int(shared[1])
    elif CHECKPOINT.match(text):
        item.checkpoints += 1
        if took := TOOK.search(text):
            item.checkpoint_ms += float(took[1])
            item.checkpoints_timed += 1
    elif text.startswith("forcing full prompt re-processing"):
        item.forced = True
    elif text.startswith("input truncated") and (cut := TRUNCATED.search(text)):
        item.cut_from, item.prompt = item.prompt, int(cut[1])
    elif text.startswith("slot context shift"):
        item.context_shifts += 1
    elif drafts := DRAFTS.search(text):
        item.drafts = int(drafts[1]), int(drafts[2])
    elif text.startswith("stop processing"):
        item.released = True
    else:
        return not text or text.isspace()
    return True


def mark(state: LifeState, item: Open, position: int, clock: Clock | None) -> None:
    """`rm [p0, end)`: a batch begins at this position."""
    if len(item.marks) < MARKS_KEPT:
        item.marks.append((position, clock))
    state.shared()


def key_value(state: LifeState, line_no: int, line: str) -> bool:
    """`INFO [ function] message | key=value ...` and its JSON form."""
    ids = {name: int(value) for name, value in IDS.findall(line)}
    number = ids.get("id_slot", ids.get("slot_id", 0))
    task = ids.get("id_task", ids.get("task_id", -1))
    if "slot released" in line:
        item = state.open.get(number)
        if item is not None and task in (item.task, -1):
            item.released, item.last = True, line_no
        return True
    item = state.slot(number, task, line_no)
    if item is None:
        return True
    if "[p0, end)" in line:
        mark(state, item, ids.get("p0", 0), clock_of(line))
    else:
        item.launched = True
        _take_cache(state, item)
    return True


def oldest_line(state: LifeState, line_no: int, line: str) -> bool:
    """Lines of autumn 2023: `slot N is processing`, `slot N : ...`, `slot N released`."""
    found = OLD_SLOT.search(line)
    if found is None:
        return False
    number = int(found[1])
    if found["task"]:
        item = state.slot(number, int(found["task"]), line_no)
        if item is not None:
            item.launched = True
            state.shared()
        return True
    item = state.open.get(number)
    if item is None:
        return True
    if found["begin"]:
        state.switch(item)
        mark(state, item, int(found["begin"]), clock_of(line))
    elif found["cached"]:
        item.cached = int(found["cached"])
        item.prompt = item.cached + int(found["left"])
    else:
        _released(state, item)
    item.last = line_no
    return True


def _released(state: LifeState, item: Open) -> None:
    """The block printed just before is this slot's: blocks come in the order of releases."""
    block = None
    if item.prompt_ms is None:
        if state.blocks:
            block = state.blocks.popleft()
        elif state.current is not None and state.current.style == "print":
            block = state.current
    if block is not None:
        item.take_timings(block)
        if state.current is block:
            state.current = None
    item.released = True
