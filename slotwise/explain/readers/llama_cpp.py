"""Server logs of llama.cpp, ik_llama.cpp and their forks, of all vintages.

Requests are followed per request slot and task id, so interleaved ones stay apart; blocks with
no id (`llama_print_timings`, copied timing blocks, JSON `timings`) are requests of their own.
A restart, and each process that a router's, a container's or a journal's line names, is a life
of its own. Nothing inside `prompt eval time` is split except where the log marks batches.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from slotwise.explain.readers.common import Shapes
from slotwise.explain.readers.envelope import unwrapped
from slotwise.explain.readers.lines import as_text
from slotwise.explain.readers.llama_blocks import other_line, timing_item
from slotwise.explain.readers.llama_life import LifeState
from slotwise.explain.readers.llama_lines import (
    BENCH_HEAD,
    BENCH_TEST,
    CACHE_TOOK,
    CLI_RATES,
    IN_PROMPT,
    NOISE,
    OLD_SLOT,
    SLOT,
    SLOT_BYTES,
    START,
    TIMING,
    VERBOSE_RUN,
    clock_of,
)
from slotwise.explain.readers.llama_slots import key_value, oldest_line, slot_line, timed
from slotwise.explain.record import Life

PROCESSES_LIMIT = 64
FORK_S = 1_725_000_000
"""End of August 2024, in Unix seconds: about when the fork was first used and llama.cpp's own
lines changed."""
_IK = re.compile(r"INFO \[|======== Prompt cache|generation eval time|batch_pending_prompt")
_OWN_JSON = re.compile(r'"(?:msg|message)"\s*:\s*"\s*$')
_VOCABULARY = """slot srv que id task INFO WARN ERR tid timestamp update_slots print_timing
    ms tokens second per n_tokens n_past prompt eval time total released launch context
    checkpoint MiB"""
_ANSWER = re.compile(r'(?<!\\)"prompt_ms"\s*:')
_SURE = (SLOT, OLD_SLOT, BENCH_HEAD, BENCH_TEST, CACHE_TOOK, CLI_RATES, _ANSWER)
_HEADS = ("llama_", "print_info:", "ggml_", "srv ", "total duration:", "load_tensors:")


class LlamaCppReader:
    """Reads one file. `finish` may be called again after more lines."""

    name = "llama.cpp"

    def __init__(self, file: str) -> None:
        self._file = file
        self._finished: list[Life] = []
        self._states: dict[str, LifeState] = {}
        self.unknown = Shapes(_VOCABULARY)

    def sniff(self, lines: Sequence[str]) -> float:
        score = 0.0
        for line in lines:
            if "strata" in line[:40]:
                return 0.0
            _, line = unwrapped(line)
            if "prompt eval time" in line and TIMING.search(line):
                score += 0.5
            elif (
                "kv cache rm [p0, end)" in line
                or any(p.search(line) for p in _SURE)
                or _ANSWER.search(line)
            ):
                score += 0.4
            elif line.startswith(_HEADS):
                score += 0.1
            elif START.search(line) or IN_PROMPT.match(line) or _totals_head(line):
                score += 0.2
            if score >= 1.0:
                return 1.0
        return score

    def feed(self, line_no: int, line: str) -> None:
        key, text = unwrapped(line)
        state = self._state(line_no, key, text)
        if not self._take(state, line_no, line, text) and not NOISE.search(text):
            self.unknown.see(text)

    def feed_block(self, line_no: int, block: bytes) -> int:
        """Take whole lines; return the number of the line after them."""
        block += b"\n"  # the last line is like the others
        at, size = 0, len(block)
        skip, slot_at = VERBOSE_RUN.match, SLOT_BYTES.match
        while at < size:
            if run := skip(block, at):
                end = run.end()
                line_no += block.count(b"\n", at, end)
                at = end
                continue
            if slot := slot_at(block, at):
                self._slot(line_no, slot)
                at = slot.end()
            else:
                end = block.index(b"\n", at)
                self.feed(line_no, as_text(block[at:end]))
                at = end + 1
            line_no += 1
        return line_no

    def _slot(self, line_no: int, slot: re.Match[bytes]) -> None:
        head, number, task, rest = slot.groups()
        text = rest.decode("utf-8", "replace")
        state = self._states.get("")
        if state is None or (task == b"0" and text.startswith("processing task")):
            state = self._state(line_no, "", "| task 0 | " + text)
        known = slot_line(state, line_no, head.decode(), int(number), int(task), text)
        if not known and not NOISE.search(text):
            self.unknown.see(f"slot | {text}")

    def _state(self, line_no: int, key: str, text: str) -> LifeState:
        """The life this line belongs to; a start after requests begins another."""
        state = self._states.get(key)
        if state is None:
            if len(self._states) >= PROCESSES_LIMIT:
                return next(iter(self._states.values()))
            state = self._states[key] = LifeState(line_no)
        elif state.used() and _begins(state, text):
            self._finished.append(state.life(self._file))
            state = self._states[key] = LifeState(line_no)
        return state

    def _take(self, state: LifeState, line_no: int, line: str, text: str) -> bool:
        """`line` still has its clock in front, `text` is what the engine wrote."""
        if not state.ik and _IK.search(text):
            state.ik = not _before_ik(text)
        if "|" in text and (slot := SLOT.search(text)) and not _quoted(text, slot.start()):
            number = int(slot[1] or slot[2])
            return slot_line(state, line_no, line, number, int(slot[3]), slot[4])
        if "time" in text and "ms" in text and (timing := TIMING.search(text)):
            if _quoted(text, timing.start()):
                return False
            item = timing_item(state, line_no, text, timing[1])
            timed(state, item, timing, line_no, clock_of(line))
            return True
        if "[p0, end)" in text or "slot is processing task" in text or "slot released" in text:
            return key_value(state, line_no, text)
        if "slot " in text and oldest_line(state, line_no, text):
            return True
        return other_line(state, line_no, line, text)

    def finish(self) -> list[Life]:
        lives = list(self._finished)
        lives += [state.life(self._file) for state in self._states.values() if state.tells()]
        return sorted(lives, key=lambda life: life.first_line)


def _begins(state: LifeState, text: str) -> bool:
    """Whether a process starts here: by its first lines, or by the first task coming again."""
    if "build" in text or "load" in text or "system" in text:
        return START.search(text) is not None and not state.bench_rows
    return state.highest_task > 0 and "| task 0 | processing task" in text and "{" not in text


def _before_ik(text: str) -> bool:
    """Whether the line's own time lies before the fork; llama.cpp wrote the same lines then."""
    clock = clock_of(text)
    return clock is not None and clock.kind == "stamp" and clock.s < FORK_S


def _quoted(text: str, start: int) -> bool:
    """Whether a timing stands inside JSON that is not the log's own: a request that quotes one."""
    return "{" in text[:start] and _OWN_JSON.search(text, 0, start) is None


def _totals_head(line: str) -> bool:
    return "prompt tokens processed per request" in line
