"""The requests of an engine life, in order, however many: memory does not grow with them.

What a reader keeps of a request is made into a `Request` when somebody looks at it. The first
few thousand stay in memory; what comes after goes in pieces to a temporary file that has no
name and is gone with the process. Nothing here knows what a record holds.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeVar, overload

from slotwise.errors import SlotwiseError
from slotwise.explain.record import Request

Kept = TypeVar("Kept")

IN_MEMORY = 2_048
PIECE = 512
"""Records written and read together."""


def kept(cls: type[Kept]) -> type[Kept]:
    """A dataclass for records: pickled as its fields in order, six times as quickly."""
    values = attrgetter(*(field.name for field in fields(cls)))  # type: ignore[arg-type]
    cls.__reduce__ = lambda self: (cls, values(self))  # type: ignore[method-assign]
    return cls


class Requests(Sequence[Request]):
    """Append records, read requests. `make` gives the request of an index and its record."""

    def __init__(self, make: Callable[[int, Any], Request]) -> None:
        self._make = make
        self._first: list[Any] = []
        """The first records, each replaced by its request once that was made."""
        self._pieces: list[tuple[int, int]] = []
        """Where in the file each piece lies: offset and length."""
        self._last: list[Any] = []
        """Records that do not fill a piece yet."""
        self._file: _Pieces | None = None
        self._loaded: tuple[int, list[Any]] = (-1, [])

    def copy(self) -> Requests:
        """A copy that can grow by itself; the pieces written so far are shared."""
        other = Requests(self._make)
        other._first, other._last = list(self._first), list(self._last)
        other._pieces, other._file = list(self._pieces), self._file
        return other

    def append(self, record: Any) -> None:
        """Raises SlotwiseError when the temporary folder is full."""
        if len(self._first) < IN_MEMORY:
            self._first.append(record)
            return
        self._last.append(record)
        if len(self._last) == PIECE:
            self._write()

    def __len__(self) -> int:
        return len(self._first) + PIECE * len(self._pieces) + len(self._last)

    @overload
    def __getitem__(self, at: int) -> Request: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Request, ...]: ...
    def __getitem__(self, at: int | slice) -> Request | tuple[Request, ...]:
        if isinstance(at, slice):
            return tuple(self[i] for i in range(len(self))[at])
        at = range(len(self))[at]
        if at >= len(self._first):
            return self._make(at, self._record(at - len(self._first)))
        found = self._first[at]
        if not isinstance(found, Request):
            found = self._first[at] = self._make(at, found)
        return found

    def __iter__(self) -> Iterator[Request]:
        return (self[i] for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(self) != len(other):
            return False
        return all(a == b for a, b in zip(self, other, strict=True))

    def _record(self, at: int) -> Any:
        number, place = divmod(at, PIECE)
        if number == len(self._pieces):
            return self._last[place]
        if self._loaded[0] != number and self._file is not None:
            self._loaded = number, self._file.read(*self._pieces[number])
        return self._loaded[1][place]

    def _write(self) -> None:
        try:
            if self._file is None:
                self._file = _Pieces()
            self._pieces.append(self._file.write(self._last))
        except OSError as error:
            raise SlotwiseError(
                f"{len(self):,} requests were read, and no more can be kept in "
                f"{tempfile.gettempdir()}: {error.strerror or error}",
                next_step="Free space there (about 1 kB a request), or set TMPDIR to a folder "
                "that has it.",
            ) from error
        self._last = []


class _Pieces:
    """A temporary file of lists, closed with the last `Requests` that reads it."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="slotwise-", buffering=0)  # noqa: SIM115

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()

    def write(self, records: list[Any]) -> tuple[int, int]:
        """Offset and length of what was written. Raises OSError when it does not fit."""
        piece = pickle.dumps(records, protocol=pickle.HIGHEST_PROTOCOL)
        offset = self._file.seek(0, 2)
        if self._file.write(piece) < len(piece):
            raise OSError("it is full")
        return offset, len(piece)

    def read(self, offset: int, length: int) -> list[Any]:
        self._file.seek(offset)
        return pickle.loads(self._file.read(length))
