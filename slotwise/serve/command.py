"""What `slotwise serve` does: listens at once, loads the model, and ends in order."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from slotwise.engine.conversations import ParkSettings
from slotwise.engine.loading import Progress
from slotwise.engine.session import open_answerer
from slotwise.errors import Interrupted, UsageError
from slotwise.serve.app import Service
from slotwise.serve.protocol import HEAD_BYTES, Protocol
from slotwise.serve.settings import ServeSettings

Say = Callable[[str], None]
CLOSING_SECONDS = 60.0


def serve(
    model: Path,
    *,
    settings: ServeSettings,
    options: Mapping[str, Any],
    say: Say,
    progress: Progress | None,
) -> None:
    """Serves until it is told to stop. Raises what loading raises, and Interrupted when a second
    signal cut an answer off."""
    service = Service(
        lambda: open_answerer(model, options, progress), settings, model_name=model.stem
    )
    Server(service, say=say).run_to_the_end()


def park_settings(options: Mapping[str, Any]) -> ParkSettings:
    """What becomes of conversations, out of the verb's options."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slotwise"
    return ParkSettings(
        mode=options["conversations"],
        memory=options["park_memory"] or 0,
        disk=options["park_disk"] or 0,
        folder=options["park_folder"] or usual,
    )


class Server(uvicorn.Server):
    """uvicorn around one service, with our own way to stop: the first signal finishes the running
    answer, the second does not."""

    def __init__(self, service: Service, *, say: Say) -> None:
        self.service, self._say = service, say
        protocol = type("Timed", (Protocol,), {"head_seconds": service.settings.body_seconds})
        super().__init__(
            uvicorn.Config(
                service.app,
                http=protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=30,
                backlog=256,
                h11_max_incomplete_event_size=HEAD_BYTES,
            )
        )
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._signals = 0
        self.address = ""

    def run_to_the_end(self) -> None:
        desk = self.service.desk
        with listen(self.service.settings) as sock:
            self.address = _url(self.service.settings, sock)
            desk.on_state = self._state_changed
            self._say(f"{self.address} is listening; the model is being loaded")
            desk.start()
            try:
                self.run(sockets=[sock])
            finally:
                desk.stop_now()
                desk.join(CLOSING_SECONDS)
        if desk.failure is not None:
            raise desk.failure
        if self._signals > 1:
            raise Interrupted("the running answer was cut off")

    def _state_changed(self) -> None:
        desk = self.service.desk
        if desk.state == "ready":
            self._say(f"{self.address} is ready: {self.service.names[0]}")
        if desk.state == "failed":
            self.should_exit = self.force_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1
        self.should_exit = True
        if self._signals == 1:
            self._say("stopping: the running answer is finished first (again to stop at once)")
            threading.Thread(target=self.service.desk.stop, daemon=True).start()
        else:
            self.force_exit = True
            threading.Thread(target=self.service.desk.stop_now, daemon=True).start()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """As uvicorn's, but a signal that was obeyed is not raised again afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {s: signal.signal(s, self.handle_exit) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def listen(settings: ServeSettings) -> socket.socket:
    """A bound socket. Raises UsageError where the address is taken or not ours."""
    host, port = settings.host, settings.port
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
        except OSError:
            sock.close()
            raise
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"cannot listen on {host} port {port}: {why}",
            next_step="Give another --port (0 takes any free one) or --host.",
        ) from error
    return sock


def _url(settings: ServeSettings, sock: socket.socket) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{sock.getsockname()[1]}"
