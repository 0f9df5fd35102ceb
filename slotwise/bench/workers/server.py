"""llama.cpp on the other side of a pipe, through its HTTP server: the program `llama-server`, or
the same server inside the package xllamacpp.

Runs in any Python. What is timed is what a client on the same machine sees: from just before the
request leaves until the first token's event is here, and from then to the last one's. The server
samples its own greedy tokens; it cannot be fed ours.
"""

from __future__ import annotations

import argparse
import importlib
import json
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from http.client import HTTPConnection, HTTPException
from importlib.metadata import version
from pathlib import Path
from time import perf_counter_ns

from slotwise.bench.workers.protocol import Answer, Pipe, between, storage_bytes

HOST = "127.0.0.1"
READY_SECONDS = 600.0


class Server:
    """A server that answers on `port`. `process` is the process id to count reads of, `keep` what
    must not be forgotten while it runs."""

    def __init__(self, port: int, process: str, ready: Answer, *, keep: object = None) -> None:
        self._port, self._process, self.ready = port, process, ready
        self._keep = keep

    def request(
        self, tokens: Sequence[int], follow: Sequence[int], *, seconds: float | None = None
    ) -> Answer:
        """Reads `tokens` from an empty state, then decodes as many tokens as `follow` has, until
        the one that is here more than `seconds` after the first."""
        from_disk, begin = storage_bytes(self._process), perf_counter_ns()
        first = last = 0
        count = 0
        from_disk_first = None
        for _ in self._events(tokens, 1 + len(follow)):
            last = perf_counter_ns()
            count += 1
            if count == 1:
                first, from_disk_first = last, storage_bytes(self._process)
            elif seconds and last - first > seconds * 1e9:
                break
        if not count:
            raise SystemExit(f"the server answered {len(tokens)} tokens with none")
        return {
            "first_ns": first - begin,
            "decode_ns": last - first,
            "decode_tokens": count - 1,
            "read_cpu_ns": None,
            "decode_cpu_ns": None,
            "read_bytes": between(from_disk, from_disk_first),
            "decode_bytes": between(from_disk_first, storage_bytes(self._process)),
        }

    def _events(self, tokens: Sequence[int], n: int) -> Iterator[Answer]:
        """The events of a streamed completion that carry a token."""
        body = {
            "prompt": list(tokens),
            "n_predict": n,
            "temperature": 0,
            "stream": True,
            "cache_prompt": False,
            "ignore_eos": True,
            "return_tokens": True,
        }
        connection = HTTPConnection(HOST, self._port)
        try:
            connection.request(
                "POST", "/completion", json.dumps(body), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            if response.status != 200:
                raise SystemExit(f"the server says {response.status}: {response.read(500)!r}")
            for line in response:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if event.get("tokens"):
                        yield event
        finally:
            connection.close()


def program(path: str, model: str, *, threads: int, context: int) -> Server:
    """`llama-server` at `path`, a child that ends with this process's session."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    sizes = ["-t", str(threads), "-tb", str(threads), "-c", str(context), "-np", "1"]
    command = [path, "-m", model, *sizes, "--host", HOST, "--port", str(port), "--no-warmup"]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    deadline = time.monotonic() + READY_SECONDS
    while not _healthy(port):
        if child.poll() is not None:
            raise SystemExit(f"{path} ended with {child.returncode}")
        if time.monotonic() > deadline:
            raise SystemExit(f"{path} is not ready after {READY_SECONDS:.0f} s")
        time.sleep(0.05)
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    words = (done.stdout + done.stderr).strip().splitlines()
    named = next((line for line in words if line.startswith("version")), "version unknown")
    return Server(port, str(child.pid), {"package": f"llama-server, {named}"})


def package(model: str, *, threads: int, context: int) -> Server:
    """The server inside xllamacpp, in this process."""
    xllamacpp = importlib.import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx, params.n_parallel = context, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.warmup, params.cache_ram_mib = False, 0
    server = xllamacpp.Server(params)
    port = int(server.listening_address.rpartition(":")[2])
    named = f"xllamacpp {version('xllamacpp')}"
    return Server(port, "self", {"package": named}, keep=server)


def _healthy(port: int) -> bool:
    connection = HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("llama-server", "xllamacpp"))
    parser.add_argument("program")
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    args = parser.parse_args()
    pipe = Pipe()
    model = str(Path(args.model).absolute())
    sizes = {"threads": args.threads, "context": args.context}
    if args.kind == "xllamacpp":
        server = package(model, **sizes)
    else:
        server = program(args.program, model, **sizes)
    ready = {"engine": "llama.cpp", "through": "its HTTP server", **server.ready, **sizes}
    pipe.serve(ready, {"request": server.request})


if __name__ == "__main__":
    main()
