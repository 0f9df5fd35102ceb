"""Text around the engine: templates and tokens before it, characters after it.

Everything here happens inside the request's ledger, in the phases `template`, `tokenize` and
`emit`. A conversation keeps its state in the engine: the next prompt is the whole conversation
again, and what the state already holds of it is not read a second time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from slotwise.engine.engine import Engine
from slotwise.engine.prompt import Cancelled
from slotwise.engine.sampling import Sampling
from slotwise.errors import UsageError
from slotwise.trace.record import RequestRecord
from slotwise.weights.chat import ChatTemplate
from slotwise.weights.tokenizer import Tokenizer

Message = dict[str, str]
"""`role` (system, user or assistant) and `content`."""


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How an answer is made."""

    max_tokens: int = 512
    sampling: Sampling = field(default_factory=Sampling)


class Answerer:
    """Answers prompts and conversations with one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        metadata = engine.model.metadata
        n_vocab = engine.loaded.blueprint.architecture.hyper.n_vocab
        self.tokenizer = Tokenizer.from_metadata(metadata, n_vocab=n_vocab)
        self.template = (
            ChatTemplate.from_metadata(metadata)
            if isinstance(metadata.get("tokenizer.chat_template"), str)
            else None
        )

    @property
    def last_record(self) -> RequestRecord | None:
        """Of the latest answer, once its iterator has ended."""
        return self.engine.last_record

    def continue_text(
        self, text: str, options: AnswerOptions, *, cancel: threading.Event | None = None
    ) -> Iterator[str]:
        """Pieces of text that follow `text`, at character boundaries."""
        opened = self.engine.new_ledger()
        with opened[1].phase("tokenize"):
            tokens = self.tokenizer.encode(text, special=True)
        return self._pieces(tokens, options, cancel, opened)

    def reply(
        self,
        messages: Sequence[Message],
        options: AnswerOptions,
        *,
        cancel: threading.Event | None = None,
    ) -> Iterator[str]:
        """Pieces of the assistant's next message. Raises UsageError without a chat template."""
        if self.template is None:
            raise UsageError(
                "the model has no chat template",
                next_step="Use `slotwise run --raw`, which continues text as it is.",
            )
        opened = self.engine.new_ledger()
        with opened[1].phase("template"):
            text = self.template.render(messages, add_generation_prompt=True)
        with opened[1].phase("tokenize"):
            tokens = self.tokenizer.encode(text, special=True, add_bos=False)
        return self._pieces(tokens, options, cancel, opened)

    def _pieces(
        self,
        tokens: list[int],
        options: AnswerOptions,
        cancel: threading.Event | None,
        opened: tuple,
    ) -> Iterator[str]:
        stream = self.tokenizer.stream()
        steps = self.engine.generate(
            tokens,
            sampling=options.sampling,
            max_tokens=options.max_tokens,
            stop=self.tokenizer.stop_ids,
            cancel=cancel,
            opened=opened,
        )
        with suppress(Cancelled):
            for step in steps:
                yield stream.push(step.token)
        if rest := stream.finish():
            yield rest
