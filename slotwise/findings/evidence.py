"""Evidence files: are they there, are they the ones the record means, and which numbers they hold.

JSON, JSON lines and text (a log), each also compressed with gzip. Files of any size are hashed
whole; numbers are searched in the first 64 MiB. What a number means is for the reader to judge: the
place it was found at is kept.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from slotwise.findings.numbers import Found, Stated, agrees, numbers_in_text, unit_of_key

SEARCHED = 64 * 1024**2
BLOCK = 1024**2
LONGEST_LINE = 64 * 1024


class Unreadable(Exception):
    """The file cannot be read or is not what it should be; `str()` says how."""


@dataclass(frozen=True)
class Opened:
    """An evidence file that is there. `document` is None unless all of it is JSON."""

    path: Path
    document: Any = None
    json_lines: bool = False
    whole: bool = True
    """False when the file is larger than what is searched."""


def file_sha256(path: Path) -> str:
    """Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_evidence(path: Path) -> Opened:
    """Reads what is needed to search it. Raises Unreadable."""
    try:
        with _stream(path) as file:
            head = file.read(SEARCHED + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise Unreadable(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(head) > SEARCHED:
        return Opened(path, whole=False)
    try:
        return Opened(path, json.loads(head.decode("utf-8-sig")))
    except (ValueError, RecursionError):
        lines = head.split(b"\n", 1)[0].strip()
        return Opened(path, json_lines=lines.startswith(b"{") and lines.endswith(b"}"))


def search(opened: Opened, wanted: list[Stated]) -> dict[Stated, Found]:
    """The first number of the file that agrees with each; those not found are left out."""
    left, places = set(wanted), {}
    for found in _numbers(opened):
        for stated in [s for s in left if agrees(s, found)]:
            places[stated] = found
            left.discard(stated)
        if not left:
            break
    return places


def at_pointer(opened: Opened, pointer: str) -> Found:
    """The number a JSON pointer (RFC 6901) leads to. Raises Unreadable."""
    document = opened.document
    parts = [p.replace("~1", "/").replace("~0", "~") for p in pointer.split("/")[1:]]
    if document is None:
        if not opened.json_lines or not parts:
            raise Unreadable("is not JSON, so a pointer leads nowhere")
        document = {parts[0]: _json_line(opened, parts[0])}
    for part in parts:
        if isinstance(document, dict) and part in document:
            document = document[part]
        elif isinstance(document, list) and part.isdecimal() and int(part[:9]) < len(document):
            document = document[int(part[:9])]
        else:
            raise Unreadable(f"has no {pointer}")
    if isinstance(document, bool) or not isinstance(document, int | float | str):
        raise Unreadable(f"has no number at {pointer}")
    found = next(_walk(document, pointer), None)
    if found is None:
        raise Unreadable(f"has no number at {pointer}")
    return found


def in_line(opened: Opened, number: int, stated: Stated) -> Found | None:
    """The number of line `number` that agrees. Raises Unreadable when there is no such line."""
    for count, line in _lines(opened):
        if count == number:
            found = numbers_in_text(line, f"line {number}")
            return next((f for f in found if agrees(stated, f)), None)
    raise Unreadable(f"has no line {number}")


def _json_line(opened: Opened, index: str) -> Any:
    for count, line in _lines(opened):
        if str(count - 1) == index:
            try:
                return json.loads(line)
            except (ValueError, RecursionError):
                raise Unreadable(f"has no JSON in line {count}") from None
    raise Unreadable(f"has no line at /{index}")


def _numbers(opened: Opened) -> Iterator[Found]:
    if opened.document is not None:
        yield from _walk(opened.document, "")
        return
    seen: set[Any] = set()
    for count, line in _lines(opened):
        if line.startswith("{"):
            try:
                yield from _walk(json.loads(line), f"/{count - 1}")
                continue
            except (ValueError, RecursionError):
                pass
        yield from numbers_in_text(line, f"line {count}", seen=seen)


def _walk(document: Any, pointer: str) -> Iterator[Found]:
    """Every number of a JSON value; the unit is what its key ends in. Not recursive on purpose."""
    pending = [(document, pointer, unit_of_key(pointer.rpartition("/")[2]))]
    while pending:
        value, place, unit = pending.pop()
        if isinstance(value, dict):
            inside = [(v, f"{place}/{_escaped(k)}", unit_of_key(k) or unit)
                      for k, v in value.items()]  # fmt: skip
            pending += reversed(inside)
        elif isinstance(value, list):
            pending += [(v, f"{place}/{i}", unit) for i, v in reversed([*enumerate(value)])]
        elif isinstance(value, str):
            yield from numbers_in_text(value[:LONGEST_LINE], place)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            try:
                yield Found(float(value), unit, place)
            except OverflowError:
                continue


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _lines(opened: Opened) -> Iterator[tuple[int, str]]:
    """(number, text) of the lines in the searched part; of long lines only the beginning."""
    with _stream(opened.path) as file:
        count, read = 0, 0
        while read < SEARCHED and (line := file.readline(LONGEST_LINE)):
            count, read = count + 1, read + len(line)
            yield count, line.decode("utf-8", errors="replace")
            while read < SEARCHED and not line.endswith(b"\n"):
                line = file.readline(BLOCK)
                read += len(line) or SEARCHED


def _stream(path: Path) -> IO[bytes]:
    if not path.is_file():  # a pipe would never end
        raise FileNotFoundError(2, "is not a file", str(path))
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]
