"""What one client wants, free of HTTP: the prompt, how to sample, and how to give the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slotwise.engine.sampling import Sampling
from slotwise.serve.toolcalls import as_template_reads
from slotwise.serve.wire import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    Sampled,
    template_values,
    unknown_fields,
)

_USUAL = Sampling()


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request for one answer."""

    messages: Sequence[Mapping[str, Any]] | None = None
    """A chat; None: `text` is to be continued."""
    template_values: Mapping[str, Any] = field(default_factory=dict)
    text: str | Sequence[int] = ""
    sampling: Sampling
    max_tokens: int | None
    stop: tuple[str, ...]
    logprobs: int | None
    reuse: bool
    stream: bool
    include_usage: bool
    progress: bool
    unknown: tuple[str, ...]
    """Fields that had no effect."""


def ask_of_chat(body: ChatBody) -> Ask:
    """Raises ApiError for what is understood but not supported."""
    wanted = body.top_logprobs or 0
    with_logprobs = bool(wanted) if body.logprobs is None else body.logprobs
    tools = None if body.tool_choice == "none" else body.tools
    return Ask(
        messages=[as_message(message) for message in body.messages],
        template_values=template_values(body.chat_template_kwargs, tools),
        logprobs=wanted if with_logprobs else None,
        **_shared(body, body.max_completion_tokens or body.max_tokens),
    )


def ask_of_completion(body: CompletionBody) -> Ask:
    """Raises ApiError for what is understood but not supported."""
    prompt = body.prompt
    if isinstance(prompt, list) and not isinstance(prompt[0], int):
        prompt = prompt[0]
    return Ask(
        text=prompt,  # type: ignore[arg-type] # of a list, all are ints or it has one entry
        logprobs=body.logprobs,
        **_shared(body, body.max_tokens),
    )


def as_message(message: ChatMessage) -> dict[str, Any]:
    """For a template: parts of text joined, no content as empty text, arguments of earlier calls
    as objects, everything else as it came."""
    data = message.model_dump(exclude_unset=True)
    if isinstance(message.content, list):
        data["content"] = "".join(part.text for part in message.content)
    elif message.content is None:
        data["content"] = ""
    if message.tool_calls:
        data["tool_calls"] = [as_template_reads(call) for call in data["tool_calls"]]
    return data


def _shared(body: Sampled, max_tokens: int | None) -> dict[str, Any]:
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    options = body.stream_options
    return {
        "sampling": _sampling(body),
        "max_tokens": max_tokens,
        "stop": tuple(stops),
        "reuse": body.cache_prompt is not False,
        "stream": bool(body.stream),
        "include_usage": bool(options and options.include_usage),
        "progress": bool(body.return_progress),
        "unknown": tuple(unknown_fields(body)),
    }


def _sampling(body: Sampled) -> Sampling:
    def given(value: Any, usual: Any) -> Any:
        return usual if value is None else value

    seed = None if body.seed in (None, -1) else body.seed % (1 << 64)
    return Sampling(
        temperature=given(body.temperature, _USUAL.temperature),
        top_k=given(body.top_k, _USUAL.top_k),
        top_p=given(body.top_p, _USUAL.top_p),
        min_p=given(body.min_p, _USUAL.min_p),
        seed=seed,
    )
