"""The routes. Each handler reads a body, asks the desk, and writes what comes back."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from slotwise import __version__
from slotwise.engine.text import Answerer
from slotwise.serve.ask import Ask, as_message, ask_of_chat, ask_of_completion
from slotwise.serve.desk import Desk, Opener
from slotwise.serve.faults import ApiError, from_exception
from slotwise.serve.guard import Guard, fault_response
from slotwise.serve.intake import read_body
from slotwise.serve.jobs import Job, new_id
from slotwise.serve.metrics import Metrics
from slotwise.serve.openapi import document
from slotwise.serve.replies import Replies, dumps
from slotwise.serve.respond import AnswerResponse, Events, posting
from slotwise.serve.settings import ServeSettings
from slotwise.serve.wire import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Kind,
    TemplateBody,
    TokenizeBody,
    parse,
    template_values,
)
from slotwise.trace.record import RequestRecord

PAGE_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
PAGE_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
ANY_MODEL = frozenset({"", "default"})


class Service:
    """One model, served. `app` is the ASGI application."""

    def __init__(self, opener: Opener, settings: ServeSettings, *, model_name: str) -> None:
        self.settings = settings
        self.names = (*settings.aliases, model_name)
        self.metrics = Metrics()
        self.ended: deque[dict[str, Any]] = deque(maxlen=settings.keep_requests)
        self.started = time.time()
        self.desk = Desk(
            opener,
            queue=settings.queue,
            max_tokens=settings.max_tokens,
            on_record=self._file,
        )
        for name in ("requests_processing", "num_requests_running"):
            self.metrics.gauge(name, "Requests being answered.", self._running)
        for name in ("requests_deferred", "num_requests_waiting"):
            self.metrics.gauge(name, "Requests in the queue.", lambda: self.desk.waiting)
        self.app = self._application()

    def _running(self) -> float:
        return float(self.desk.current is not None)

    def _file(self, job: Job | None, record: RequestRecord) -> None:
        self.metrics.observe(record)
        self.ended.appendleft(
            {
                "id": job.name if job else None,
                "request": record.request,
                "state": record.status,
                "received": job.received if job else None,
                "record": record.to_dict(),
            }
        )

    def _application(self) -> Starlette:
        get, post = ["GET"], ["POST"]
        routes = [
            Route("/v1/chat/completions", self._answer(ChatBody, ask_of_chat), methods=post),
            Route("/v1/completions", self._answer(CompletionBody, ask_of_completion), methods=post),
            Route("/v1/models", self._models, methods=get),
            Route("/v1/models/{name:path}", self._model, methods=get),
            Route("/v1/requests", self._requests, methods=get),
            Route("/tokenize", self._text(TokenizeBody, tokenize), methods=post),
            Route("/detokenize", self._text(DetokenizeBody, detokenize), methods=post),
            Route("/apply-template", self._text(TemplateBody, apply_template), methods=post),
            Route("/health", self._health, methods=get),
            Route("/metrics", self._metrics, methods=get),
            Route("/props", self._props, methods=get),
            Route("/version", self._version, methods=get),
            Route("/openapi.json", self._openapi, methods=get),
            Route("/", partial(_page, "index.html"), methods=get),
            Route("/page.css", partial(_page, "page.css"), methods=get),
            Route("/page.js", partial(_page, "page.js"), methods=get),
        ]
        return Starlette(
            routes=routes,
            middleware=[Middleware(Guard, settings=self.settings)],
            exception_handlers={
                ApiError: _on_error,
                HTTPException: _on_http_error,
                Exception: _on_error,
            },
        )

    # -- answers -------------------------------------------------------------------------

    def _answer(self, kind: type[Kind], ask_of: Callable[[Kind], Ask]) -> Callable[..., Any]:
        async def handler(request: Request) -> AnswerResponse:
            name = _request_id(request)
            try:
                raw, arrived_ns = await self._body(request)
                body = parse(raw, kind)
                self._check_model(getattr(body, "model", None))
                events: Events = asyncio.Queue()
                job = Job(ask_of(body), arrived_ns, posting(events), name)
                await self.desk.submit(job)
            except ApiError as fault:
                if fault.status == 429:
                    self.metrics.refused()
                fault.headers["x-request-id"] = name
                raise
            return AnswerResponse(
                job,
                events,
                self._replies(job),
                desk=self.desk,
                ping=self.settings.ping_seconds,
                seconds=self.settings.max_seconds,
            )

        return handler

    async def _body(self, request: Request) -> tuple[bytes, int]:
        s = self.settings
        return await read_body(request, limit=s.max_body, seconds=s.body_seconds)

    def _replies(self, job: Job) -> Replies:
        answerer = self.desk.ready()
        digest = (answerer.engine.model.digest or "")[:8]
        return Replies(
            ask=job.ask,
            id=new_id("chatcmpl" if job.ask.messages is not None else "cmpl"),
            created=int(job.received),
            model=self.names[0],
            fingerprint=f"slotwise-{__version__}-{digest}",
            tokenizer=answerer.tokenizer,
        )

    def _check_model(self, wanted: str | None) -> None:
        if wanted is not None and wanted not in ANY_MODEL and wanted not in self.names:
            raise ApiError(
                404,
                f"there is no model {wanted!r:.100} here, only {self.names[0]!r}; requests load "
                "nothing",
                code="model_not_found",
                param="model",
            )

    # -- text ----------------------------------------------------------------------------

    def _text(
        self, kind: type[Kind], work: Callable[[Answerer, Kind], dict[str, Any]]
    ) -> Callable[..., Any]:
        async def handler(request: Request) -> Response:
            raw, _ = await self._body(request)
            body, answerer = parse(raw, kind), self.desk.ready()
            loop = asyncio.get_running_loop()
            try:
                return _json(await loop.run_in_executor(None, work, answerer, body))
            except Exception as error:
                raise from_exception(error) from error

        return handler

    # -- about the server ----------------------------------------------------------------------

    async def _models(self, _request: Request) -> Response:
        return _json({"object": "list", "data": [self._model_object()]})

    async def _model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return _json(self._model_object())

    def _model_object(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "id": self.names[0],
            "object": "model",
            "created": int(self.started),
            "owned_by": "slotwise",
            "aliases": list(self.names[1:]),
        }
        if self.desk.answerer is not None:
            data["meta"] = self._meta(self.desk.answerer)
        return data

    def _meta(self, answerer: Answerer) -> dict[str, Any]:
        loaded = answerer.engine.loaded
        hyper, layout = loaded.blueprint.architecture.hyper, loaded.blueprint.layout
        return {
            "arch": answerer.engine.model.arch,
            "n_vocab": hyper.n_vocab,
            "n_embd": hyper.n_embd,
            "n_ctx": loaded.settings.context,
            "max_model_len": loaded.settings.context,
            "layers": hyper.n_layers,
            "experts": layout.n_experts if layout else 0,
            "experts_used": layout.n_used if layout else 0,
            "expert_slots": sum(loaded.plan.slots) if loaded.plan.slots else 0,
        }

    async def _requests(self, _request: Request) -> Response:
        jobs = [job.summary() for job in self.desk.jobs()]
        return _json({"object": "list", "running": jobs, "data": list(self.ended)})

    async def _health(self, _request: Request) -> Response:
        desk = self.desk
        if desk.state != "ready":
            fault = ApiError(503, f"the server is {desk.state}", code=desk.state)
            return _json({**fault.to_dict(), "status": desk.state, **self._state()}, status=503)
        return _json({"status": "ok", **self._state()})

    def _state(self) -> dict[str, Any]:
        desk = self.desk
        busy = desk.current is not None
        return {
            "state": "busy" if busy and desk.state == "ready" else desk.state,
            "model": self.names[0],
            "since": desk.since,
            "started": self.started,
            "running": int(busy),
            "waiting": desk.waiting,
            "version": __version__,
        }

    async def _metrics(self, _request: Request) -> Response:
        answerer = self.desk.answerer
        text = self.metrics.text(answerer.engine if answerer else None)
        return Response(text, headers={"content-type": self.metrics.content_type})

    async def _props(self, _request: Request) -> Response:
        answerer = self.desk.ready()
        template = answerer.engine.model.metadata.get("tokenizer.chat_template")
        return _json(
            {
                "model_alias": self.names[0],
                "total_slots": 1,
                "chat_template": template if isinstance(template, str) else None,
                "build_info": f"slotwise {__version__}",
                "default_generation_settings": {"n_ctx": answerer.engine.loaded.settings.context},
                "meta": self._meta(answerer),
            }
        )

    async def _version(self, _request: Request) -> Response:
        return _json({"version": __version__})

    async def _openapi(self, _request: Request) -> Response:
        answerer = self.desk.answerer
        return _json(document(answerer.tokenizer.n_vocab if answerer else None))


def tokenize(answerer: Answerer, body: TokenizeBody) -> dict[str, Any]:
    add_bos = None if body.add_special else False
    tokens = answerer.tokenizer.encode(body.content, special=body.parse_special, add_bos=add_bos)
    if not body.with_pieces:
        return {"tokens": tokens}
    return {"tokens": [{"id": t, "piece": _shown(answerer, t)} for t in tokens]}


def _shown(answerer: Answerer, token: int) -> str | list[int]:
    """Text, or bytes where it is none, as llama.cpp gives them."""
    raw = answerer.tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


def detokenize(answerer: Answerer, body: DetokenizeBody) -> dict[str, Any]:
    return {"content": answerer.tokenizer.decode(body.tokens, special=True)}


def apply_template(answerer: Answerer, body: TemplateBody) -> dict[str, Any]:
    if answerer.template is None:
        raise ApiError(400, "the model has no chat template", code="no_chat_template")
    messages = [as_message(message) for message in body.messages]
    values = template_values(body.chat_template_kwargs, body.tools)
    return {"prompt": answerer.template.render(messages, **values)}


def _request_id(request: Request) -> str:
    """The client's own, if it can be a header's value again."""
    given = request.headers.get("x-request-id", "")
    fine = 0 < len(given) <= 128 and given.isascii() and given.isprintable()
    return given if fine else new_id("req")


def _json(data: Any, *, status: int = 200) -> Response:
    return Response(dumps(data), status_code=status, media_type="application/json")


async def _page(name: str, _request: Request) -> Response:
    text = (files("slotwise.serve") / "page" / name).read_bytes()
    kind = PAGE_TYPES[name.rpartition(".")[2]]
    headers = {"content-security-policy": PAGE_POLICY, "cache-control": "no-cache"}
    return Response(text, media_type=kind, headers=headers)


async def _on_error(_request: Request, error: Exception) -> Response:
    return fault_response(from_exception(error))


async def _on_http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    what = {
        404: f"there is nothing at {request.url.path!r:.100}",
        405: f"{request.method} is not for {request.url.path!r:.100}",
    }.get(status, str(error))
    code = {404: "not_found", 405: "method_not_allowed"}.get(status, "http_error")
    headers = getattr(error, "headers", None)
    return fault_response(ApiError(status, what, code=code, headers=headers))
