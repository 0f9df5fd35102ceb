"""Starts the real server in this process, on a socket, with a small model; and talks to it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from slotwise.engine.engine import Engine
from slotwise.engine.session import open_answerer
from slotwise.engine.settings import EngineSettings
from slotwise.errors import Interrupted
from slotwise.serve.app import Service
from slotwise.serve.command import Server
from slotwise.serve.settings import ServeSettings
from slotwise.trace.record import RequestRecord

HI = [{"role": "user", "content": "Hello there"}]
PATIENCE = 60.0
ENGINE = {f.name for f in fields(EngineSettings)} | {"trace", "force"}


@dataclass
class Answer:
    """A response that was read to its end."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of a stream, which must end in [DONE]."""
        lines = [e for e in self.body.decode().split("\n\n") if e.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line[6:]) for line in lines[:-1]]

    @property
    def error(self) -> dict[str, Any]:
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        return error

    @property
    def record(self) -> RequestRecord:
        return checked(self.json["slotwise"]["record"])


def checked(data: dict[str, Any]) -> RequestRecord:
    """A record, after the checks that every record must pass."""
    record = RequestRecord.from_dict(data)
    ledger = record.ledger
    assert sum(phase.ns for phase in ledger.phases.values()) == ledger.wall_ns
    assert ledger.counted_twice_ns == 0
    return record


@dataclass
class Served:
    """A running server."""

    service: Service
    server: Server
    port: int

    @property
    def engine(self) -> Engine:
        answerer = self.service.desk.answerer
        assert answerer is not None
        return answerer.engine

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)

    def raw(self, data: bytes = b"") -> socket.socket:
        """A connection that has sent `data`."""
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)
        sock.sendall(data)
        return sock

    def send(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        connection = self.connect()
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body=body, headers=named)
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, found, response.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.send("GET", path, **headers)

    def post(self, path: str, data: Any, **headers: str) -> Answer:
        return self.send("POST", path, json.dumps(data).encode(), **headers)

    def chat(self, messages: Any = HI, **more: Any) -> Answer:
        body = {"messages": messages, "temperature": 0, "max_tokens": 6, **more}
        return self.post("/v1/chat/completions", body)

    def complete(self, prompt: Any = "Hello", **more: Any) -> Answer:
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 6, **more}
        return self.post("/v1/completions", body)

    @contextmanager
    def start_chat(self, **more: Any) -> Iterator[http.client.HTTPResponse]:
        """A stream whose head has come; the rest is for the caller to read, or to hang up on."""
        connection = self.connect()
        body = {"messages": HI, "temperature": 0, "stream": True, **more}
        connection.request("POST", "/v1/chat/completions", body=json.dumps(body))
        response = connection.getresponse()
        try:
            assert response.status == 200
            yield response
        finally:
            response.close()
            connection.close()

    def wait_for(self, what: Any) -> None:
        """Until `what()` is true; fails after a while, however busy the machine."""
        end = time.monotonic() + PATIENCE
        while not what():
            assert time.monotonic() < end, "it did not happen"
            time.sleep(0.005)

    def check_serves(self) -> None:
        """Nothing of what came before is left."""
        self.wait_for(lambda: self.service.desk.current is None)
        assert self.chat().status == 200
        experts = self.engine.loaded.experts
        assert experts is not None
        self.wait_for(lambda: self.service.desk.current is None)
        experts.check_conservation()


@contextmanager
def serving(model: Path, **chosen: Any) -> Iterator[Served]:
    """The server until the block ends. `chosen` are its settings and the engine's."""
    usual: dict[str, Any] = {"threads": 1, "context": 512, "chunk": 32, "memory": 64 << 20}
    engine = usual | {k: v for k, v in chosen.items() if k in ENGINE}
    own = {k: v for k, v in chosen.items() if k not in ENGINE}
    settings = ServeSettings(port=0, **own)
    service = Service(lambda: open_answerer(model, engine, None), settings, model_name=model.stem)
    server = Server(service, say=lambda _line: None)

    def run() -> None:
        with suppress(Interrupted):  # by a second signal
            server.run_to_the_end()

    thread = threading.Thread(target=run, name="server")
    thread.start()
    try:
        end = time.monotonic() + PATIENCE
        while service.desk.state == "loading" or not server.started:
            assert time.monotonic() < end
            assert thread.is_alive()
            time.sleep(0.01)
        yield Served(service, server, int(server.address.rpartition(":")[2]))
    finally:
        server.should_exit = True
        service.desk.stop_now()
        thread.join(PATIENCE)
        assert not thread.is_alive()
