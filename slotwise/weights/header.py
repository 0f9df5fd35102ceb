"""Reads the header of one GGUF file: metadata and the list of tensors. Never reads tensor data.

The bytes are not trusted: every length is held against the file's size and the limits below before
anything is allocated or looped over, so the cost is bounded whatever the file says. Whether the
tensors make sense (types, shapes, places) is for tensor_checks.py.
Format: docs/gguf.md of ggml-org/ggml, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from math import prod
from pathlib import Path
from struct import Struct
from typing import Any, NoReturn

import numpy as np
from gguf.constants import GGUF_DEFAULT_ALIGNMENT, GGUFValueType, Keys

from slotwise.errors import Finding, Refused
from slotwise.weights.ggml_types import GGML_TYPES, tensor_bytes

MAX_HEADER = 64 << 20
MAX_ITEMS = 4 << 20
MAX_TENSORS = 1 << 18
MAX_KEYS = 1 << 16
MAX_NESTING = 4
MAX_DIMS = 4
MAX_ELEMENTS = 1 << 62

REDOWNLOAD = "Download or convert the file again."

_FIRST_READ = 1 << 20
_LIES_INSIDE = "a header that lies inside the file: it is truncated or damaged"
_STRING, _ARRAY = int(GGUFValueType.STRING), int(GGUFValueType.ARRAY)
_U32, _U64 = Struct("<I"), Struct("<Q")
_SCALARS = {
    int(kind): Struct("<" + code)
    for kind, code in {
        GGUFValueType.UINT8: "B",
        GGUFValueType.INT8: "b",
        GGUFValueType.UINT16: "H",
        GGUFValueType.INT16: "h",
        GGUFValueType.UINT32: "I",
        GGUFValueType.INT32: "i",
        GGUFValueType.FLOAT32: "f",
        GGUFValueType.BOOL: "?",
        GGUFValueType.UINT64: "Q",
        GGUFValueType.INT64: "q",
        GGUFValueType.FLOAT64: "d",
    }.items()
}
_ITEM_BYTES = {kind: layout.size for kind, layout in _SCALARS.items()} | {_STRING: 8, _ARRAY: 12}


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies. `shape` in ggml order (row length first), `offset` from file start."""

    name: str
    type: int
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int
    """0 when the type is unknown or the shape impossible (tensor_checks.py refuses both)."""


@dataclass(frozen=True)
class Shard:
    """One GGUF file. Strings in `metadata` keep invalid UTF-8 as lone surrogates, losslessly."""

    path: Path
    size: int
    version: int
    metadata: dict[str, Any]
    tensors: tuple[TensorInfo, ...]
    data_offset: int
    header_sha256: str

    @property
    def alignment(self) -> int:
        return self.metadata.get(Keys.General.ALIGNMENT, GGUF_DEFAULT_ALIGNMENT)


def refusal(
    where: Path | str, code: str, found: str, expected: str, next_step: str = REDOWNLOAD
) -> Finding:
    """A Finding of level "refusal"."""
    return Finding(
        level="refusal",
        code=code,
        where=str(where),
        found=found,
        expected=expected,
        next_step=next_step,
    )


def shown(text: str) -> str:
    """A name out of a file, made safe to print: quoted, escaped and not endless."""
    return repr(text if len(text) <= 80 else text[:77] + "...")


def read_header(path: Path) -> Shard:
    """Reads one file's header. Refused when it is not a readable GGUF header, nothing else."""
    try:
        return _read_header(path)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        found = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        step = "Check the path and its permissions."
        finding = refusal(path, "file-unreadable", found, "a readable GGUF file", step)
    raise Refused([finding])


def _read_header(path: Path) -> Shard:
    # A pipe would block for ever in open(), so the kind of file is looked at first.
    if not stat.S_ISREG(path.stat().st_mode):
        step = "Give the path of the .gguf file itself."
        found = "is not a regular file"
        raise Refused([refusal(path, "file-unreadable", found, "a GGUF file", step)])
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _parse(_Cursor(path, descriptor, os.fstat(descriptor).st_size))
    finally:
        os.close(descriptor)


def _parse(cursor: _Cursor) -> Shard:
    version = _version(cursor)
    tensor_count = cursor.count("the number of tensors", item_bytes=32, limit=MAX_TENSORS)
    key_count = cursor.count("the number of keys", item_bytes=13, limit=MAX_KEYS)
    metadata = _metadata(cursor, key_count)
    entries = [_tensor(cursor, index) for index in range(tensor_count)]
    alignment = _alignment(cursor, metadata)
    data_offset = -(-cursor.position // alignment) * alignment
    tensors = tuple(
        TensorInfo(name, kind, shape, cursor.path, data_offset + offset, _nbytes(kind, shape))
        for name, kind, shape, offset in entries
    )
    digest = hashlib.sha256(memoryview(cursor.data)[: cursor.position]).hexdigest()
    return Shard(cursor.path, cursor.size, version, metadata, tensors, data_offset, digest)


class _Cursor:
    """Walks the header, reading the file in growing pieces and never past its end."""

    def __init__(self, path: Path, descriptor: int, size: int) -> None:
        self.path, self.descriptor, self.size = path, descriptor, size
        self.data = bytearray()
        self.position = 0

    def refuse(self, found: str, expected: str, *, code: str = "header-damaged") -> NoReturn:
        raise Refused([refusal(self.path, code, found, expected)])

    def fill(self, end: int, what: str) -> int:
        """Makes the bytes up to `end` available; returns how many are there."""
        where = f"{what} (at byte {self.position:,})"
        if end > self.size:
            self.refuse(
                f"{where} reaches to byte {end:,}, the file ends at {self.size:,}", _LIES_INSIDE
            )
        if end > MAX_HEADER:
            self.refuse(f"{where} reaches to byte {end:,}", f"at most {MAX_HEADER:,} of header")
        while (have := len(self.data)) < end:
            want = min(max(end - have, have, _FIRST_READ), MAX_HEADER - have)
            piece = os.pread(self.descriptor, want, have)
            if not piece:
                self.refuse(f"became shorter than {self.size:,} bytes while read", "no change")
            self.data += piece
        return have

    def take(self, length: int, what: str) -> int:
        """Steps over `length` bytes, all available; returns where they start."""
        start = self.position
        self.fill(start + length, what)
        self.position = start + length
        return start

    def scalar(self, layout: Struct, what: str) -> Any:
        return layout.unpack_from(self.data, self.take(layout.size, what))[0]

    def count(self, what: str, *, item_bytes: int, limit: int) -> int:
        """A 64-bit count of things of at least `item_bytes` each."""
        value = self.scalar(_U64, what)
        found = f"{what} (before byte {self.position:,}) is {value:,}"
        if value > limit:
            self.refuse(found, f"at most {limit:,}")
        if value * item_bytes > self.size - self.position:
            self.refuse(f"{found}, the file ends at {self.size:,}", _LIES_INSIDE)
        return value

    def string(self, what: str) -> str:
        return self.strings(1, what)[0]

    def strings(self, count: int, what: str) -> list[str]:
        # Written flat: a vocabulary has hundreds of thousands of these.
        data, unpack, position, have = self.data, _U64.unpack_from, self.position, len(self.data)
        result = []
        for _ in range(count):
            start = position + 8
            if start > have:
                have = self.fill(start, what)
            end = start + unpack(data, position)[0]
            if end > have:
                self.position = position
                have = self.fill(end, what)
            result.append(data[start:end].decode("utf-8", "surrogateescape"))
            position = end
        self.position = position
        return result

    def numbers(self, kind: int, count: int, what: str) -> list[Any]:
        layout = _SCALARS[kind]
        start = self.take(count * layout.size, what)
        if kind == GGUFValueType.BOOL:
            return [byte != 0 for byte in self.data[start : self.position]]
        code = np.dtype(layout.format)
        return np.frombuffer(self.data, code, count=count, offset=start).tolist()


def _version(cursor: _Cursor) -> int:
    cursor.fill(min(cursor.size, 32), "the magic")
    head = bytes(cursor.data[:4])
    if head != b"GGUF":
        found = f"is not a GGUF file: it starts with {head!r}" if head else "is empty"
        step = "Give a .gguf file; other formats have to be converted first."
        if cursor.data.startswith(b"version https://git-lfs"):
            step = "It is a Git LFS pointer: fetch the file itself with `git lfs pull`."
        raise Refused([refusal(cursor.path, "not-gguf", found, "the bytes b'GGUF'", step)])
    cursor.position = 4
    version = cursor.scalar(_U32, "the version")
    if version in (2, 3):
        return version
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    big_endian = swapped in (1, 2, 3)
    found = f"is GGUF version {swapped}, big-endian" if big_endian else f"is version {version}"
    step = "Convert the model again with a current converter."
    expected = "GGUF version 2 or 3, little-endian"
    raise Refused([refusal(cursor.path, "gguf-version", found, expected, step)])


def _metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(count):
        key = cursor.string(f"the name of key {index}")
        what = f"the value of key {shown(key)}"
        if key in metadata:
            cursor.refuse(f"has the key {shown(key)} twice", "each key once", code="duplicate-key")
        metadata[key] = _value(cursor, cursor.scalar(_U32, what), what)
    return metadata


def _value(cursor: _Cursor, kind: int, what: str, *, depth: int = 0) -> Any:
    if kind in _SCALARS:
        return cursor.scalar(_SCALARS[kind], what)
    if kind == _STRING:
        return cursor.string(what)
    if kind != _ARRAY:
        cursor.refuse(f"{what} is of value type {kind}", "one of GGUF's value types, 0 to 12")
    if depth == MAX_NESTING:
        cursor.refuse(f"{what} nests arrays deeper", f"at most {MAX_NESTING} arrays in each other")
    item = cursor.scalar(_U32, what)
    size = _ITEM_BYTES.get(item, 1)
    count = cursor.count(f"the length of {what}", item_bytes=size, limit=MAX_ITEMS)
    if item in _SCALARS:
        return cursor.numbers(item, count, what)
    if item == _STRING:
        return cursor.strings(count, what)
    return [_value(cursor, item, what, depth=depth + 1) for _ in range(count)]


def _tensor(cursor: _Cursor, index: int) -> tuple[str, int, tuple[int, ...], int]:
    name = cursor.string(f"the name of tensor {index}")
    what = f"the entry of tensor {shown(name)}"
    dims = cursor.scalar(_U32, what)
    if not 1 <= dims <= MAX_DIMS:
        cursor.refuse(f"{what} has {dims:,} dimensions", f"1 to {MAX_DIMS}")
    shape = tuple(cursor.scalar(_U64, what) for _ in range(dims))
    kind = cursor.scalar(_U32, what)
    return name, kind, shape, cursor.scalar(_U64, what)


def _alignment(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    value = metadata.get(Keys.General.ALIGNMENT, GGUF_DEFAULT_ALIGNMENT)
    if type(value) is not int or value <= 0 or value & (value - 1):
        found = f"has {Keys.General.ALIGNMENT} = {shown(str(value))}"
        cursor.refuse(found, "a power of two", code="alignment-invalid")
    return value


def _nbytes(kind: int, shape: tuple[int, ...]) -> int:
    """Bytes of the tensor, or 0 when its type or shape makes no sense."""
    known = GGML_TYPES.get(kind)
    if known is None or shape[0] % known.block or prod(shape) > MAX_ELEMENTS:
        return 0
    return tensor_bytes(kind, shape)
