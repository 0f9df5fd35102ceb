"""The examples of docs/serve.md run as they are, but for the port."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from serve.served import Served

PAGE = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
PORT = "8080"


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def test_the_first_example(talking: Path, tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    shutil.copyfile(talking, tmp_path / "demo" / "smollm2-32x4.gguf")
    port = str(free_port())
    script = block("sh").replace("serve demo", f"serve --port {port} demo").replace(PORT, port)
    assert PORT not in script
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-m", "-c", f"{script}wait"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PATH": path, "XDG_CACHE_HOME": str(tmp_path)}, check=False, timeout=120,
    )  # fmt: skip
    answer = json.loads(done.stdout[done.stdout.index("{") :])
    assert answer["slotwise"]["record"]["status"] == "done", done.stderr
    assert "Traceback" not in done.stderr


def test_the_example_with_openai_s_client(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    code = block("py").replace(f"http://127.0.0.1:{PORT}", served.url)
    space: dict[str, object] = {}
    exec(compile(code, "docs/serve.md", "exec"), space)
    assert "first_window" in capsys.readouterr().out
    space["client"].close()  # type: ignore[attr-defined]


def test_the_page_names_every_path() -> None:
    from slotwise.serve.openapi import document

    for path in document()["paths"]:
        assert path in PAGE or path == "/version", path
