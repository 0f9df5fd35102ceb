"""Which files make up one split model, and whether they fit together.

A shard states its place twice: in its name (``stem-00002-of-00003.gguf``) and in its keys
(`split.no` counted from 0, `split.count`, `split.tensors.count`). Siblings are found by name; name
and keys have to agree. The convention is llama.cpp's (gguf-split). Only headers are read.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from gguf.constants import Keys

from slotwise.errors import Finding, Refused
from slotwise.weights.header import Shard, read_header, refusal, shown

_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{1,5})-of-(?P<count>\d{1,5})\.gguf", re.I)
_MAX_SHARDS = 0xFFFF
_MAX_NEIGHBOURS = 16
_FEW = 8
_ONE_SET = "Keep the shards of exactly one download in the folder."


@dataclass(frozen=True)
class Member:
    """One file of a set. `shard` is None when its header cannot be read."""

    path: Path
    shard: Shard | None

    @cached_property
    def named(self) -> tuple[int, int]:
        """(number from 1, count) as the name has it; (1, 1) when it has neither."""
        match = _NAME.fullmatch(self.path.name)
        return (int(match["number"]), int(match["count"])) if match else (1, 1)

    @property
    def kept(self) -> tuple[int | None, int | None]:
        """(number from 1, count) as the keys have it; None for a missing or senseless one."""
        number = self._key(Keys.Split.LLM_KV_SPLIT_NO)
        return None if number is None else number + 1, self._key(Keys.Split.LLM_KV_SPLIT_COUNT)

    @property
    def total(self) -> int | None:
        """`split.tensors.count`: how many tensors all the shards have together."""
        value = self.shard and self.shard.metadata.get(Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT)
        return value if type(value) is int else None

    @property
    def number(self) -> int:
        """The shard's number from 1: its keys' if they have one, else its name's."""
        return self.kept[0] or self.named[0]

    @property
    def splits(self) -> bool:
        """Whether the keys say that there are other shards."""
        return (self.kept[1] or 0) > 1

    def _key(self, key: str) -> int | None:
        value = self.shard.metadata.get(key) if self.shard else None
        return value if type(value) is int and 0 <= value <= _MAX_SHARDS else None


def sibling_files(path: Path) -> list[Path]:
    """`path`, and the files beside it that by their names belong to the same set; in order."""
    match = _NAME.fullmatch(path.name)
    if not match or int(match["count"]) < 2 or not path.is_file():
        return [path]
    found = {path}
    for other in _folder(path):
        theirs = _NAME.fullmatch(other.name)
        if (
            theirs
            and theirs["stem"] == match["stem"]
            and int(theirs["count"]) == int(match["count"])
        ):
            found.add(other)
    return sorted(found, key=lambda file: (Member(file, None).named, file.name))


def set_findings(members: Sequence[Member]) -> Iterator[Finding]:
    """Everything that keeps the files from being one whole model."""
    if len(members) == 1 and (members[0].named[1] < 2 or not members[0].splits):
        yield from _single_findings(members[0])
        return
    yield from _key_findings(members)
    yield from _foreign_findings(members)
    conflicts = [*_duplicate_findings(members), *_missing_findings(members)]
    yield from conflicts
    yield from _order_findings(members)
    total, held = members[0].total, sum(len(m.shard.tensors) for m in members if m.shard)
    if not conflicts and all(m.shard for m in members) and total not in (None, held):
        found = f"and its siblings hold {held:,} tensors"
        expected = f"the {total:,} that split.tensors.count announces"
        yield refusal(members[0].path, "shard-tensor-count", found, expected)


def _single_findings(member: Member) -> Iterator[Finding]:
    """One file whose name and keys do not both say that it is part of a set."""
    path, shard = member.path, member.shard
    number, count = member.kept
    if shard and member.splits and member.total == len(shard.tensors):
        found = f"says it is shard {number} of {count}, but it holds all {member.total:,} tensors"
        yield _warning(path, found, "no split keys in a whole model")
    elif shard and member.splits:
        found = f"says it is shard {number} of {count}; its name does not, so the others cannot "
        found += "be found"
        name = _file_name(path.stem, number or 1, count or 1)
        step = f"Rename it to {name} and the others alike.{_neighbour_hint([member])}"
        yield refusal(path, "shard-name", found, f"a name like {name}", step)
    elif shard and member.named[1] > 1:
        found = f"is named as shard {member.named[0]} of {member.named[1]}, but says nothing of it"
        yield _warning(path, found, "split keys in a shard")


def _key_findings(members: Sequence[Member]) -> Iterator[Finding]:
    for member in members:
        if member.shard is None:
            continue
        (number, count), named = member.kept, member.named
        if number is None or count is None:
            found = "has no usable split.no and split.count"
            yield refusal(member.path, "shard-keys", found, f"shard {named[0]} of {named[1]}")
        elif count != named[1] or not 1 <= number <= count:
            found = f"says it is shard {number} of {count}"
            expected = f"a shard of {named[1]}, as its name has it"
            yield refusal(member.path, "shard-count", found, expected, _ONE_SET)
        if not 1 <= named[0] <= named[1]:
            found = f"is named shard {named[0]} of {named[1]}"
            yield refusal(member.path, "shard-name", found, f"1 to {named[1]}", _ONE_SET)


def _foreign_findings(members: Sequence[Member]) -> Iterator[Finding]:
    """Shards that disagree with the first one about the model they are part of."""
    readable = sorted((m for m in members if m.shard), key=lambda m: m.number)
    for member in readable[1:]:
        theirs, first = _identity(member), _identity(readable[0])
        for key in theirs.keys() & first.keys():
            if theirs[key] != first[key]:
                found = f"has {key} = {shown(str(theirs[key]))}: a shard of another model"
                expected = f"{shown(str(first[key]))}, as in {readable[0].path.name}"
                yield refusal(member.path, "shard-foreign", found, expected, _ONE_SET)


def _identity(member: Member) -> dict[str, Any]:
    keys = (Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT, Keys.General.ARCHITECTURE, Keys.General.NAME)
    metadata = member.shard.metadata if member.shard else {}
    return {key: metadata[key] for key in keys if key in metadata}


def _duplicate_findings(members: Sequence[Member]) -> Iterator[Finding]:
    for way in ("name", "split.no"):
        claims: defaultdict[int | None, list[Path]] = defaultdict(list)
        for member in members:
            claims[member.named[0] if way == "name" else member.kept[0]].append(member.path)
        claims.pop(None, None)
        for number, paths in claims.items():
            if len(paths) > 1:
                others = ", ".join(path.name for path in paths[1:])
                found = f"and {others} are all shard {number} by their {way}"
                yield refusal(paths[0], "shard-duplicate", found, "one file a number", _ONE_SET)


def _order_findings(members: Sequence[Member]) -> Iterator[Finding]:
    """Shards whose keys give another number than their name, and no other file has that number."""
    kept = [m.kept[0] for m in members]
    moved = [
        m for m in members if m.kept[0] not in (None, m.named[0]) and kept.count(m.kept[0]) == 1
    ]
    if moved:
        found = ", ".join(f"{m.path.name} says it is shard {m.kept[0]}" for m in moved[:_FEW])
        expected = "file names in the order of split.no"
        step = "Rename the files to the numbers they state."
        yield refusal(moved[0].path.parent, "shard-order", found, expected, step)


def _missing_findings(members: Sequence[Member]) -> Iterator[Finding]:
    count = min(members[0].named[1], _MAX_SHARDS)
    missing = sorted(set(range(1, count + 1)) - {m.number for m in members})
    if missing:
        match = _NAME.fullmatch(members[0].path.name)
        stem = match["stem"] if match else members[0].path.stem
        names = ", ".join(_file_name(stem, number, count) for number in missing[:_FEW])
        found = f"lacks {len(missing):,} of {count:,} shards: {names}"
        found += ", ..." if len(missing) > _FEW else ""
        step = f"Put the missing files beside the others.{_neighbour_hint(members)}"
        yield refusal(members[0].path.parent, "shard-missing", found, "all of them", step)


def _neighbour_hint(members: Sequence[Member]) -> str:
    """Names files in the folder that by their keys belong to the set but are named otherwise."""
    known, first = {m.path for m in members}, members[0]
    hints = []
    for path in [p for p in _folder(first.path) if p not in known][:_MAX_NEIGHBOURS]:
        try:
            other = Member(path, read_header(path))
        except Refused:
            continue
        if other.splits and other.kept[1] == first.kept[1] and other.total == first.total:
            hints.append(f"{path.name} says it is shard {other.number} of such a set")
    return "".join(f" {hint}." for hint in hints[:_FEW])


def _folder(path: Path) -> list[Path]:
    try:
        return sorted(p for p in path.parent.iterdir() if p.suffix.lower() == ".gguf")
    except OSError:
        return []


def _file_name(stem: str, number: int, count: int) -> str:
    return f"{stem}-{number:05}-of-{count:05}.gguf"


def _warning(path: Path, found: str, expected: str) -> Finding:
    step = "It is read as a whole model; rename it if that is not what it is."
    return replace(refusal(path, "shard-name", found, expected, step), level="warning")
