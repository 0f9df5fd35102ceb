"""An arm: how it is switched on, and the counter that proves that it was.

A file (TOML) per arm. A process of its own (`[start]`), fields of the request (`[request]`), or
another address (`url`) switch it on. What a flag says proves nothing: `[engaged]` names a counter
of the server and what it has to say, and a comparison of arms without one is refused. Several
(`[[engaged]]`) must all hold; one with `every_sample = false` has to hold at least once.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from slotwise.errors import Finding, Refused, UsageError

Source = Literal["response", "props", "metrics", "trace"]
SOURCES: tuple[Source, ...] = ("response", "props", "metrics", "trace")
LARGEST_FILE = 1 << 20
READY_SECONDS = 600.0
_KEYS = {
    "": {"url", "start", "request", "engaged", "trace"},
    "start": {"command", "environment", "ready_seconds", "log"},
    "engaged": {"counter", "is", "above", "every_sample"},
}


@dataclass(frozen=True, kw_only=True)
class Start:
    """A process of its own: argv (no shell), what is added to its environment, its log."""

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    ready_seconds: float = READY_SECONDS
    log: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Engaged:
    """`counter` is ``source:name``; it must be `equals`, or more than `above`."""

    counter: str
    equals: str | float | bool | None = None
    above: float | None = None
    every_sample: bool = True
    """Or else once in an arm: a lever that works only where it finds something to do."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Engaged:
        """Out of a run record."""
        return cls(
            counter=data["counter"], equals=data["is"], above=data["above"],
            every_sample=data["every_sample"],
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        return {
            "counter": self.counter, "is": self.equals, "above": self.above,
            "every_sample": self.every_sample,
        }  # fmt: skip

    @property
    def source(self) -> Source:
        source = self.counter.partition(":")[0]
        return next(known for known in SOURCES if known == source)

    @property
    def name(self) -> str:
        return self.counter.partition(":")[2]

    @property
    def expected(self) -> str:
        return f"more than {self.above:g}" if self.above is not None else f"{self.equals}"

    def holds(self, value: Any) -> bool:
        """Whether what the counter said is what it has to say; None (absent) never is."""
        if value is None:
            return False
        if self.above is None:
            return bool(value == self.equals)
        return isinstance(value, int | float) and value > self.above


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to run the server. `url` is None where the command line's holds."""

    name: str
    url: str | None = None
    start: Start | None = None
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    engaged: tuple[Engaged, ...] = ()
    trace: Path | None = None
    """Trace or log of this arm's server, to pair with."""
    sha256: str | None = None

    @property
    def switched_on_by(self) -> list[str]:
        ways = {"process": self.start, "fields": self.fields, "url": self.url}
        return [name for name, way in ways.items() if way]


def parse_arm(text: str) -> Arm:
    """``NAME=FILE`` of the command line. Raises UsageError for a file that says no arm."""
    name, equals, file = text.partition("=")
    if not equals or not name or not file:
        raise UsageError(f"--arm {text}: expected NAME=FILE", next_step="--arm off=off.toml")
    return read_arm(name, Path(file))


def read_arm(name: str, path: Path) -> Arm:
    """The arm a file describes; paths in it begin at the file's folder."""
    data, sha256 = read_toml(path)
    refuse_unknown(data, _KEYS[""], path)
    trace = _get(data, "trace", str, path)
    return Arm(
        name=name,
        url=_get(data, "url", str, path),
        start=_start(_table(data, "start", path), path),
        fields=_table(data, "request", path),
        engaged=tuple(_engaged(table, path) for table in _tables(data, "engaged", path)),
        trace=None if trace is None else path.parent / trace,
        sha256=sha256,
    )


def check_arms(arms: list[Arm]) -> None:
    """Refuses a comparison in which an arm cannot prove that it was switched on."""
    names = [arm.name for arm in arms]
    if len(set(names)) != len(names):
        raise UsageError("two arms of one name", next_step="Give each --arm a name of its own.")
    if len(arms) < 2:
        return
    found = [
        Finding(
            level="refusal", code="no-engaged-counter", where=f"arm {arm.name}",
            found="no [engaged] counter: nothing would prove that it was really switched on",
            expected="a counter of the server in each arm that is compared",
            next_step="Add [engaged] with counter = "
            '"response:slotwise.record.refill.waited_ns" and above = 0, or another of your server.',
        )
        for arm in arms if not arm.engaged
    ]  # fmt: skip
    if found:
        raise Refused(found)


def read_toml(path: Path) -> tuple[dict[str, Any], str]:
    """A TOML file and its checksum. Raises UsageError where there is none."""
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE)
        return tomllib.loads(data.decode()), hashlib.sha256(data).hexdigest()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", next_step="Check the path.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not TOML: {error}") from error


def refuse_unknown(data: Mapping[str, Any], known: set[str], path: Path, where: str = "") -> None:
    for key in data:
        if key not in known:
            raise UsageError(
                f"{path}: unknown key {where}{key}",
                next_step=f"Known are: {', '.join(sorted(known))}.",
            )


def argv(value: Any, what: str, path: Path) -> tuple[str, ...]:
    """A command as a list of words; a shell is not used."""
    words = isinstance(value, list) and value and all(isinstance(w, str) and w for w in value)
    if not words:
        raise UsageError(
            f'{path}: {what} is not a list of words, like ["systemctl", "stop", "llama"]',
            next_step="No shell reads it: one entry per argument.",
        )
    return tuple(value)


def _start(data: dict[str, Any], path: Path) -> Start | None:
    if not data:
        return None
    refuse_unknown(data, _KEYS["start"], path, "start.")
    environment = _table(data, "environment", path)
    log = _get(data, "log", str, path)
    return Start(
        command=argv(data.get("command"), "start.command", path),
        environment={str(k): str(v) for k, v in environment.items()},
        ready_seconds=float(_get(data, "ready_seconds", (int, float), path) or READY_SECONDS),
        log=None if log is None else path.parent / log,
    )


def _engaged(data: dict[str, Any], path: Path) -> Engaged:
    refuse_unknown(data, _KEYS["engaged"], path, "engaged.")
    counter = _get(data, "counter", str, path) or ""
    source, colon, name = counter.partition(":")
    if source not in SOURCES or not colon or not name:
        raise UsageError(
            f"{path}: engaged.counter is {counter!r}",
            next_step=f"Expected SOURCE:NAME with a source of {', '.join(SOURCES)}.",
        )
    if ("is" in data) == ("above" in data):
        raise UsageError(f"{path}: [engaged] needs one of `is` and `above`")
    return Engaged(
        counter=counter,
        equals=_get(data, "is", (str, int, float, bool), path),
        above=_get(data, "above", (int, float), path),
        every_sample=_get(data, "every_sample", bool, path) is not False,
    )


def _table(data: Mapping[str, Any], key: str, path: Path) -> dict[str, Any]:
    return _get(data, key, dict, path) or {}


def _tables(data: Mapping[str, Any], key: str, path: Path) -> list[dict[str, Any]]:
    """`[key]`, or several `[[key]]`."""
    found = _get(data, key, (dict, list), path) or []
    found = [found] if isinstance(found, dict) else found
    if not all(isinstance(table, dict) for table in found):
        raise UsageError(f"{path}: {key} is no table", next_step=f"Write [{key}] or [[{key}]].")
    return found


def _get(data: Mapping[str, Any], key: str, kind: Any, path: Path) -> Any:
    value = data.get(key)
    if value is not None and not isinstance(value, kind):
        raise UsageError(f"{path}: {key} is {value!r:.60}, which is not what belongs there")
    return value
