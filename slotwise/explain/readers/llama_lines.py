"""The grammar of llama.cpp's and ik_llama.cpp's server logs: patterns and clocks, no state.

Formats were seen in public logs of 2023 to 2026: `llama_print_timings`, `common_perf_print`,
key=value and JSON lines, `slot NAME: id .. | task ..`, and the shorter names of forks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from slotwise.explain.readers.common import INT, NUM

TIMING = re.compile(
    rf"(prompt eval|generation eval|eval|total|load)\s+time\s*=\s*({NUM})\s*ms"
    rf"(?:\s*/\s*({INT})\s*(?:tokens|runs))?"
)
SLOT = re.compile(
    rf"slot(?:\s*[\w()]*:?\s*id\s+({INT})|-\s*({INT})\s+\S+)\s*\|\s*task\s+(-?{INT})[\s|]*(.*)"
)
IDS = re.compile(rf'"?(id_slot|slot_id|id_task|task_id|p0|n_past)"?\s*[=:]\s*(-?{INT})')
NEW_PROMPT = re.compile(rf"new prompt,.*?(?:n_prompt_tokens|task\.n_tokens) = ({INT})")
CONTEXT = re.compile(rf"n_ctx_slot = ({INT})")
REMOVE = re.compile(rf"(?:kv cache rm|memory_seq_rm) \[({INT}), end\)")
PROGRESS_OLD = re.compile(
    rf"prompt processing progress, n_past = ({INT}), n_tokens = ({INT}), progress = ({NUM})"
)
PROGRESS = re.compile(
    rf"prompt processing progress, n_tokens = ({INT})(?:, batch\.n_tokens = ({INT}))?"
)
PROGRESS_TIMED = re.compile(
    rf"(?:prompt processing|PP), n_tokens =\s*({INT}), progress =\s*({NUM})"
    rf"(?:, t =\s*({NUM}) s)?"
)
SHARED = re.compile(rf"^n_past = ({INT}), (?:cache_tokens|slot\.prompt\.tokens)\.size\(\)")
CHECKPOINT = re.compile(r"created context checkpoint \d+ of \d+")
TOOK = re.compile(rf"took ({NUM}) ms")
CACHE_TOOK = re.compile(rf"prompt cache (update|save|load) took ({NUM}) ms")
TRUNCATED = re.compile(rf"n_prompt_tokens = ({INT})")
OLD_SLOT = re.compile(
    rf"\bslot ({INT})(?: is processing \[task id: (?P<task>{INT})\]|"
    rf" [:-] in cache: (?P<cached>{INT}) tokens \| to process: (?P<left>{INT}) tokens|"
    rf" : kv cache rm - \[(?P<begin>{INT}), end\)| released \({INT} tokens in cache\))"
)
CLI_RATES = re.compile(rf"\[ Prompt: ({NUM}) t/s \| Generation: ({NUM}) t/s \]")
BENCH_TEST = re.compile(rf"\|\s*(pp|tg)({INT})(?: @ d({INT}))?\s*\|\s*({NUM}) ± {NUM}\s*\|\s*$")
CANCEL = re.compile(rf"cancel task, id_task = ({INT})")
FAILED = re.compile(rf"send_error: task id = ({INT}), error")
DRAFTS = re.compile(rf"draft acceptance(?: rate)? = {NUM} \(\s*({INT}) accepted /\s*({INT})")
VERBOSE = re.compile(
    r"^\s*(total duration|load duration|prompt eval count|prompt eval duration|prompt eval rate|"
    r"eval count|eval duration|eval rate):\s+(\S{1,40})"
)
IN_PROMPT = re.compile(rf"^main: number of tokens in prompt = ({INT})")
BENCH_HEAD = re.compile(r"\|\s*PP\s*\|\s*TG\s*\|(?:\s*B\s*\|)?\s*N_KV\s*\|\s*T_PP s\s*\|")
BENCH_ROW = re.compile(rf"^\s*\|((?:\s*{NUM}\s*\|){{7,10}})\s*$")
TOTALS_ROW = re.compile(rf"^\s*\|[^|]*\|((?:\s*{INT}\s*,)+\s*{INT}\s*)\|\s*({NUM}) ms\s*\|")
JSON_FIELD = re.compile(
    r'(?<!\\)"(cache_n|prompt_n|prompt_ms|predicted_n|predicted_ms|draft_n|draft_n_accepted)"'
    rf"\s*:\s*({NUM})"
)
START = re.compile(
    r"(?:^|\s)(?:build info \||build: \d+ \(|load_model: loading model|main: loading model|"
    r"llama_model_loader: loaded meta data|system[ _]info:? )|\"(?:build|system) info\""
)
BUILD = re.compile(rf'(?:build=|build: |"build":)({INT})')
LOADED = re.compile(r'\b(?:main|llama_server): model loaded|"model loaded"|\] model loaded \|')
SLOTS = re.compile(rf'initializing(?: slots)?(?:, n_slots = |.{{1,120}}n_slots"?[:=])({INT})')
NOISE = re.compile(
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
            "sample time",
            "sampling +time",
            "samplers time",
            "unaccounted time",
            "llama_model_loader",
            "buffer type overriden",
            "\\|---",
            "\\| -+:? \\|",
        )
    )
)
"""Lines known to say nothing about where a request's time went."""

_HEAD = rb"(?:\d+\.\d\d\.\d{3}\.\d{3} [A-Z] |\d{4}-\d\d-\d\d[T ][\d:.]+Z? (?:std\w+ [FP] |\| )?)?"
_VERBOSE_LINES = (
    rb"que +\w+: ",
    rb"res +\w+: ",
    rb"srv +(?:update_slots: (?:run slots|posting|decoding|all slots are idle|update slots)|"
    rb"operator\(\): |log_server_r: |to_json\w*: |send: |params_from_|get_availabl: (?:id|best)|"
    rb"stop: all tasks)",
    rb"slot +(?:process_toke|update_batch|process_sing)\w*: ",
    rb"slot +[\w()]+: id +\d+ \| task -?\d+ \| +(?:slot decode|n_decoded|n_gen|graphs reused|"
    rb"acc per pos|add|accepted|generated|selected slot)",
    rb"set_\w+: |clear_adapter|adapters_lora|http: |data stream|Pars(?:ed|ing)|Partial parse|"
    rb"Grammar |Chat format|llama_model_loader: - |load_tensors: |print_info: |sched_reserve: |"
    rb"graph_reserve: |statistics |reasoning-budget: |VERB \[",
)
VERBOSE_RUN = re.compile(
    rb"(?:\n|" + _HEAD + rb"(?:" + rb"|".join(_VERBOSE_LINES) + rb")[^\n]*+\n)++"
)
"""A run of lines that tell of every token and say nothing of where time went."""
SLOT_BYTES = re.compile(
    rb"((?:\d+\.\d\d\.\d{3}\.\d{3} [A-Z] )?)slot +[\w()]+: id +(\d{1,12}) \| "
    rb"task (-?\d{1,12}) \| ?([^\n]{0,2000}+)\n"
)
"""A slot's line with nothing around it."""

_MINUTES = re.compile(r"(?:^|\s)(\d{1,6})\.(\d\d)\.(\d{3})\.(\d{3}) [A-Z] ")
_SHORT = re.compile(r"^(\d{1,4}):(\d\d\.\d\d) [A-Z] ")
_SYSLOG = re.compile(r"[A-Z][a-z]{2} ([ \d]\d) (\d\d):(\d\d):(\d\d) \S")
_STAMP = re.compile(r'timestamp"?[=:]\s*(\d{9,11})\b')
_WALL = re.compile(r"\b\d{4}-\d\d-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")


@dataclass(frozen=True, slots=True)
class Clock:
    """A log line's own time. Two of them compare when their `kind` is the same."""

    s: float
    kind: str
    step_ms: float
    """What the last digit is worth."""


def clock_of(line: str) -> Clock | None:
    """The time a line starts with (or names), None if it has none."""
    if m := _MINUTES.search(line, 0, 120):
        minutes, seconds, ms, us = map(int, m.groups())
        return Clock(minutes * 60 + seconds + ms / 1e3 + us / 1e6, "engine", 0.001)
    if m := _SHORT.match(line):
        return Clock(int(m[1]) * 60 + float(m[2]), "engine", 10.0)
    if m := _STAMP.search(line):
        return Clock(float(m[1]), "stamp", 1000.0)
    if m := _WALL.search(line, 0, 80):
        seconds = ((int(m[1]) * 24 + int(m[2])) * 60 + int(m[3])) * 60 + int(m[4])
        fraction = m[5] or ""
        return Clock(
            seconds + float(f"0.{fraction or 0}"), "wall", max(0.001, 1000 / 10 ** len(fraction))
        )
    if m := _SYSLOG.match(line):
        day, hours, minutes, seconds = map(int, m.groups())
        return Clock(((day * 24 + hours) * 60 + minutes) * 60 + seconds, "wall", 1000.0)
    return None


def between_ms(start: Clock | None, end: Clock | None) -> float | None:
    """Milliseconds between two clocks of the same kind, None if they do not compare."""
    if start is None or end is None or start.kind != end.kind or end.s < start.s:
        return None
    return (end.s - start.s) * 1000.0
