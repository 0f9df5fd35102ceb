"""A model's tool calls, out of the text it writes, for templates of the best known kind.

Models whose chat template says `<tool_call>` (Qwen's, Hermes') write each call as a JSON object
with `name` and `arguments` between `<tool_call>` and `</tool_call>`. Text that is not exactly that
is left alone: it stays content. Other ways of writing calls are not read here.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from slotwise.serve.pieces import Piece, ToolCall, may_begin

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def writes_calls(template: object) -> bool:
    """Whether a model with this chat template writes calls as they are read here."""
    return isinstance(template, str) and OPEN in template and CLOSE in template


@dataclass
class CallText:
    """Takes the calls out of one answer's pieces. White space beside a call belongs to neither."""

    calls: int = 0
    _held: str = ""
    """Not decided yet: white space, the beginning of a tag, or a call without its end."""

    def push(self, piece: Piece) -> Piece:
        """The piece with the text that is certainly content, and the calls it completed."""
        self._held += piece.text
        content, calls = "", []
        while (begin := self._held.find(OPEN)) >= 0:
            end = self._held.find(CLOSE, begin)
            if end < 0:
                break
            before, inside = self._held[:begin], self._held[begin + len(OPEN) : end]
            self._held = self._held[end + len(CLOSE) :]
            if (call := read_call(inside)) is None:
                content += before + OPEN + inside + CLOSE
            else:
                content += before.rstrip()
                calls.append(call)
        cut = begin if begin >= 0 else len(self._held) - may_begin(self._held, (OPEN,))
        certain = self._held[:cut].rstrip()
        self._held = self._held[len(certain) :]
        return self._with(piece, content + certain, calls)

    def finish(self, *, whole: bool) -> Piece:
        """What was held back. A last call may lack its end if the answer is `whole`."""
        rest, self._held = self._held, ""
        before, tag, inside = rest.partition(OPEN)
        call = read_call(inside) if tag and whole else None
        if call is not None:
            return self._with(Piece(""), before.rstrip(), [call])
        return Piece(rest if rest.strip() or not self.calls else "")

    def _with(self, piece: Piece, text: str, calls: list[ToolCall]) -> Piece:
        self.calls += len(calls)
        return replace(piece, text=text, calls=tuple(calls))


def read_call(text: str) -> ToolCall | None:
    """The call that `text` is, or None."""
    try:
        data = json.loads(text, parse_constant=_no_number)
        if not isinstance(data, dict) or not {"name"} <= set(data) <= {"name", "arguments", "id"}:
            return None
        name, arguments = data["name"], data.get("arguments", {})
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return None
        written = json.dumps(arguments, ensure_ascii=False)
        (name + written).encode()  # half a surrogate pair cannot be sent
    except (ValueError, RecursionError):
        return None
    return ToolCall(f"call_{secrets.token_hex(12)}", name, written)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def as_template_reads(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call of an earlier answer as templates expect it: clients send the arguments as text of
    JSON, templates write an object."""
    function = dict(call["function"])
    try:
        arguments = json.loads(function["arguments"])
    except (TypeError, ValueError, RecursionError):
        arguments = None
    if isinstance(arguments, dict):
        function["arguments"] = arguments
    return {**call, "function": function}
