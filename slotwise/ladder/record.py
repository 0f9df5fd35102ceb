"""The run record on disk: written whole after every sample, read strictly.

Every write replaces the file at once, so that whatever happens a whole record is there. The key of
the server is looked for before each write and must not be in it.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

from slotwise import __version__
from slotwise.errors import SlotwiseError, UsageError
from slotwise.findings.validate import violations
from slotwise.ladder.schema import LADDER_SCHEMA, MAJOR, MINOR, ladder_schema

LARGEST_RECORD = 256 << 20
MOST_ISSUES = 8
LONGEST_MS = 1e12
"""30 years."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_VERSION = re.compile(r"slotwise\.ladder/v(\d+)(?:\.(\d+))?")


class InvalidRecord(SlotwiseError):
    """A file that is no run record, or one that does not hold."""

    exit_code: ClassVar[int] = 4


@dataclass
class Record:
    """A record being written. `data` is the document."""

    path: Path
    data: dict[str, Any]
    key: str = field(default="", repr=False)

    def save(self) -> None:
        """Raises OSError when there is no room; the last whole record stays.

        A device or a pipe is never replaced: UsageError.
        """
        check_replaceable(self.path)
        text = json.dumps(self.data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        if self.key and self.key in text:
            raise SlotwiseError("a record that would hold the server's key was not written")
        target = self.path.resolve()  # of a link, what it points to
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            with part.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        finally:
            part.unlink(missing_ok=True)

    def end(self, status: str, why: str = "") -> None:
        self.data |= {"status": status, "status_why": why, "ended": now()}

    def warn(self, text: str) -> None:
        if text not in self.data["warnings"]:
            self.data["warnings"].append(text)

    def since_zero(self, stamp_ns: int) -> int:
        """A monotonic stamp on the run's clock."""
        return stamp_ns - self.data["clock"]["zero_monotonic_ns"]


def check_replaceable(path: Path) -> None:
    """Raises UsageError for what is there and is no ordinary file: replacing /dev/null would take
    it away from the whole machine."""
    if path.exists() and not path.is_file():
        raise UsageError(
            f"{path} is no ordinary file, and a record is written and read again",
            next_step="Name a file.",
        )


def new_record(path: Path, *, plan: dict[str, Any], machine: dict[str, Any], key: str) -> Record:
    data = {
        "schema": LADDER_SCHEMA,
        "run": secrets.token_hex(8),
        "status": "running",
        "status_why": "",
        "tool": {"name": "slotwise", "version": __version__},
        "started": now(),
        "ended": None,
        "clock": {
            "name": time.get_clock_info("perf_counter").implementation,
            "zero_monotonic_ns": time.perf_counter_ns(),
            "zero_unix_ns": time.time_ns(),
        },
        "machine": machine,
        "plan": plan,
        "arms": [],
        "samples": [],
        "probes": [],
        "pairing": None,
        "service": None,
        "limitations": [],
        "warnings": [],
    }
    return Record(path, data, key)


def read_record(path: Path) -> dict[str, Any]:
    """A record that satisfies the schema. Raises InvalidRecord with everything that is wrong."""
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST_RECORD + 1)
        data: Any = json.loads(raw) if len(raw) <= LARGEST_RECORD else None
    except OSError as error:
        raise SlotwiseError(f"{path}: {error.strerror}", next_step="Check the path.") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRecord(
            f"{path}: not a JSON document", next_step="Give the --out of a `slotwise ladder` run."
        ) from error
    issues = list(_issues(data))
    if issues:
        more = f"\nand {len(issues) - MOST_ISSUES} more" if len(issues) > MOST_ISSUES else ""
        raise InvalidRecord(f"{path}: " + "\n".join(issues[:MOST_ISSUES]) + more)
    return _printable(data)


def _printable(value: Any) -> Any:
    """Without control characters, which a terminal would obey."""
    if isinstance(value, dict):
        return {_printable(key): _printable(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_printable(inner) for inner in value]
    return _CONTROL.sub("?", value) if isinstance(value, str) else value


def _issues(data: Any) -> Iterator[str]:
    if not isinstance(data, dict):
        yield "not a run record"
        return
    version = _VERSION.fullmatch(str(data.get("schema")))
    if version is None:
        yield f"schema is {data.get('schema')!r:.60}; expected {LADDER_SCHEMA}"
        return
    if int(version[1]) > MAJOR:
        yield f"schema is {version[0]}, newer than this slotwise reads; update it"
        return
    newer = int(version[2] or 0) > MINOR
    schema = ladder_schema()
    if newer:
        schema["properties"]["schema"] = {"type": "string"}
    found = False
    for place, message in violations(data, schema, newer=newer):
        found = True
        yield f"{place or 'the document'} {message}"
    if not found:
        yield from _contradictions(data)


def _contradictions(data: dict[str, Any]) -> Iterator[str]:
    """What a schema cannot say: samples belong to arms, and numbers are times."""
    names = [arm["name"] for arm in data["arms"]]
    if len(set(names)) < len(names):
        yield "arms: two of one name"
    counters = {arm["name"]: len(arm["engaged"]) for arm in data["arms"]}
    for number, sample in enumerate(data["samples"]):
        place = f"samples[{number}]"
        if sample["arm"] not in counters:
            yield f"{place}.arm is of no arm of the record"
        elif len(sample["engaged"]) != counters[sample["arm"]]:
            yield f"{place}.engaged does not answer to its arm's counters"
        times = [*sample["edges_ms"].values(), *sample["token_ms"]]
        if not all(t is None or 0 <= t < LONGEST_MS for t in times):
            yield f"{place} has a time that is none"


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
