"""Text around the engine: templates and tokens before it, characters after it.

Everything here happens inside the request's ledger, in the phases `template`, `tokenize` and
`emit`. A conversation keeps its state in the engine: the next prompt is the whole conversation
again, and what the state already holds of it is not read a second time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from slotwise.engine.engine import Engine
from slotwise.engine.prompt import Cancelled
from slotwise.engine.sampling import Sampling
from slotwise.errors import PromptTooLong, UsageError
from slotwise.trace.ledger import Ledger
from slotwise.trace.record import RequestRecord
from slotwise.weights.chat import ChatTemplate
from slotwise.weights.tokenizer import Tokenizer

Message = Mapping[str, Any]
"""`role` (system, user or assistant), `content`, and whatever else the template reads."""


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How an answer is made."""

    max_tokens: int = 512
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True)
class Prompt:
    """Tokens to answer, and the name and running ledger of the request they belong to."""

    opened: tuple[str, Ledger]
    tokens: list[int]


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
        return self._pieces(self.open_text(text), options, cancel)

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
        return self._pieces(self.open_chat(self.template, messages), options, cancel)

    def open_chat(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        *,
        start_ns: int | None = None,
        **values: Any,
    ) -> Prompt:
        """Opens a request's ledger and turns its conversation into tokens. `values` are further
        ones for the template (`tools`, for example)."""
        with self._opening(start_ns) as opened:
            with opened[1].phase("template"):
                text = template.render(messages, **values)
            with opened[1].phase("tokenize"):
                tokens = self._encode(text, add_bos=False)
        return Prompt(opened, tokens)

    def open_text(self, text: str | Sequence[int], *, start_ns: int | None = None) -> Prompt:
        """The same for text, or tokens, to be continued."""
        with self._opening(start_ns) as opened, opened[1].phase("tokenize"):
            if isinstance(text, str):
                return Prompt(opened, self._encode(text))
        return Prompt(opened, list(text))

    def _encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """Tokens, but for a text that is too long however it is cut: cutting megabytes takes
        many seconds."""
        least, context = self.tokenizer.least_tokens(text), self.engine.loaded.settings.context
        if least >= context:
            raise PromptTooLong(f"at least {least:,}", context)
        return self.tokenizer.encode(text, special=True, add_bos=add_bos)

    @contextmanager
    def _opening(self, start_ns: int | None) -> Iterator[tuple[str, Ledger]]:
        """A running ledger, which is closed and filed if there will be no prompt."""
        name, ledger = self.engine.new_ledger(start_ns=start_ns)
        try:
            yield name, ledger
        except Exception as error:
            self.engine.withdraw(name, ledger.close("failed"), error=type(error).__name__)
            raise

    def _pieces(
        self, prompt: Prompt, options: AnswerOptions, cancel: threading.Event | None
    ) -> Iterator[str]:
        stream = self.tokenizer.stream()
        steps = self.engine.generate(
            prompt.tokens,
            sampling=options.sampling,
            max_tokens=options.max_tokens,
            stop=self.tokenizer.stop_ids,
            cancel=cancel,
            opened=prompt.opened,
        )
        with suppress(Cancelled):
            for step in steps:
                yield stream.push(step.token)
        if rest := stream.finish():
            yield rest
