"""A small real HTTP server with an OpenAI-compatible face, whose every answer is known.

Three characters are a token, a template adds 7. What a request's field `mode` says goes wrong on
purpose. As a program it is production (or an arm): `python small_server.py PORT MODEL VERSION`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

OVERHEAD = 7
PROMPT_MS_PER_TOKEN = 0.01
WRONG: dict[str, dict[str, Any]] = {
    "negative usage": {"prompt_tokens": -4, "completion_tokens": 3},
    "usage in words": {"prompt_tokens": "many", "completion_tokens": None},
    "usage of nothing": {},
}
SECRET = "sk-0123456789-not-for-records"


def tokens_of(text: str) -> int:
    return -(-len(text) // 3)


class SmallServer:
    """The server in a thread. `seen` holds (path, headers, body) of every request."""

    def __init__(
        self, port: int = 0, *, model: str = "/models/tiny.gguf", version: str = "b1",
        tokenize: bool = True,
    ) -> None:  # fmt: skip
        self.model, self.version, self.tokenize = model, version, tokenize
        self.seen: list[tuple[str, dict[str, str], Any]] = []
        self.lever_uses = 0
        self.work: dict[int, int] = {}
        """What the lever did, by the tokens of a prompt; one it does not know is 1."""
        self._http = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def serve_forever(self) -> None:
        self._http.serve_forever(poll_interval=0.02)

    def __enter__(self) -> SmallServer:
        self._thread = threading.Thread(target=self.serve_forever)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        outer = self

        class Handler(_Handler):
            server_of = outer

        return Handler


class _Handler(BaseHTTPRequestHandler):
    server_of: SmallServer
    protocol_version = "HTTP/1.1"
    server_version = "SmallServer"
    sys_version = ""

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        own = self.server_of
        own.seen.append((self.path, dict(self.headers), None))
        pages: dict[str, Any] = {
            "/health": {"status": "ok"},
            "/v1/models": {"data": [{"id": own.model, "meta": {"n_params": 1234}}]},
            "/props": {"build_info": own.version, "lever": {"mode": "on"}},
        }
        if self.path == "/metrics":
            self._text(200, f'# HELP x\nlever_total{{kind="a"}} {own.lever_uses}\n')
        elif self.path in pages:
            self._json(200, pages[self.path])
        else:
            self._json(404, {"error": "no such page"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server_of.seen.append((self.path, dict(self.headers), body))
        if self.path == "/tokenize" and self.server_of.tokenize:
            self._json(200, {"tokens": [0] * tokens_of(body["content"])})
        elif self.path == "/v1/chat/completions":
            self._answer(body, body["messages"][-1]["content"])
        elif self.path == "/v1/completions":
            self._answer(body, body["prompt"])
        else:
            self._json(404, {"error": "no such page"})

    def _answer(self, body: dict[str, Any], text: str) -> None:
        mode = body.get("mode", "")
        if mode == "http 500":
            self._json(500, {"error": f"could not read {text[:30]}"})
            return
        if mode == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if mode == "not streamed":
            self._json(200, {"choices": [{"message": {"content": "whole"}}]})
            return
        self.server_of.lever_uses += 1
        self._begin_stream()
        if mode == "silent":
            time.sleep(3.0)
        if mode in ("silent", "empty stream"):
            self.wfile.write(b"0\r\n\r\n")
            return
        for event in self._events(body, text, mode):
            if event == "break off":
                self.close_connection = True
                return
            self._chunk(event)
        if mode != "no end":
            self._chunk("data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _events(self, body: dict[str, Any], text: str, mode: str):
        yield _event({"role": "assistant", "content": None})
        if mode == "error in stream":
            yield f"data: {json.dumps({'error': {'message': text[:20]}})}\n\n"
            return
        if mode == "reasoning":
            time.sleep(0.01)
            yield _event({"reasoning_content": "hm"})
        for _ in range(body["max_tokens"]):
            time.sleep(0.002)
            whole = _event({"content": "a"})
            if mode == "halves":
                yield whole[:9]
                yield whole[9:]
            else:
                yield whole
        if mode == "broken":
            yield "break off"
        yield _event({}, finish="length", **self._blocks(body, text, mode))

    def _blocks(self, body: dict[str, Any], text: str, mode: str) -> dict[str, Any]:
        if mode == "no usage":
            return {}
        prompt = tokens_of(text) + OVERHEAD
        if mode in WRONG:
            return {"usage": WRONG[mode]}
        cached = 5 if mode == "cached" else 0
        work = self.server_of.work.get(prompt, 1) if body.get("lever") == "on" else 0
        own = {
            "work": work,
            "lever": body.get("lever", "off"),
            "note": f"{text[:40]} {SECRET} /srv/somebody/x",
        }
        return {
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": body["max_tokens"],
                "prompt_tokens_details": {"cached_tokens": cached},
            },
            "timings": {
                "prompt_n": prompt - cached,
                "cache_n": cached,
                "prompt_ms": prompt * PROMPT_MS_PER_TOKEN,
            },
            "slotwise": own,
        }

    def _begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _json(self, status: int, page: Any) -> None:
        self._text(status, json.dumps(page), kind="application/json")

    def _text(self, status: int, text: str, *, kind: str = "text/plain") -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _event(delta: dict[str, Any], *, finish: str | None = None, **blocks: Any) -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice], **blocks})}\r\n\r\n"


if __name__ == "__main__":
    SmallServer(int(sys.argv[1]), model=sys.argv[2], version=sys.argv[3]).serve_forever()
