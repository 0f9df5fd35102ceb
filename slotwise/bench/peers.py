"""Which llama.cpp to measure against, out of what `--against` says."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from slotwise.errors import SlotwiseError, UsageError

NAME = "llama.cpp"
_ASK = """\
from importlib.util import find_spec
print(*(name for name in ("llama_cpp", "xllamacpp") if find_spec(name)))
"""
_PROBE_SECONDS = 60


class NoPeer(SlotwiseError):
    """There is no such engine here."""

    exit_code = 3


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A worker that drives llama.cpp, and the Python it runs in."""

    worker: str
    arguments: tuple[str, ...]
    python: str


def find_peer(text: str) -> Peer:
    """`llama.cpp` (in this Python), `llama.cpp:PYTHON` or `llama.cpp:/a/llama-server`.

    Raises UsageError for anything else, and NoPeer where there is no llama.cpp.
    """
    name, _, where = text.partition(":")
    if name != NAME:
        raise UsageError(
            f"--against {text!r} is not known", next_step=f"Write {NAME} or {NAME}:PYTHON."
        )
    program = shutil.which(where) if where else sys.executable
    if program is None:
        raise NoPeer(f"--against {text}: no program {where}", next_step="Give its full path.")
    if Path(program).name.startswith("llama-server"):
        return Peer(worker="server", arguments=("llama-server", program), python=sys.executable)
    return _in_python(program)


def _in_python(python: str) -> Peer:
    try:
        done = subprocess.run(
            [python, "-c", _ASK], capture_output=True, text=True, check=True, timeout=_PROBE_SECONDS
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NoPeer(
            f"{python} is no Python that runs: {error}", next_step="Name a Python interpreter."
        ) from None
    found = done.stdout.split()
    if "llama_cpp" in found:
        return Peer(worker="peer", arguments=("llama-cpp-python",), python=python)
    if "xllamacpp" in found:
        return Peer(worker="server", arguments=("xllamacpp", "-"), python=python)
    raise NoPeer(
        f"{python} has neither llama-cpp-python nor xllamacpp",
        next_step="Install one there, or name another Python: --against llama.cpp:PYTHON.",
    )
