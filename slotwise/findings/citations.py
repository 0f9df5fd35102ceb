"""Cited source lines, read from a git checkout at the revision a record names.

Only reads objects (`git cat-file`): the working tree does not matter and nothing is fetched.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from slotwise.findings.record import Source

LARGEST_BLOB = 32 * 1024**2
SECONDS = 60


class NotCited(Exception):
    """The citation is wrong: what it points at is not there. `str()` says how."""


class CannotCheck(Exception):
    """Git, the checkout or the revision is not there, or a file is too large to be read."""


@dataclass(frozen=True)
class Citation:
    """Cited lines as they are; `sha256` of their bytes with their line ends."""

    source: Source
    lines: tuple[str, ...]
    sha256: str


class Checkout:
    """A git checkout at one revision. The constructor raises CannotCheck."""

    def __init__(self, path: Path, revision: str) -> None:
        self.path, self.revision = path, revision
        self._blob = cache(self._read_blob)
        _git(path, "rev-parse", "--git-dir")
        kind = _ask(path, "cat-file", "-t", revision)
        if kind != "commit":
            what = f"is a {kind}, not a commit" if kind else "is not there (git fetch may bring it)"
            raise CannotCheck(f"{path.name or path}: revision {revision} {what}")

    def cite(self, source: Source) -> Citation:
        """The cited lines. Raises NotCited, CannotCheck."""
        lines = io.BytesIO(self._blob(source.path)).readlines()
        if source.end_line > len(lines):
            raise NotCited(f"{source.path} has {len(lines):,} lines at that revision")
        cited = lines[source.start_line - 1 : source.end_line]
        digest = hashlib.sha256(b"".join(cited)).hexdigest()
        return Citation(source, tuple(line.decode(errors="replace") for line in cited), digest)

    def _read_blob(self, path: str) -> bytes:
        name = f"{self.revision}:{path}"
        kind = _ask(self.path, "cat-file", "-t", name)
        if kind != "blob":
            what = {"": "is not there", "tree": "is a folder"}.get(kind, f"is a {kind}")
            raise NotCited(f"{path} {what} at that revision")
        size = int(_ask(self.path, "cat-file", "-s", name) or 0)
        if size > LARGEST_BLOB:
            raise CannotCheck(f"{path} has {size:,} bytes, more than is read ({LARGEST_BLOB:,})")
        data = _git(self.path, "cat-file", "blob", name)
        if b"\0" in data[:8000]:
            raise NotCited(f"{path} is a binary file")
        return data


def head_of(path: Path) -> tuple[str, str]:
    """(remote or folder name, HEAD's 40 digits) of a checkout. Raises CannotCheck."""
    revision = _git(path, "rev-parse", "--verify", "HEAD").decode().strip()
    remote = _ask(path, "config", "--get", "remote.origin.url")
    if not remote or remote.startswith(("/", ".", "file:")):
        return path.resolve().name, revision
    return re.sub(r"^(\w+://)[^/@]*@", r"\1", remote), revision  # a password may be in it


def _ask(path: Path, *arguments: str) -> str:
    """One word of an answer; "" when git says no."""
    try:
        return _git(path, *arguments).decode(errors="replace").strip()
    except CannotCheck as error:
        if isinstance(error.__cause__, subprocess.CalledProcessError):
            return ""
        raise


def _git(path: Path, *arguments: str) -> bytes:
    if not path.is_dir():
        raise CannotCheck(f"{path} is not a folder")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment |= {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_NO_LAZY_FETCH": "1",
                    "GIT_NO_REPLACE_OBJECTS": "1"}  # fmt: skip
    try:
        done = subprocess.run(
            ["git", "-C", str(path), *arguments],
            env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=True,
            timeout=SECONDS,
        )  # fmt: skip
    except FileNotFoundError:
        raise CannotCheck("git is not installed") from None
    except subprocess.TimeoutExpired:
        raise CannotCheck(f"git did not answer in {SECONDS} s") from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines()
        text = f"git cannot read {path.name or path}: {said[0] if said else 'no reason given'}"
        raise CannotCheck(text) from error
    except OSError as error:
        raise CannotCheck(f"git cannot be run: {error.strerror}") from None
    return done.stdout
