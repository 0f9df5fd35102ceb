"""A pack holds exactly the source's experts, whatever happens while it is written."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from weights.expert_files import ExpertFile, write_experts

from slotwise.errors import Interrupted, Refused, SlotwiseError, StoreError
from slotwise.weights import pack, pack_index, pack_journal
from slotwise.weights.pack import PackIndex, check_pack, default_pack_path, read_index, write_pack
from slotwise.weights.pack_index import EXPERTS, INDEX

WIDE: dict[str, Any] = {"n_embd": 256, "n_ff": 256, "n_experts": 2}
MODELS: dict[str, dict[str, Any]] = {
    "F32": {"types": ["F32"]},
    "BF16": {"types": ["BF16"]},
    "Q8_0": {"types": ["Q8_0", "Q8_0"], "n_embd": 32, "n_ff": 96},
    "Q4_0": {"types": ["Q4_0"]},
    "Q2_0": {"types": ["Q2_0", "Q2_0"]},
    "MXFP4": {"types": ["MXFP4"], "n_embd": 32, "n_ff": 96},
    "Q4_K and Q6_K": {"types": ["Q4_K", ("Q4_K", "Q4_K", "Q6_K")], **WIDE},
    "IQ1_M": {"types": ["IQ1_M"], **WIDE},
    "mixed": {"types": ["Q8_0", ("Q2_0", "Q4_0", "Q5_1"), "Q8_0"], "layers": [1, 3, 4]},
    "split": {"types": ["Q8_0", "Q2_0", "F16"], "tensors_per_shard": 2},
}


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder in memory where there is one: these tests wait for the disk hundreds of times."""
    memory = Path("/dev/shm")
    place = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    yield place
    shutil.rmtree(place)


@pytest.fixture
def model(place: Path) -> ExpertFile:
    """Two slot classes, six experts."""
    return write_experts(place / "tiny.gguf", ["Q8_0", ("Q2_0", "Q4_0", "Q5_1")])


@pytest.fixture
def folder(place: Path) -> Path:
    return place / "tiny.slotpack"


@pytest.fixture(autouse=True)
def journal_every_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "SYNC_BYTES", 1)


def write(model: ExpertFile, folder: Path, **options: Any) -> PackIndex:
    return write_pack(*model.open(), folder, **options)


def codes(model: ExpertFile, folder: Path, *, deep: bool = False) -> list[str]:
    return [finding.code for finding in check_pack(folder, *model.open(), deep=deep)]


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()} if folder.exists() else set()


def assert_complete(model: ExpertFile, folder: Path) -> None:
    assert (folder / EXPERTS).read_bytes() == model.images()
    assert codes(model, folder, deep=True) == []
    assert names(folder) == {EXPERTS, INDEX}


# What a pack holds


@pytest.mark.parametrize("name", MODELS)
def test_images_are_the_bytes_of_the_source(name: str, tmp_path: Path) -> None:
    model = write_experts(tmp_path / "tiny.gguf", **MODELS[name])
    index = write(model, tmp_path / "pack", lanes=2)
    assert_complete(model, tmp_path / "pack")
    _, layout = model.open()
    assert index.written == layout.n_total
    assert index.nbytes == layout.total_bytes
    assert read_index(tmp_path / "pack").to_dict() == index.to_dict()


def test_the_index_names_source_and_layout(model: ExpertFile, folder: Path) -> None:
    write(model, folder)
    document = json.loads((folder / INDEX).read_text())
    assert document["schema"] == "slotwise.pack/v1"
    assert document["source"]["files"] == [{"name": "tiny.gguf", "size": model.path.stat().st_size}]
    first = document["layout"]["classes"][1]["projections"][0]
    assert first == {
        "name": "gate",
        "type": "Q4_0",
        "n_in": 64,
        "n_out": 128,
        "offset": 0,
        "nbytes": 64 * 128 // 32 * 18,
    }


def test_default_path_is_beside_the_model(tmp_path: Path) -> None:
    one = write_experts(tmp_path / "one.gguf", ["Q8_0"])
    two = write_experts(tmp_path / "two.gguf", ["Q8_0"], tensors_per_shard=2)
    assert default_pack_path(one.open()[0]) == tmp_path / "one.slotpack"
    assert two.path.name == "two-00001-of-00002.gguf"
    assert default_pack_path(two.open()[0]) == tmp_path / "two.slotpack"


def test_progress_ends_at_the_total(model: ExpertFile, folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    write(model, folder, progress=lambda done, total: seen.append((done, total)))
    total = len(model.images())
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)
    assert {pair[1] for pair in seen} == {total}


# What is there already


def test_a_complete_pack_is_left_alone(model: ExpertFile, folder: Path) -> None:
    first = write(model, folder)
    before = (folder / EXPERTS).stat()
    again = write(model, folder)
    assert again.written == 0
    assert again.to_dict() == first.to_dict()
    assert (folder / EXPERTS).stat().st_mtime_ns == before.st_mtime_ns
    assert names(folder) == {EXPERTS, INDEX}


def test_a_pack_of_another_source_is_kept_unless_forced(model: ExpertFile, folder: Path) -> None:
    other = write_experts(folder.parent / "other.gguf", ["F16"])
    write(other, folder)
    with pytest.raises(Refused, match=r"other\.gguf") as caught:
        write(model, folder)
    assert "tiny.gguf" in str(caught.value)
    assert "--force" in str(caught.value)
    assert_complete(other, folder)
    write(model, folder, force=True)
    assert_complete(model, folder)


def test_an_unfinished_pack_of_another_source_too(model: ExpertFile, folder: Path) -> None:
    other = write_experts(folder.parent / "other.gguf", ["F16"])
    with pytest.raises(Interrupted):
        write(other, folder, progress=stop_after(1))
    with pytest.raises(Refused, match="an unfinished pack of digest"):
        write(model, folder)
    write(model, folder, force=True)
    assert_complete(model, folder)


def test_a_damaged_pack_of_this_source_is_written_again(model: ExpertFile, folder: Path) -> None:
    write(model, folder)
    os.truncate(folder / EXPERTS, 4096)
    assert write(model, folder).written == 6
    assert_complete(model, folder)


def test_an_unreadable_index_needs_force(model: ExpertFile, folder: Path) -> None:
    write(model, folder)
    (folder / INDEX).write_text("{")
    with pytest.raises(Refused, match="not JSON"):
        write(model, folder)
    write(model, folder, force=True)
    assert_complete(model, folder)


def test_experts_without_an_index_need_force(model: ExpertFile, folder: Path) -> None:
    folder.mkdir()
    (folder / EXPERTS).write_bytes(b"someone's work")
    with pytest.raises(Refused, match="without index"):
        write(model, folder)
    write(model, folder, force=True)
    assert_complete(model, folder)


def test_force_writes_a_good_pack_again(model: ExpertFile, folder: Path) -> None:
    write(model, folder)
    assert write(model, folder, force=True).written == 6
    assert_complete(model, folder)


def test_two_packers_at_once(model: ExpertFile, folder: Path) -> None:
    folder.mkdir()
    with (
        pack_journal.locked(folder),
        pytest.raises(SlotwiseError, match="another process is writing this pack"),
    ):
        write(model, folder)
    write(model, folder)
    assert_complete(model, folder)


def test_a_lock_whose_file_was_just_removed_is_taken_again(
    model: ExpertFile, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = pack_journal.fcntl.flock
    taken: list[int] = []

    def flock(fd: int, how: int) -> None:
        real(fd, how)
        taken.append(fd)
        if len(taken) == 1:
            (folder / pack_journal.LOCK).unlink()

    monkeypatch.setattr(pack_journal.fcntl, "flock", flock)
    write(model, folder)
    assert len(taken) == 2
    assert_complete(model, folder)


def test_a_folder_that_cannot_be_made(model: ExpertFile, folder: Path) -> None:
    folder.write_text("a file")
    with pytest.raises(SlotwiseError, match="the pack cannot be written"):
        write(model, folder)


# Interruption


def stop_after(experts: int) -> Callable[[int, int], None]:
    """A progress callback in which the user presses Ctrl-C."""
    left = iter(range(experts - 1))

    def progress(done: int, total: int) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    return progress


def stop_at(nth: int, stop: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call `stop` before the nth call that changes the disk; a write is then half done."""
    calls = itertools.count(1)

    def wrap(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def wrapped(*args: Any, **options: Any) -> Any:
            if next(calls) == nth:
                if name == "pwrite":
                    real(args[0], args[1][: len(args[1]) // 2], *args[2:])
                stop()
            return real(*args, **options)

        monkeypatch.setattr(owner, name, wrapped)

    for name in ("pwrite", "fsync", "posix_fallocate", "ftruncate"):
        wrap(os, name)
    for name in ("replace", "unlink"):
        wrap(Path, name)


def finishes(model: ExpertFile, folder: Path, *, kill_at: int) -> bool:
    """Pack in a child process that is killed at a call; True if it was done before that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads
        child = os.fork()
    if not child:
        with pytest.MonkeyPatch.context() as patch:
            stop_at(kill_at, lambda: os.kill(os.getpid(), signal.SIGKILL), patch)
            write(model, folder, lanes=1)
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return status == 0


def test_killed_at_every_point(model: ExpertFile, folder: Path) -> None:
    kills = 0
    still_to_write: set[int] = set()
    while not finishes(model, folder, kill_at=kills + 1):
        kills += 1
        left = names(folder)
        if EXPERTS in left:
            assert (folder / EXPERTS).read_bytes() == model.images()
        if INDEX in left:
            assert codes(model, folder, deep=True) == []
        written = write(model, folder, lanes=1).written
        assert written == 0 or EXPERTS not in left
        still_to_write.add(written)
        assert_complete(model, folder)
        shutil.rmtree(folder)
    assert kills > 20
    assert still_to_write == {0, 1, 2, 3, 4, 5, 6}
    assert_complete(model, folder)


def test_killed_again_and_again(model: ExpertFile, folder: Path) -> None:
    kills = 0
    while not finishes(model, folder, kill_at=3 + kills):
        kills += 1
    assert kills > 5
    assert_complete(model, folder)


PACKER = """
import sys
from pathlib import Path
from slotwise.weights import pack
from slotwise.weights.layout import expert_layout
from slotwise.weights.shards import open_model
pack.SYNC_BYTES = 1 << 16
model = open_model(Path(sys.argv[1]))
pack.write_pack(model, expert_layout(model), Path(sys.argv[2]),
                progress=lambda done, total: print(done, flush=True))
"""


def test_killed_at_random_moments(folder: Path) -> None:
    model = write_experts(folder.parent / "tiny.gguf", ["Q8_0"] * 6, n_experts=16)
    moments = random.Random(2)
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", PACKER, model.path, folder], stdout=subprocess.PIPE
        )
        with child:
            assert child.stdout is not None
            for _ in range(moments.randrange(1, 60)):
                child.stdout.readline()
            child.kill()
        if EXPERTS in names(folder):
            assert (folder / EXPERTS).read_bytes() == model.images()
    write(model, folder)
    assert_complete(model, folder)


def test_ctrl_c_keeps_what_is_written(model: ExpertFile, folder: Path) -> None:
    with pytest.raises(Interrupted, match="4 of 6 experts are written and kept"):
        write(model, folder, progress=stop_after(4), lanes=1)
    assert names(folder) == {"experts.bin.partial", "journal"}
    assert codes(model, folder) == ["pack-missing"]
    assert write(model, folder).written == 2
    assert_complete(model, folder)


def test_ctrl_c_at_every_point(model: ExpertFile, folder: Path) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    for nth in range(1, 100):
        try:
            with pytest.MonkeyPatch.context() as patch:
                stop_at(nth, stop, patch)
                write(model, folder, lanes=1)
            break
        except (Interrupted, KeyboardInterrupt):
            write(model, folder)
            assert_complete(model, folder)
            shutil.rmtree(folder)
    assert 20 < nth < 99
    assert_complete(model, folder)


def test_what_the_journal_claims_is_read_back(model: ExpertFile, folder: Path) -> None:
    with pytest.raises(Interrupted):
        write(model, folder, progress=stop_after(4), lanes=1)
    with (folder / "experts.bin.partial").open("r+b") as file:
        file.seek(100)
        file.write(b"a power cut" * 100)
    assert write(model, folder).written == 3
    assert_complete(model, folder)


def test_a_lost_partial_file_is_written_again(model: ExpertFile, folder: Path) -> None:
    with pytest.raises(Interrupted):
        write(model, folder, progress=stop_after(4), lanes=1)
    (folder / "experts.bin.partial").unlink()
    assert write(model, folder).written == 6
    assert_complete(model, folder)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None
)
@given(tail=st.binary(max_size=40), cut=st.integers(0, 60))
def test_a_torn_journal_costs_time_only(
    model: ExpertFile, folder: Path, tail: bytes, cut: int
) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    with pytest.raises(Interrupted):
        write(model, folder, progress=stop_after(4), lanes=1)
    journal = folder / "journal"
    whole = journal.read_bytes()
    journal.write_bytes(whole[: len(whole) - cut] + tail)
    write(model, folder, force=True)  # a first line cut off could be another source's
    assert_complete(model, folder)


def test_a_source_that_cannot_be_read(model: ExpertFile, folder: Path) -> None:
    content = model.path.read_bytes()
    opened = model.open()
    os.truncate(model.path, len(content) - 1000)
    with pytest.raises(StoreError, match="was changed while it was in use"):
        write_pack(*opened, folder)
    model.path.write_bytes(content)
    write(model, folder)
    assert_complete(model, folder)


# Full disks


def full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_room_is_checked_first(
    model: ExpertFile, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(folder.parent)
    blocks = 5000 // real.f_frsize + 1
    small = os.statvfs_result((*real[:4], blocks, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    needed, free = pack._needed(model.open()[1]), blocks * real.f_frsize
    assert needed > len(model.images())
    with pytest.raises(SlotwiseError) as caught:
        write(model, folder)
    assert f"needs {needed:,} bytes" in str(caught.value)
    assert f"{free:,} are available, {needed - free:,} are missing" in str(caught.value)
    assert "nothing is left behind" in str(caught.value)
    assert not folder.exists()


def test_the_disk_fills_up_at_any_point(model: ExpertFile, folder: Path) -> None:
    kept = 0
    for nth in range(1, 100):
        try:
            with pytest.MonkeyPatch.context() as patch:
                stop_at(nth, full, patch)
                write(model, folder, lanes=1)
            break
        except SlotwiseError as error:
            message = str(error)
        assert "ENOSPC" in message
        if "nothing is left behind" in message:
            assert names(folder) == set()
        elif "are written and kept" in message:
            kept += 1
            assert pack_journal.read_journal(folder / "journal")[1]
        write(model, folder)
        assert_complete(model, folder)
        shutil.rmtree(folder)
    assert 20 < nth < 99
    assert kept > 10


def test_a_limit_on_file_sizes(model: ExpertFile, folder: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    opened = model.open()
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(model.images()) - 4096, hard))
    try:
        with pytest.raises(SlotwiseError, match="EFBIG") as caught:
            write_pack(*opened, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert re.search(
        r"a quota or a size limit stops it, [\d,]+ bytes are missing", str(caught.value)
    )
    assert not folder.exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 128 KiB; 48 KiB less than the pack needs."""
    place = tmp_path / "disk"
    place.mkdir()
    options = ["-t", "tmpfs", "-o", "size=128k", "tmpfs"]
    if os.getuid() or not shutil.which("mount"):
        pytest.skip("only root can mount a small disk")
    if subprocess.run(["mount", *options, place], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_really_full_disk(model: ExpertFile, small_disk: Path) -> None:
    assert len(model.images()) > 128 << 10
    with pytest.raises(SlotwiseError, match=r"\d are missing; nothing is left behind"):
        write(model, small_disk / "pack")
    assert names(small_disk) == set()


def test_the_last_file_finds_no_room(model: ExpertFile, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "replace_file", lambda *_: full())
        with pytest.raises(SlotwiseError, match="6 of 6 experts are written and kept"):
            write(model, folder)
    assert codes(model, folder) == ["pack-missing"]
    assert write(model, folder).written == 0
    assert_complete(model, folder)


def test_a_disk_that_fills_up_without_a_reservation(
    model: ExpertFile, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    monkeypatch.setattr(pack, "_free", lambda folder: 1 << 40)
    with pytest.raises(SlotwiseError, match="ENOSPC") as caught:
        write(model, small_disk / "pack", lanes=1)
    monkeypatch.undo()
    assert "experts are written and kept" in str(caught.value)
    subprocess.run(["mount", "-o", "remount,size=1m", small_disk], check=True)
    assert 0 < write(model, small_disk / "pack").written < 6
    assert_complete(model, small_disk / "pack")


# Checking


def change(folder: Path, *keys: str | int, to: Any) -> None:
    """Set one value of the index and give it a right checksum."""
    document = json.loads((folder / INDEX).read_text())
    document.pop("checksum")
    place = document
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = to
    document["checksum"] = pack_index._checksum(document)
    (folder / INDEX).write_text(json.dumps(document))


def test_no_pack_is_a_warning(model: ExpertFile, folder: Path) -> None:
    findings = check_pack(folder, *model.open())
    assert [(f.level, f.code) for f in findings] == [("warning", "pack-missing")]


def test_a_newer_schema(model: ExpertFile, folder: Path) -> None:
    write(model, folder)
    change(folder, "schema", to="slotwise.pack/v2")
    assert codes(model, folder) == ["pack-schema"]


def test_a_changed_index(model: ExpertFile, folder: Path) -> None:
    write(model, folder)
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text.replace('"n_used": 2', '"n_used": 3'))
    assert codes(model, folder) == ["pack-index"]
    with pytest.raises(Refused, match="checksum"):
        read_index(folder)


def test_a_replaced_source(model: ExpertFile, folder: Path) -> None:
    write(model, folder)
    write_experts(model.path, ["Q8_0", ("Q2_0", "Q4_0", "Q5_1")], n_experts=4)
    findings = check_pack(folder, *model.open())
    assert [f.code for f in findings] == ["pack-of-another-source", "pack-layout"]
    assert "tiny.gguf" in findings[0].found


def test_another_layout_names_both(model: ExpertFile, folder: Path) -> None:
    write(model, folder)
    change(folder, "layout", "n_experts", to=512)
    (finding,) = check_pack(folder, *model.open())
    assert finding.code == "pack-layout"
    assert finding.found == "layout.n_experts = 512"
    assert finding.expected == "layout.n_experts = 3"


def test_too_few_checksums(model: ExpertFile, folder: Path) -> None:
    write(model, folder)
    change(folder, "experts", "crc32", 1, to=[1, 2])
    assert codes(model, folder) == ["pack-layout"]


@pytest.mark.parametrize("size", [None, 0, 4096])
def test_truncated_experts(model: ExpertFile, folder: Path, size: int | None) -> None:
    write(model, folder)
    if size is None:
        (folder / EXPERTS).unlink()
    else:
        os.truncate(folder / EXPERTS, size)
    assert codes(model, folder) == ["pack-size"]


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None
)
@given(data=st.data())
def test_deep_finds_any_changed_byte(model: ExpertFile, folder: Path, data: st.DataObject) -> None:
    write(model, folder)
    content = bytearray((folder / EXPERTS).read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    (folder / EXPERTS).write_bytes(content)
    try:
        assert codes(model, folder) == []
        assert codes(model, folder, deep=True) == ["pack-checksum"]
    finally:
        content[:] = model.images()
        (folder / EXPERTS).write_bytes(content)


def test_deep_reports_progress_and_read_errors(
    model: ExpertFile, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(model, folder)
    seen: list[tuple[int, int]] = []
    check_pack(folder, *model.open(), deep=True, progress=lambda *pair: seen.append(pair))
    assert seen[-1] == (len(model.images()),) * 2

    def preadv(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", preadv)
    assert codes(model, folder, deep=True) == ["pack-unreadable"] * 2


@pytest.fixture(scope="module")
def packed() -> Iterator[tuple[ExpertFile, Path, bytes]]:
    """A pack for tests that change nothing but index.json."""
    place = Path(tempfile.mkdtemp())
    model = write_experts(place / "tiny.gguf", ["Q8_0", "Q4_0"])
    write(model, place / "pack")
    yield model, place / "pack", (place / "pack" / INDEX).read_bytes()
    shutil.rmtree(place)


@settings(deadline=None)
@given(data=st.data())
def test_corrupt_index_bytes_are_findings(
    packed: tuple[ExpertFile, Path, bytes], data: st.DataObject
) -> None:
    model, folder, good = packed
    start = data.draw(st.integers(0, len(good)))
    end = data.draw(st.integers(start, min(len(good), start + 20)))
    bad = good[:start] + data.draw(st.binary(max_size=20)) + good[end:]
    (folder / INDEX).write_bytes(bad)
    found = codes(model, folder)
    assert found or json.loads(bad) == json.loads(good)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
PLACES: list[tuple[str | int, ...]] = [
    ("source",),
    ("source", "digest"),
    ("source", "files"),
    ("source", "files", 0, "size"),
    ("layout",),
    ("layout", "classes"),
    ("layout", "classes", 0, "slot_bytes"),
    ("experts",),
    ("experts", "bytes"),
    ("experts", "crc32"),
    ("experts", "crc32", 0),
    ("experts", "crc32", 0, 0),
]


@settings(deadline=None)
@given(keys=st.sampled_from(PLACES), value=JSON)
def test_a_well_signed_nonsense_index_raises_nothing(
    packed: tuple[ExpertFile, Path, bytes], keys: tuple[str | int, ...], value: Any
) -> None:
    model, folder, good = packed
    (folder / INDEX).write_bytes(good)
    change(folder, *keys, to=value)
    codes(model, folder, deep=True)


def test_an_index_nested_too_deep(packed: tuple[ExpertFile, Path, bytes]) -> None:
    model, folder, _ = packed
    (folder / INDEX).write_text("[" * 100_000)
    assert codes(model, folder) == ["pack-index"]


def test_an_index_that_is_no_file(packed: tuple[ExpertFile, Path, bytes]) -> None:
    model, folder, good = packed
    (folder / INDEX).unlink()
    (folder / INDEX).mkdir()
    assert codes(model, folder) == ["pack-index"]
    (folder / INDEX).rmdir()
    (folder / INDEX).write_bytes(good)
