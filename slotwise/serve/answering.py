"""Answers one job with the engine: its tokens become pieces, its end becomes a reason."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

from slotwise.engine.prompt import Cancelled
from slotwise.engine.request import Extras, ReadProgress
from slotwise.engine.text import Answerer, Prompt
from slotwise.serve.jobs import Done, Job, Progress
from slotwise.serve.pieces import AnswerText, Piece
from slotwise.serve.toolcalls import CallText, writes_calls
from slotwise.trace.ledger import CLOCK
from slotwise.weights.chat import TEMPLATE_KEY

WRITE_SECONDS = 1.0
"""The engine waits no longer than this for the first token's bytes to be written."""
PROGRESS_NS = 150_000_000
"""No more than one progress event in this time."""


class Answering:
    """One job's answer, on the engine's thread."""

    def __init__(self, answerer: Answerer, job: Job, *, most: int | None) -> None:
        if job.prompt is None:
            raise RuntimeError(f"job {job.name} was not prepared")
        self._answerer, self._engine, self._job = answerer, answerer.engine, job
        self._prompt: Prompt = job.prompt
        room = self._engine.loaded.settings.context - len(self._prompt.tokens)
        wanted = [n for n in (job.ask.max_tokens, most) if n is not None]
        self._limit = max(1, min([room, *wanted]))
        self._room = room
        self._text = AnswerText(answerer.tokenizer, job.ask.stop)
        template = self._engine.model.metadata.get(TEMPLATE_KEY)
        reads = bool(job.ask.template_values.get("tools")) and writes_calls(template)
        self._calls = CallText() if reads else None
        self._count = 0
        self._told_ns = 0

    def run(self) -> None:
        """Posts the answer. Raises what the engine raises; Cancelled too."""
        job = self._job
        self._prompt.opened[1].phase("queue").__exit__(None, None, None)
        try:
            self._post_pieces()
        except Cancelled:
            if not (job.out_of_time and self._count):
                raise
        self._post_piece(self._text.finish())
        done = self._done()
        if self._calls is not None:
            self._post_certain(self._calls.finish(whole=done.finish == "stop"))
            if self._calls.calls and done.finish == "stop":
                done = replace(done, finish="tool_calls")
        job.post(done)

    def _post_pieces(self) -> None:
        job, ask = self._job, self._job.ask
        steps = self._engine.generate(
            self._prompt.tokens,
            sampling=ask.sampling,
            max_tokens=self._limit,
            stop=self._answerer.tokenizer.stop_ids,
            cancel=job.cancel,
            opened=self._prompt.opened,
            extras=Extras(
                logprobs=ask.logprobs,
                reuse=ask.reuse,
                enough=job.enough,
                on_progress=self._progress if ask.progress else None,
                on_ledger=job.post if ask.progress else None,
                edges=job.stamps.edges,
            ),
        )
        with closing(steps):
            for step in steps:
                self._count += 1
                self._post_piece(self._text.push(step))
                if step.first and ask.stream:
                    job.written.wait(WRITE_SECONDS)
                if self._text.stopped:
                    job.enough.set()

    def _post_piece(self, piece: Piece) -> None:
        self._post_certain(self._calls.push(piece) if self._calls is not None else piece)

    def _post_certain(self, piece: Piece) -> None:
        if piece.text or piece.entries or piece.first or piece.calls:
            self._job.post(piece)

    def _done(self) -> Done:
        record = self._job.record
        if record is None:
            raise RuntimeError("the engine has filed no record")
        if self._job.out_of_time:
            return Done("length", "time limit", record)
        if self._text.stopped:
            return Done("stop", "stop string", record)
        if self._count < self._limit:
            return Done("stop", "stop token", record)
        return Done("length", "context" if self._limit == self._room else "max_tokens", record)

    def _progress(self, read: ReadProgress) -> None:
        now = CLOCK()
        if now - self._told_ns < PROGRESS_NS:
            return
        self._told_ns = now
        self._job.post(
            Progress(
                prompt=read.prompt,
                reused=read.reused,
                processed=read.reused + read.read,
                share=read.share,
                elapsed_ns=now - self._job.start_ns,
                phases=self._prompt.opened[1].so_far(),
                expert_slots=self._engine.expert_slots(),
            )
        )
