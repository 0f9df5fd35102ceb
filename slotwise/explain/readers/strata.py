"""Strata engine logs, all versions and forks: what each kind of line does to the state.

How lines become requests and lives is in `strata_state`, their formats in `strata_grammar`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from re import Match

from slotwise.explain.readers import strata_facts as facts
from slotwise.explain.readers import strata_grammar as g
from slotwise.explain.readers import strata_prefill as prefill
from slotwise.explain.readers.base import Unknown
from slotwise.explain.readers.lines import feed_lines
from slotwise.explain.readers.strata_draft import Summary, add
from slotwise.explain.readers.strata_ordinary import START, ends, ordinary_start
from slotwise.explain.readers.strata_request import measured
from slotwise.explain.readers.strata_state import StrataState
from slotwise.explain.readers.strata_windows import WINDOW, like_the_first, window_rows

RUNS_LIMIT = 8192
"""Prefill lines kept for one request; a longer row of them is cut."""


class StrataReader(StrataState):
    """Reader of the dialect ``strata``."""

    name = "strata"
    bulk = WINDOW

    def __init__(self, file: str) -> None:
        super().__init__(file)
        self.unknown = Unknown(g.VOCABULARY)
        self._run_comment = ""
        self._heads: dict[str, Callable[[str], bool]] = {
            "strata trace": self._trace,
            "strata serve": self._serve,
            "strata prefill timing": self._prefill,
            "strata prefill timing (peer GPU, ms)": self._peer,
            "strata prefill phases": self._prefill_json,
            "strata prefill transfer": self._transfer,
            "strata decode timing": self._decode,
            "strata generate": self._generate,
            "strata batch": self._batch,
            "strata decode GPU stages (ms/window)": self._decode_stages,
            "strata decode CPU pool phases": self._pool_phases,
        }

        self._trace_lines = {
            start: [(pattern.match, getattr(self, f"_on_{kind}")) for kind, pattern in found]
            for start, found in g.TRACE_LINES.items()
        }

    def sniff(self, lines: Sequence[str]) -> float:
        """Certain on any line that only this engine prints."""
        hits = 0
        for line in lines:
            text = _bare(line)
            if text.startswith(g.HEADS) or g.DONE.match(text):
                hits += 1
        return min(1.0, 0.7 + 0.15 * hits) if hits else 0.0

    # --- lines

    def feed(self, line_no: int, line: str) -> None:
        if self.ordinary is not None or self.ended is not None:
            self.read_ordinary()
        self.no = line_no
        if line.startswith("strata trace: "):
            for matching, take in self._trace_lines.get(line[14:18], ()):
                if match := matching(line, 14):
                    take(match)
                    return
            if not self._trace_rest(line[14:]):
                self.unknown.add(line)
            return
        if not line.startswith(("strata ", "[strata] ")):
            line = _bare(line)
        head, colon, rest = line.partition(":")
        handler = self._heads.get(head)
        if handler is not None and colon:
            known = handler(rest[1:].rstrip())
        elif line.startswith("[strata] "):
            known = self._server(line[9:])
        elif head in g.IGNORED_HEADS:
            known = True
        else:
            known = self._other(line)
        if not known:
            self.unknown.add(line)

    def feed_bulk(self, line_no: int, block: bytes, at: int) -> tuple[int, int]:
        """Window lines. Only their number, the sum of their T and the first one are kept."""
        lines, width = like_the_first(block, at)
        if not lines:
            return 0, at
        end = at + lines * width
        rows = window_rows(block[at:end], lines, width)
        if rows is None:
            texts = block[at : end - 1].decode("utf-8", "replace").split("\n")
            for i, text in enumerate(texts):
                self.feed(line_no + i, text)
            return len(texts), end
        draft = self.ordinary or self.touch(line_no + lines - 1, line_no)
        if draft.first_window is None:
            position, first = block[at + len(self.bulk) : at + width - 1].split(b" ")
            draft.first_window = (int(position), int(first))
        draft.windows += lines
        draft.window_tokens += rows
        return lines, end

    def feed_between(self, line_no: int, lines: bytes) -> None:
        """The end of one request and the start of the next, where they are of the usual kinds."""
        start = lines.rfind(START) + 1
        tail, head = lines[:start], lines[start:]
        if tail:
            if self.ordinary is not None and ends(self.ordinary, tail):
                self.keep_ordinary(self.ordinary, line_no, tail)
            else:
                feed_lines(self, tail[:-1], line_no)
        line_no += tail.count(b"\n")
        if self.ordinary is None and not self.draft.first:
            self.ordinary = ordinary_start(line_no, head)
        if self.ordinary is None or self.ordinary.first != line_no:
            feed_lines(self, head, line_no)

    # --- strata trace

    def _trace(self, text: str) -> bool:
        """A trace line that had something before it; `feed` takes those that had not."""
        for matching, take in self._trace_lines.get(text[:4], ()):
            if match := matching(text):
                take(match)
                return True
        return self._trace_rest(text)

    def _on_request(self, match: Match[str]) -> None:
        if self.draft.is_request:
            self.flush()
        draft = self.touch()
        draft.n, draft.images = int(match[1]), match[2] == "1"

    def _on_read(self, match: Match[str]) -> None:
        self.touch().read(int(match[1]), match[2].strip(), float(match[3]))

    def _on_lent(self, match: Match[str]) -> None:
        self.touch().lent(int(match[1]), float(match[3]))

    def _on_refill_start(self, match: Match[str]) -> None:
        self.touch().open_refill += int(match[1])

    def _on_refilled(self, match: Match[str]) -> None:
        self.touch().refilled(int(match[1]), float(match[3]))

    def _on_window(self, match: Match[str]) -> None:
        draft, rows = self.touch(), int(match[2])
        if draft.first_window is None:
            draft.first_window = (int(match[1]), rows)
        draft.windows += 1
        draft.window_tokens += rows

    def _on_prompt_done(self, _: Match[str]) -> None:
        self.touch().prompt_done = True

    def _on_nothing(self, _: Match[str]) -> None:
        self.touch()

    def _on_interleave(self, match: Match[str]) -> None:
        self.touch().interleaved += float(match[2])

    def _trace_rest(self, text: str) -> bool:
        if g.FREE_AFTER.match(text):
            self.life.trace_switch = True
            return True
        return g.TRACE_KNOWN.match(text) is not None

    # --- strata serve

    def _serve(self, text: str) -> bool:
        if text.startswith("prompt ") and (match := g.SUMMARY.match(text)):
            self._summary(match)
        elif text.startswith("conversation cache: "):
            return self._conversation_cache(text)
        elif match := g.HIT_RATE.match(text):
            target = self.tail()
            target.facts["decode hit rate %"] = measured(float(match[1]))
            self.life.pcie_tail |= match[4] is not None
        elif match := g.SUFFIX_DRAFTS.match(text):
            self.tail().facts["suffix drafts accepted"] = measured(int(match[2]))
        elif match := g.TIERS.match(text):
            target = self.tail()
            target.facts["file blobs"] = self.life.tier("file blobs", float(match[3]))
            target.facts["file MB"] = self.life.tier("file MB", float(match[4]))
        elif match := g.RESIDENT_RAM.match(text):
            self.tail().facts["file blobs (resident RAM)"] = self.life.tier(
                "file blobs (resident RAM)", float(match[1])
            )
        elif g.NO_PROGRESS.match(text):
            self.touch().failed = True
        elif text.startswith(("KV streaming: ", "stage ", "CUDA", "asynchronous adaptive ")):
            return self._counter(text)
        else:
            return self.life.serve_line(text)
        return True

    def _counter(self, text: str) -> bool:
        """Of the request before it; in old versions and at the start-up of none."""
        if self.held is None:
            return self.life.serve_line(text)
        return facts.serve_fact(text, self.tail(), self.life) or self.life.serve_line(text)

    def _summary(self, match: Match[str]) -> None:
        prompt, reused, read, planned, ms, rate, generated, decode_ms, decode_rate, *tail = (
            match.groups()
        )
        accepted, offered, checkpoints, rest = tail
        self.life.a_of_b |= planned is not None
        summary = Summary(
            int(prompt),
            int(reused),
            int(read),
            int(planned or read),
            float(ms),
            int(generated),
            float(decode_ms),
            int(accepted) if accepted else None,
            int(offered) if offered else None,
            int(checkpoints) if checkpoints else None,
            _rates(rate, decode_rate),
            planned is not None or "(cancelled)" in rest,
        )
        draft = self.draft
        if draft.n is not None and draft.n != summary.prompt:
            draft.warn("the next summary line is about another prompt")
            self.flush()
        elif draft.done is not None and draft.done.prompt != summary.prompt:
            self.flush()
        self.touch().summary = summary
        self.summarised()

    def _conversation_cache(self, text: str) -> bool:
        if match := g.PARKED.match(text):
            add(self.touch().caches, "conversation parked", float(match[2]))
        elif match := g.RESTORED.match(text):
            add(self.touch().caches, "conversation restored", float(match[2]))
        else:
            return g.CACHE_OTHER.match(text) is not None
        return True

    # --- timing

    def _prefill(self, text: str) -> bool:
        if run := prefill.parse_run(text):
            run.line = self.no
            if len(self.draft.runs) >= RUNS_LIMIT:
                self.flush()
            self.touch().runs.append(run)
            return True
        runs = self.draft.runs
        if text.startswith("host: ") and runs:
            return prefill.add_host(runs[-1], text)
        if match := g.SETUP.match(text):
            draft = self.touch()
            draft.setup_ms = (draft.setup_ms or 0.0) + float(match[2])
            return True
        if match := g.PEER_EXPERTS.match(text):
            self.touch().facts["peer-streamed experts"] = measured(int(match[1]))
            return True
        return False

    def _peer(self, text: str) -> bool:
        if self.draft.runs:
            phases, hidden = prefill.parse_phases(text.partition(";")[0], peer=True)
            self.draft.runs[-1].peer.update(phases)
            self.draft.runs[-1].hidden_names += hidden
        return True

    def _prefill_json(self, text: str) -> bool:
        data = prefill.parse_json(text)
        return data is not None and prefill.merge_json(self.touch().runs, data)

    def _transfer(self, text: str) -> bool:
        data = prefill.parse_json(text)
        if data is None:
            return False
        for key in g.TRANSFER_KEYS:
            if (value := prefill.number(data, key)) is not None:
                self.touch().facts[key] = measured(value)
        return True

    def _decode(self, text: str) -> bool:
        match = g.DECODE.match(text)
        if match is None:
            return False
        if self.draft.decode is not None:
            self.flush()
        self.touch().decode = tuple(float(x) if x else 0.0 for x in match.groups())
        return True

    def _decode_stages(self, text: str) -> bool:
        return facts.decode_stages(text, self.touch())

    def _pool_phases(self, text: str) -> bool:
        return facts.pool_phases(text, self.touch())

    # --- batch mode, start-up, server, stdout

    def _batch(self, text: str) -> bool:
        if match := g.BATCH_PARTS.match(text):
            self.touch().between_parts = float(match[2])
        elif match := g.BATCH_TAKES.match(text):
            add(self.touch().outside, "slot takes the sequence", float(match[3]))
        elif match := g.BATCH_BACK.match(text):
            add(self.touch().caches, "slot hand-back", float(match[3]))
        elif match := g.BATCH_YIELD.match(text):
            add(self.touch().outside, "slot holds the prompt", float(match[3]))
        elif not facts.batch_fact(text, self.life):
            return text.startswith(("restoring slot ", "BYIELD ")) or " windows, avg " in text
        self.life.batch_lines = True
        return True

    def _generate(self, text: str) -> bool:
        if match := g.ONE_SHOT.match(text):
            self.flush()
            draft = self.touch()
            draft.read(int(match[1]), "one-shot", float(match[3]))
            for name, group in (("experts streamed", 5), ("experts by DMA", 6), ("resident", 8)):
                draft.facts[name] = measured(int(match[group]))
            return True
        if match := g.ONE_SHOT_REFILL.match(text):
            self.touch().refilled(int(match[1]), float(match[2]))
            return True
        if g.FIRST_LINES.match(text) and (self.life.up or self.life.has_requests or self.held):
            self.new_life()
        return self.life.generate_line(text, self.no)

    def _server(self, text: str) -> bool:
        if match := g.STARTED.match(text):
            self.new_life()
            self.life.start_header(match[1])
            return True
        if match := g.SERVER_REQUEST.match(text):
            held = self.held
            if held is not None and held.summary and held.summary.prompt == int(match[1]):
                held.total_ms = float(match[5])
                held.last = self.no
            else:
                self._server_request(match)
            return True
        return g.SERVER_KNOWN.match(text) is not None

    def _server_request(self, match: Match[str]) -> None:
        """A server line about a request no engine line tells of (engine log elsewhere)."""
        if self.draft.traced or self.draft.done:
            return
        prompt, reused = int(match[1]), int(match[2])
        draft = self.touch()
        read = max(0, prompt - reused)
        draft.summary = Summary(prompt, reused, read, read, float(match[4]), int(match[3]), 0.0)
        draft.facts["total_ms"] = measured(float(match[5]))
        draft.total_ms = float(match[5])
        draft.no_decode_clock = True
        self.summarised()

    def _other(self, line: str) -> bool:
        word = line.partition(" ")[0].rstrip()
        if word == "DONE" and (match := g.DONE.match(line)):
            self._done(match)
            return True
        if word == "PP" and (match := g.PP.match(line)):
            self.touch().last_pp = float(match[3])
            return True
        if word in ("ERR", "FATAL"):
            if self.draft.is_request:
                self.touch().failed = True
            return True
        if word == "#" and (match := g.MEASURED_COMMENT.match(line)):
            if self._run_comment not in ("", match[1]):
                self.new_life()
                self.life.notes.append("a new run by the comment lines of the file")
            elif self.draft.done:
                self.flush()
            self._run_comment = match[1]
            self.touch().facts["measured"] = measured(int(match[2] == "True"))
            return True
        return word in g.PROTOCOL or not line.strip() or line.startswith((" " * 8, "#"))

    def _done(self, match: Match[str]) -> None:
        if self.draft.done is not None:
            self.flush()
        tail = match[9].split()
        generated, prompt, reused = int(match[1]), int(match[2]), int(match[8])
        planned = max(0, prompt - reused)
        read = planned
        if len(tail) > 5 and tail[5].isdecimal():
            read = min(planned, int(tail[5]))
        done = Summary(
            prompt=prompt,
            reused=reused,
            read=read,
            planned=planned,
            prompt_ms=float(match[3]),
            generated=generated,
            decode_ms=float(match[4]),
            accepted=int(match[6]),
            offered=int(match[7]),
            cancelled=match[5] == "cancel",
        )
        held = self.held
        late = held is not None and held.done is None and not self.draft.is_request
        if late and held and held.summary and held.summary.prompt == prompt:
            held.done, held.last = done, self.no
        else:
            self.touch().done = done


def _bare(line: str) -> str:
    """The line without colours and without what a journal or a container puts before it."""
    if "\x1b" in line:
        line = g.ANSI.sub("", line)
    if line.startswith('{"log":"') and (match := g.DOCKER_JSON.match(line)):
        line = match[1].replace('\\"', '"')
    if "strata" in line[:160] and (match := g.PREFIX.match(line)):
        return line[match.end() :]
    return line


def _rates(read: str, decode: str) -> tuple[float, float] | None:
    try:
        first, second = float(read), float(decode)
    except ValueError:
        return None
    return (first, second) if isfinite(first) and isfinite(second) else None
