"""Any byte range of a file arrives in the caller's memory, with O_DIRECT and without."""

from __future__ import annotations

import errno
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slotwise.errors import StoreError
from slotwise.weights import direct_io
from slotwise.weights.direct_io import ALIGNMENT, DirectFile, aligned_buffer

SIZE = 10 * ALIGNMENT + 777
Preadv = Callable[[int, list[memoryview], int], int]


@pytest.fixture(scope="module")
def content() -> bytes:
    return random.Random(0).randbytes(SIZE)


@pytest.fixture
def path(tmp_path: Path, content: bytes) -> Path:
    file = tmp_path / "data"
    file.write_bytes(content)
    return file


@pytest.fixture
def shm() -> Iterator[Path]:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm")
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behave as a file system without O_DIRECT does."""
    real = os.open

    def opens(path: Path, flags: int, *more: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *more)

    monkeypatch.setattr(direct_io.os, "open", opens)


def some_ranges() -> list[tuple[int, int]]:
    edges = [0, 1, 511, 512, ALIGNMENT - 1, ALIGNMENT, ALIGNMENT + 1, 3 * ALIGNMENT, SIZE - 1]
    return [(a, n) for a in edges for n in [*edges[1:], SIZE - a] if n and a + n <= SIZE]


def check_ranges(file: DirectFile, content: bytes) -> None:
    for offset, nbytes in some_ranges():
        for shift in (0, 1):
            memory = aligned_buffer(nbytes + 2)
            file.read_into(offset, memory[shift : shift + nbytes])
            assert memory[shift : shift + nbytes] == content[offset : offset + nbytes]
            assert not any(memory[:shift])
            assert not any(memory[shift + nbytes :])


def test_every_range_direct(path: Path, content: bytes) -> None:
    with DirectFile(path) as file:
        if not file.direct:
            pytest.skip(file.note)
        check_ranges(file, content)
        assert file.direct
        assert file.size == SIZE


def test_every_range_through_the_cache(path: Path, content: bytes) -> None:
    with DirectFile(path, direct=False) as file:
        assert not file.direct
        assert "not asked for" in file.note
        check_ranges(file, content)


def test_on_a_file_system_in_memory(shm: Path, content: bytes) -> None:
    (shm / "data").write_bytes(content)
    with DirectFile(shm / "data") as file:  # older kernels refuse O_DIRECT there
        check_ranges(file, content)
        assert file.direct == (not file.note)


def test_falls_back_with_a_reason(
    path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_direct(monkeypatch)
    dropped: list[tuple[int, int]] = []
    monkeypatch.setattr(
        direct_io.os,
        "posix_fadvise",
        lambda fd, start, length, advice: dropped.append((start, length)),
    )
    with DirectFile(path) as file:
        assert not file.direct
        assert file.note == "the file system refuses O_DIRECT (Invalid argument, EINVAL)"
        memory = bytearray(10)
        assert file.read_into(ALIGNMENT - 5, memoryview(memory)) == 10
        assert memory == content[ALIGNMENT - 5 : ALIGNMENT + 5]
    assert dropped == [(0, 2 * ALIGNMENT)]


def test_leaves_direct_reads_that_are_refused(
    path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv
    calls: list[int] = []

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        if len(calls) == 1:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, buffers, offset)

    monkeypatch.setattr(direct_io.os, "preadv", preadv)
    with DirectFile(path) as file:
        if not file.direct:
            pytest.skip(file.note)
        check_ranges(file, content)
        assert file.note == "the file system refuses direct reads (Invalid argument, EINVAL)"


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("piece", [ALIGNMENT, ALIGNMENT + 100, 3 * ALIGNMENT - 1])
def test_goes_on_after_short_reads(
    path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch, direct: bool, piece: int
) -> None:
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        got = real(fd, buffers, offset)
        return min(got, piece)

    monkeypatch.setattr(direct_io.os, "preadv", preadv)
    with DirectFile(path, direct=direct) as file:
        if file.direct != direct:
            pytest.skip(file.note)
        check_ranges(file, content)
        assert file.direct == direct


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(8 * ALIGNMENT, 4 * ALIGNMENT), (10 * ALIGNMENT, 778), (SIZE, 1), (SIZE + 5 * ALIGNMENT, 7)],
)
def test_the_end_of_the_file_is_an_error(
    path: Path, direct: bool, offset: int, nbytes: int
) -> None:
    with DirectFile(path, direct=direct) as file:
        with pytest.raises(StoreError, match="the file ends after") as caught:
            file.read_into(offset, aligned_buffer(nbytes))
        assert caught.value.path == str(path)
        assert caught.value.offset == offset


@pytest.mark.parametrize("shift", [0, 3])
def test_an_io_error_names_file_offset_and_cause(
    path: Path, monkeypatch: pytest.MonkeyPatch, shift: int
) -> None:
    def preadv(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(direct_io.os, "preadv", preadv)
    with DirectFile(path) as file:
        with pytest.raises(StoreError) as caught:
            file.read_into(2 * ALIGNMENT, aligned_buffer(2 * ALIGNMENT)[shift:])
        assert str(caught.value) == f"{path} at byte 8,192: Input/output error, EIO"


def test_a_big_unaligned_read_takes_several_bounces(
    path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_io, "BOUNCE_BYTES", 2 * ALIGNMENT)
    with DirectFile(path) as file:
        memory = bytearray(SIZE - 9)
        read = file.read_into(9, memoryview(memory))
        assert memory == content[9:]
        assert read >= SIZE - 9


def test_threads_share_a_file(path: Path, content: bytes) -> None:
    def read(seed: int) -> bool:
        place = random.Random(seed)
        offset = place.randrange(SIZE)
        memory = bytearray(place.randrange(1, SIZE - offset + 1))
        file.read_into(offset, memoryview(memory))
        return memory == content[offset : offset + len(memory)]

    with DirectFile(path) as file, ThreadPoolExecutor(4) as threads:
        assert all(threads.map(read, range(200)))


def test_nothing_to_read_is_fine(path: Path) -> None:
    with DirectFile(path) as file:
        assert file.read_into(0, memoryview(bytearray())) == 0


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"cannot be opened \(No such file or directory, ENOENT\)"):
        DirectFile(tmp_path / "absent")
    with pytest.raises(StoreError, match="is not a regular file"):
        DirectFile(tmp_path)


def test_closing_twice_and_reading_after(path: Path) -> None:
    file = DirectFile(path)
    file.close()
    file.close()
    with pytest.raises(StoreError, match="EBADF"):
        file.read_into(0, aligned_buffer(1))
