"""Starts llama.cpp's real server on a model file, prints its address, serves until killed.

A program of its own: `python llama_server.py MODEL [PORT]`.
"""

from __future__ import annotations

import signal
import sys

import xllamacpp  # its classes are in a compiled module without types


def main() -> None:
    model, port = [*sys.argv[1:], "0"][:2]
    params = xllamacpp.CommonParams()  # pyright: ignore[reportAttributeAccessIssue]
    params.model.path = model
    params.port = int(port)
    params.n_ctx = 4096
    params.n_parallel = 1
    params.endpoint_metrics = True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)  # pyright: ignore[reportAttributeAccessIssue]
    print(server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    del server


if __name__ == "__main__":
    main()
