"""Request bodies: what is accepted, what is refused, and what has no effect here.

Names and meanings are OpenAI's, with llama.cpp's additions. A field that is not known is never
ignored in silence: it is reported in the answer, and with `strict: true` it is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError, from_json

from slotwise.serve.faults import ApiError

WITHOUT_EFFECT = frozenset(
    {
        "user", "store", "metadata", "service_tier", "safety_identifier",
        "prompt_cache_key", "verbosity", "prediction", "reasoning_effort", "id_slot",
    }
)  # fmt: skip
"""Known, and rightly without effect on the tokens of an answer here."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repeat_penalty": (1,),
    "repetition_penalty": (1,),
    "logit_bias": ({}, []),
    "mirostat": (0,),
    "modalities": (["text"],),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "n": (1,),
    "functions": ([],),
    "parallel_tool_calls": (True,),
}
"""What these may say without changing anything. Anything else is reported, or refused below."""
REFUSED = {
    "n": "answers are made one at a time: n must be 1",
    "best_of": "answers are made one at a time: best_of must be 1",
    "echo": "the prompt is not echoed",
    "suffix": "text is not filled in before a suffix",
    "functions": "`functions` is the old form of `tools`, which is supported",
    "grammar": "there are no grammars here: the sampler is free",
    "json_schema": "there is no schema-constrained sampling here: the sampler is free",
    "audio": "there is no audio here",
}
"""Fields without which the answer would be another kind of thing than was asked for."""


def _whole(value: Any) -> Any:
    """JSON knows no integers: 5.0 is one."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_whole)
"""Stands last: pydantic leaves limits that come after it out of the JSON Schema."""
Fraction = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(max_length=4 << 20)]
SomeText = Annotated[str, Field(min_length=1, max_length=4 << 20)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


def _at_most(limit: int, what: str) -> BeforeValidator:
    """Before each is looked at, which takes its time. No `maxItems`: a list of that many is not
    wrong by itself, but it fits no context."""

    def check(value: Any) -> Any:
        if isinstance(value, list) and len(value) > limit:
            found = f"There are {len(value):,} {what}, at most {limit:,} are taken"
            raise PydanticCustomError("too_many", "{found}", {"found": found})
        return value

    return BeforeValidator(check)


def _all_whole(value: Any) -> Any:
    """As `_whole`, for a list that may be long: one without floats stays as it is."""
    if isinstance(value, list) and float in set(map(type, value)):
        return list(map(_whole, value))
    return value


_LONG = Field(fail_fast=True), BeforeValidator(_all_whole), _at_most(1 << 20, "token ids")
TokenIds = Annotated[list[TokenId], *_LONG]
SomeTokenIds = Annotated[list[TokenId], Field(min_length=1), *_LONG]
Object = dict[str, Any]


class Body(BaseModel):
    """Types are taken as they are: "5" is no number."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool | None = None


class ResponseFormat(Body):
    type: Literal["text"]


class Sampled(Body):
    """What all requests for an answer share."""

    model: str | None = Field(None, description="This server's model, or nothing.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1), WHOLE] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Fraction | None = None
    min_p: Fraction | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 31), WHOLE] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64), WHOLE] | None = None
    stop: (
        Annotated[str, Field(min_length=1, max_length=1024)]
        | Annotated[
            list[Annotated[str, Field(min_length=1, max_length=1024)]], Field(max_length=16)
        ]
        | None
    ) = None
    cache_prompt: bool | None = Field(None, description="false reads the whole prompt again.")
    return_progress: bool | None = Field(None, description="Events while the prompt is read.")
    strict: bool | None = Field(None, description="Unknown fields are errors.")


class ContentPart(Body):
    type: Literal["text"]
    text: Text


class FunctionCall(Body):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: Text | Object


class EarlierCall(Body):
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class ChatMessage(Body):
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Text | list[ContentPart] | None = None
    tool_calls: list[EarlierCall] | None = Field(None, description="Of an earlier answer.")
    tool_call_id: str | None = Field(None, description="Which call a tool's message answers.")


Messages = Annotated[
    list[ChatMessage],
    Field(min_length=1, fail_fast=True, description="What the context holds, 10,000 at most."),
    _at_most(10_000, "messages"),
]


class ChatBody(Sampled):
    """POST /v1/chat/completions"""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1), WHOLE] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    tools: list[Object] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: Object | None = None


class CompletionBody(Sampled):
    """POST /v1/completions"""

    prompt: (
        SomeText
        | SomeTokenIds
        | Annotated[list[SomeText | SomeTokenIds], Field(min_length=1, max_length=1)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None


class TokenizeBody(Body):
    """POST /tokenize"""

    content: Text
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeBody(Body):
    """POST /detokenize"""

    tokens: TokenIds


class TemplateBody(Body):
    """POST /apply-template"""

    messages: Messages
    tools: list[Object] | None = None
    chat_template_kwargs: Object | None = None


RESERVED = frozenset({"self", "messages", "tools", "add_generation_prompt", "template", "start_ns"})
"""Names that `chat_template_kwargs` cannot give a value to."""


def template_values(given: Object | None, tools: list[Object] | None) -> Object:
    """What a chat template may read beside the messages."""
    values = {name: value for name, value in (given or {}).items() if name not in RESERVED}
    return values | ({"tools": tools} if tools else {})


Kind = TypeVar("Kind", bound=Body)


def parse(raw: bytes, kind: type[Kind]) -> Kind:
    """The body of a request. Raises ApiError with the field and what was expected of it."""
    try:
        data = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(data, dict):
        raise ApiError(400, "the body is not a JSON object", code="invalid_json")
    if isinstance(data.get("response_format"), dict):
        _check_format(data["response_format"])
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _invalid(error) from error


def _invalid(error: ValidationError) -> ApiError:
    """Of several errors, the one that says why nothing was looked at; else the first."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    first = next((each for each in errors if each["type"] == "too_many"), errors[0])
    path = ".".join(str(part) for part in first["loc"])
    field = str(first["loc"][0]) if first["loc"] else None
    message = f"{path}: {first['msg'][0].lower()}{first['msg'][1:]}"
    return ApiError(400, message, code="invalid_field", param=field)


def _check_format(wanted: Object) -> None:
    if wanted.get("type") != "text":
        raise ApiError(
            400,
            f"response_format {wanted.get('type')!r:.60} is not supported: the sampler is free. "
            'Ask for the form in the prompt, or use {"type": "text"}.',
            code="unsupported_response_format",
            param="response_format",
        )


def unknown_fields(body: Body) -> list[str]:
    """Names of top-level fields that change nothing here though they may be meant to.

    Raises ApiError for those that must not be passed over, and for all of them if the body is
    `strict`.
    """
    unknown = []
    for name, value in (body.model_extra or {}).items():
        if name in WITHOUT_EFFECT or value is None or value in NEUTRAL.get(name, ()):
            continue
        if name in REFUSED:
            raise ApiError(400, REFUSED[name], code="unsupported_field", param=name)
        unknown.append(name[:64])
    if unknown and getattr(body, "strict", None):
        raise ApiError(
            400,
            f"unknown fields: {', '.join(unknown)}",
            code="unknown_field",
            param=unknown[0],
        )
    return unknown
