"""The OpenAPI document, made of the same models that check requests."""

from __future__ import annotations

from functools import cache
from typing import Any

from slotwise import __version__
from slotwise.serve.wire import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TemplateBody,
    TokenizeBody,
)

Object = dict[str, Any]
_REF = "#/components/schemas/{model}"
_POSTS: dict[str, tuple[type[Body], str]] = {
    "/v1/chat/completions": (ChatBody, "Answer a conversation."),
    "/v1/completions": (CompletionBody, "Continue a text, or tokens."),
    "/tokenize": (TokenizeBody, "Text to tokens."),
    "/detokenize": (DetokenizeBody, "Tokens to text."),
    "/apply-template": (TemplateBody, "A conversation as the model reads it."),
}
_STREAMS = ("/v1/chat/completions", "/v1/completions")
_GETS = {
    "/v1/models": "The one model that is served.",
    "/v1/requests": "Requests that wait or run, and the records of those that ended.",
    "/health": "200 when requests are taken, 503 otherwise.",
    "/props": "Context and chat template.",
    "/version": "The server's version.",
    "/openapi.json": "This document.",
}


@cache
def document(n_vocab: int | None = None) -> Object:
    """OpenAPI 3.1. With `n_vocab`, token ids have the model's own limit."""
    schemas: Object = {"Error": _error_schema()}
    paths: Object = {path: {"get": _get(text)} for path, text in _GETS.items()}
    paths["/metrics"] = {"get": _get("Prometheus metrics.", kind="text/plain")}
    for path, (model, text) in _POSTS.items():
        schema = model.model_json_schema(ref_template=_REF)
        schemas |= schema.pop("$defs", {})
        schemas[model.__name__] = schema
        paths[path] = {"post": _post(model.__name__, text, streams=path in _STREAMS)}
    if n_vocab is not None:
        _limit_tokens(schemas, n_vocab)
    return {
        "openapi": "3.1.0",
        "info": {"title": "slotwise", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _limit_tokens(schema: Any, n_vocab: int) -> None:
    """Puts the model's limit in the place of `wire.TokenId`'s."""
    if isinstance(schema, dict):
        if schema.get("exclusiveMaximum") == 1 << 31:
            schema["exclusiveMaximum"] = n_vocab
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            _limit_tokens(part, n_vocab)


def _get(text: str, *, kind: str = "application/json") -> Object:
    schema = {"type": "object"} if kind == "application/json" else {"type": "string"}
    ok = {"description": text, "content": {kind: {"schema": schema}}}
    return {"summary": text, "responses": {"200": ok, **_errors()}}


def _post(model: str, text: str, *, streams: bool) -> Object:
    content: Object = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        content["text/event-stream"] = {}  # chunks as OpenAI's; 3.1 cannot describe events
    body = {"schema": {"$ref": _REF.format(model=model)}}
    return {
        "summary": text,
        "requestBody": {"required": True, "content": {"application/json": body}},
        "responses": {"200": {"description": text, "content": content}, **_errors()},
    }


def _errors() -> Object:
    schema = {"schema": {"$ref": _REF.format(model="Error")}}
    what = {
        "4XX": "The request is not accepted; `code` says why.",
        "5XX": "The server could not answer; it goes on.",
    }
    return {
        status: {"description": text, "content": {"application/json": schema}}
        for status, text in what.items()
    }


def _error_schema() -> Object:
    nullable = {"type": ["string", "null"]}
    return {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": nullable,
                    "code": nullable,
                },
            }
        },
    }
