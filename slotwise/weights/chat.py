"""Renders a conversation with the chat template in a GGUF. Turns no text into tokens.

Templates come from strangers: see chat_sandbox.py for what they may do. What a template may call
beyond jinja2 itself (`raise_exception`, `strftime_now`, `tojson` that keeps characters as they
are, `break` and `continue`) is what transformers gives chat templates.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slotwise.errors import SlotwiseError
from slotwise.weights.vocabulary import special_text

TEMPLATE_KEY = "tokenizer.chat_template"

_RAW = "Use `slotwise run --raw`, which continues text as it is."
_MAX_SOURCE = 1 << 20


class ChatTemplate:
    """A model's chat template. One that cannot be compiled says so when it is used."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        from slotwise.weights.chat_sandbox import Sandbox

        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._lock = threading.Lock()
        self._sandbox = Sandbox()
        self._broken: SlotwiseError | None = None
        try:
            if len(source) > _MAX_SOURCE:
                raise ValueError(f"it has {len(source):,} characters")
            self._template = self._sandbox.compile_guarded(source)
        except Exception as error:
            self._broken = _failure(error)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> ChatTemplate:
        """The template in a GGUF's metadata; SlotwiseError if there is none."""
        source = metadata.get(TEMPLATE_KEY)
        if not isinstance(source, str):
            found = "no chat template" if source is None else f"no text as its {TEMPLATE_KEY}"
            raise SlotwiseError(f"the model has {found}", next_step=_RAW)
        return cls(
            source,
            bos_token=special_text(metadata, "bos"),
            eos_token=special_text(metadata, "eos"),
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> str:
        """The conversation as the model wants it; encode it with `special` and without a bos.

        `messages` have `role` and `content`, and whatever else the template reads; `extra` are
        further values that it may read (``enable_thinking``). SlotwiseError, with the template's
        line, if it fails, refuses the conversation, or does not come to an end.
        """
        if self._broken:
            raise self._broken
        values = {
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
            "tools": None if tools is None else list(tools),
            **self._tokens,
            **extra,
        }
        with self._lock:
            try:
                return "".join(self._pieces(values))
            except Exception as error:
                failure = _failure(error)
        raise failure

    def _pieces(self, values: dict[str, Any]) -> Iterator[str]:
        from slotwise.weights.chat_sandbox import MAX_SIZE, MAX_STEPS

        self._sandbox.steps_left, size = MAX_STEPS, 0
        for piece in self._template.generate(values):
            size += len(piece)
            if size > MAX_SIZE:
                raise ValueError(f"it writes more than {MAX_SIZE:,} characters")
            yield piece


def _failure(error: Exception) -> SlotwiseError:
    """What went wrong, at which line of the template; what a template says is made printable."""
    from jinja2 import TemplateSyntaxError

    from slotwise.weights.chat_sandbox import ConversationRefused

    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if f.filename == "<template>"]
    line = error.lineno if isinstance(error, TemplateSyntaxError) else (lines or [None])[-1]
    place = "the chat template" + (f", line {line}" if line else "")
    said = "".join(c if c.isprintable() else " " for c in str(error)[:300])
    if isinstance(error, ConversationRefused):
        step = "Change the conversation: its roles, their order, or what they contain."
        return SlotwiseError(f"{place}, refuses this conversation: {said}", next_step=step)
    what = said or type(error).__name__
    return SlotwiseError(f"{place}, fails: {what}", next_step=_RAW)
