"""Records as JSON data: encode them, decode them, and say how each number was obtained.

A dataclass field that holds a number declares how it is obtained in its metadata, and why it
may be null (`measured`, `derived`). `Record.to_dict` collects those declarations in a table at
the end of the record, so no number leaves without one and no null without a reason.

It does not know any event or phase. Absolute paths in strings are cut to their last part here,
so no record or trace can hold the name of a folder.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from slotwise.errors import SlotwiseError

How = Literal["measured", "derived", "bounded", "missing"]

_FOLDERS = re.compile(r"(?<![\w.])(?:~[^\s/\\]*|[A-Za-z]:)?[/\\](?:[^/\\:\"'\n]+[/\\])+")


def measured(*, null: str = "") -> dict[str, str]:
    """Field metadata: read from a clock or a counter. `null` is the reason for a None."""
    return {"how": "measured", "null": null}


def derived(*, null: str = "") -> dict[str, str]:
    """Field metadata: computed from other fields. `null` is the reason for a None."""
    return {"how": "derived", "null": null}


def optional(null: str) -> dict[str, str]:
    """Field metadata for something that is not a number: the reason for a None."""
    return {"null": null}


def without_folders(text: str) -> str:
    """`text` with every absolute path in it cut to its last part."""
    return _FOLDERS.sub("", text) if "/" in text or "\\" in text else text


class Record:
    """Base of dataclasses that travel on their own: a schema id, `how` and `missing` tables."""

    SCHEMA: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data: schema, fields, `how` (path -> How), `missing` (path -> reason).

        A `*` in a path stands for every key of that mapping.
        """
        how, missing = how_table(self)
        return {"schema": self.SCHEMA, **encode_fields(self), "how": how, "missing": missing}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`. Unknown keys are ignored (a newer minor version wrote them).

        Raises SlotwiseError for another schema or a newer major version, ValueError for
        content that does not fit.
        """
        return decode(cls, data)


def check_schema(found: object, expected: str) -> None:
    """Refuse a schema id of another kind, or of a newer major version than `expected`."""
    kind, _, version = expected.rpartition("/v")
    match = re.fullmatch(re.escape(kind) + r"/v(\d+)", found) if isinstance(found, str) else None
    if match is None:
        raise SlotwiseError(f"schema is {found!r:.80}, expected {expected!r}")
    if int(match[1]) > int(version):
        raise SlotwiseError(
            f"schema is {found!r}, this slotwise reads up to {expected!r}",
            next_step="Read it with the slotwise that wrote it, or a newer one.",
        )


def encode(value: Any) -> Any:
    """Dataclasses, mappings and sequences as plain JSON data; integers of any kind as int."""
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str):
        return without_folders(value)
    if isinstance(value, Record):
        return value.to_dict()
    if dataclasses.is_dataclass(value):
        return encode_fields(value)
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if hasattr(value, "__index__"):  # numpy integers
        return int(value)
    raise TypeError(f"{type(value).__name__} cannot be part of a record")


def encode_fields(value: Any) -> dict[str, Any]:
    """The fields of one dataclass, without the tables that a Record adds."""
    return {name: encode(getattr(value, name)) for name in _field_names(type(value))}


@functools.cache
def _field_names(cls: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


@functools.cache
def _init_names(cls: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls) if field.init)


def how_table(value: Any) -> tuple[dict[str, str], dict[str, str]]:
    """(path -> how, path -> reason it is null) over a dataclass; nested Records have their own."""
    how: dict[str, str] = {}
    missing: dict[str, str] = {}
    _collect(value, "", how, missing)
    return how, missing


def _collect(value: Any, path: str, how: dict[str, str], missing: dict[str, str]) -> None:
    for field in dataclasses.fields(value):
        item, where = getattr(value, field.name), path + field.name
        if isinstance(item, Record):
            continue
        if item is None and field.metadata.get("null"):
            how.setdefault(where, "missing")
            missing[where] = field.metadata["null"]
        elif dataclasses.is_dataclass(item):
            _collect(item, f"{where}.", how, missing)
        elif isinstance(item, Mapping):
            for entry in item.values():
                _collect(entry, f"{where}.*.", how, missing)
        elif "how" in field.metadata:
            how[where] = field.metadata["how"]


def decode(hint: Any, value: Any, where: str = "") -> Any:
    """`value` (JSON data) as the type `hint` says. ValueError names the place that does not fit."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _decode_dataclass(typing.cast(type, hint), value, where)
    if origin is typing.Literal:
        return _expect(value, value in arguments, f"one of {arguments}", where)
    if origin is types.UnionType:
        if value is None:
            return _expect(value, type(None) in arguments, "a value", where)
        return decode(next(a for a in arguments if a is not type(None)), value, where)
    if origin is Mapping:
        _expect(value, isinstance(value, Mapping), "an object", where)
        return {k: decode(arguments[1], item, f"{where}.{k}") for k, item in value.items()}
    if origin is tuple:
        _expect(value, isinstance(value, list), "a list", where)
        return tuple(decode(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    fits = isinstance(value, hint) and isinstance(value, bool) == (hint is bool)
    return _expect(value, fits, hint.__name__, where)


def _decode_dataclass(cls: type, value: Any, where: str) -> Any:
    _expect(value, isinstance(value, Mapping), "an object", where)
    if issubclass(cls, Record):
        check_schema(value.get("schema"), cls.SCHEMA)
    hints = field_types(cls)
    place = f"{where}." if where else ""
    known = {
        name: decode(hints[name], value[name], place + name)
        for name in _init_names(cls)
        if name in value
    }
    try:
        return cls(**known)
    except TypeError as error:  # a required field is absent
        raise ValueError(f"{where or cls.__name__}: {error}") from error


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """The resolved type of every field of a dataclass."""
    hints = typing.get_type_hints(cls)
    return {name: hints[name] for name in _field_names(cls)}


def _expect(value: Any, fits: bool, expected: str, where: str) -> Any:
    if not fits:
        raise ValueError(f"{where or 'value'}: found {value!r:.60}, expected {expected}")
    return value
