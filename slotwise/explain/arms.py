"""What an arm on the command line is: a log, a folder of logs, or an arm of a ladder record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from slotwise.errors import SlotwiseError, UsageError
from slotwise.explain import progress
from slotwise.explain.readers import read_files
from slotwise.explain.readers.ladder_record import FIRST
from slotwise.explain.record import Life, Reading, shown_name

Named = tuple[str, Reading]


def two_arms(a: str, b: str | None) -> tuple[Named, Named]:
    """Two arms, named so that they can be told apart. One ladder record may hold both."""
    if b is None:
        path, _ = _split(a)
        held = _arms(_read([path]), path) if path.is_file() else {}
        if len(held) != 2 or str(path) != a:
            found = f"holds {len(held)} arms" if held else "is no ladder record"
            raise UsageError(
                f"one arm given: {a} {found}",
                next_step="Give two arms: logs, folders or RECORD:ARM; or a record with two arms.",
            )
        first, second = held.items()
        return first, second
    left, right = one_arm(a), one_arm(b)
    if left[0] == right[0]:  # not by their paths: those say more than their names
        return (f"{left[0]} (A)", left[1]), (f"{right[0]} (B)", right[1])
    return left, right


def one_arm(text: str) -> Named:
    """(name, reading) of one arm."""
    path, arm = _split(text)
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith("."))
        if not files:
            raise SlotwiseError(
                f"{shown_name(path.name)}: an empty folder", next_step="Give a folder with logs."
            )
        return shown_name(path.name), _read(files)
    reading = _read([path])
    held = _arms(reading, path)
    if not held and not arm:
        return shown_name(path.name), reading
    if not arm and len(held) == 1:
        (arm,) = held
    if arm not in held:
        raise UsageError(
            f"{shown_name(path.name)} has no arm {arm}"
            if arm
            else f"{shown_name(path.name)} holds {len(held)} arms",
            next_step=f"Give {shown_name(path.name)}:ARM. There are: {', '.join(held) or 'none'}",
        )
    return arm, held[arm]


def together(readings: Sequence[Reading]) -> Reading:
    """Several readings as one, in order."""
    unknown: dict[str, int] = {}
    for reading in readings:
        for shape, count in reading.unknown.items():
            unknown[shape] = unknown.get(shape, 0) + count
    return Reading(
        lives=tuple(life for r in readings for life in r.lives),
        unknown=unknown,
        lines=sum(r.lines for r in readings),
        bytes=sum(r.bytes for r in readings),
        files=tuple(name for r in readings for name in r.files),
        unreadable=tuple(name for r in readings for name in r.unreadable),
    )


def _read(files: Sequence[Path]) -> Reading:
    with progress.reading(files):
        return read_files(files)


def _arms(reading: Reading, path: Path) -> dict[str, Reading]:
    """The arms of a ladder record by name, in its order; empty for anything else.

    An arm's first samples come with it; only where there are no others are they counted.
    """
    lives: dict[str, list[Life]] = {}
    for life in reading.lives:
        if life.dialect == "ladder":
            name = life.file.removeprefix(f"{shown_name(path.name)}:")
            if all(request.first_of_life for request in life.requests):
                name = name.removesuffix(FIRST)
            lives.setdefault(name, []).append(life)
    return {name: replace(reading, lives=tuple(of)) for name, of in lives.items()}


def _split(text: str) -> tuple[Path, str]:
    """The file, and the arm's name where one is given after a colon."""
    path = Path(text)
    before, colon, arm = text.rpartition(":")
    if path.exists():
        return path, ""
    if colon and Path(before).is_file():
        return Path(before), arm
    raise UsageError(f"{text} is not there", next_step="Give a log, a folder or RECORD:ARM.")
