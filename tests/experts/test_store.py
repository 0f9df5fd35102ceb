"""Both stores give the same bytes, and say what went wrong when they cannot."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from experts.faulty_store import FaultyStore
from weights.expert_files import ExpertFile, write_experts

from slotwise.errors import StoreError
from slotwise.experts.store import ExpertStore, GgufStore, PackStore, open_store
from slotwise.weights.direct_io import aligned_buffer
from slotwise.weights.pack import default_pack_path, write_pack
from slotwise.weights.pack_index import EXPERTS


@pytest.fixture(params=[0, 2], ids=["one file", "split"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> ExpertFile:
    """Two slot classes; gate and up of layer 0 are widened."""
    types: list[str | tuple[str, str, str]] = [("Q2_0", "Q2_0", "Q8_0"), "Q5_1", "Q5_1"]
    return write_experts(tmp_path / "tiny.gguf", types, tensors_per_shard=request.param)


def packed(model: ExpertFile, *, verify: bool = False) -> PackStore:
    opened = model.open()
    write_pack(*opened, default_pack_path(opened[0]))
    store = open_store(*opened, verify=verify)
    assert isinstance(store, PackStore)
    return store


def read(store: ExpertStore, moe_index: int, expert: int, *, shift: int = 0) -> bytes:
    """One image, read into memory that is full of other bytes and ends where it should."""
    slot_bytes = store.layout.slot_class(moe_index).slot_bytes
    memory = aligned_buffer(slot_bytes + 4096)
    memory[:] = b"\xaa" * memory.nbytes
    assert store.read(moe_index, expert, memory[shift : shift + slot_bytes]) > 0
    assert memory[:shift] == b"\xaa" * shift
    assert memory[shift + slot_bytes :] == b"\xaa" * (4096 - shift)
    return bytes(memory[shift : shift + slot_bytes])


@pytest.mark.parametrize("shift", [0, 64])
def test_both_stores_give_the_bytes_of_the_source(model: ExpertFile, shift: int) -> None:
    gguf, pack = GgufStore(*model.open()), packed(model, verify=True)
    for moe_index in range(pack.layout.n_moe_layers):
        for expert in range(pack.layout.n_experts):
            image = model.image(moe_index, expert)
            assert read(gguf, moe_index, expert, shift=shift) == image
            assert read(pack, moe_index, expert, shift=shift) == image
    gguf.close()
    pack.close()


def test_bytes_of_no_projection_are_zero(tmp_path: Path) -> None:
    model = write_experts(tmp_path / "gaps.gguf", ["MXFP4"], n_embd=32, n_ff=96)
    store = GgufStore(*model.open())
    gate, up, _ = store.layout.slot_class(0).projections
    assert gate.nbytes < up.offset
    assert read(store, 0, 1) == model.image(0, 1)
    store.close()


def test_a_pack_store_reads_a_slot_in_one_go(
    model: ExpertFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = packed(model)
    if not store.direct:
        pytest.skip(store.note)
    real, calls = os.preadv, []

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    slot_bytes = store.layout.slot_class(1).slot_bytes
    assert store.read(1, 2, aligned_buffer(slot_bytes)) == slot_bytes
    assert calls == [3 * store.layout.slot_class(0).slot_bytes + 2 * slot_bytes]


def test_many_threads_read_at_once(model: ExpertFile) -> None:
    stores: list[ExpertStore] = [GgufStore(*model.open()), packed(model, verify=True)]
    places = [(moe_index, expert) for moe_index in range(3) for expert in range(3)] * 5
    with ThreadPoolExecutor(4) as threads:
        for store in stores:
            images = list(threads.map(lambda place, store=store: read(store, *place), places))
            assert images == [model.image(*place) for place in places]
            store.close()


def test_without_a_pack_the_note_says_so(model: ExpertFile) -> None:
    store = open_store(*model.open())
    assert isinstance(store, GgufStore)
    assert "three reads an expert" in store.note
    assert "slotwise pack" in store.note
    assert str(model.path.parent) not in store.note
    store.close()


def test_a_pack_that_does_not_fit_is_passed_over(model: ExpertFile, tmp_path: Path) -> None:
    other = write_experts(tmp_path / "other.gguf", ["F16"])
    write_pack(*other.open(), tmp_path / "pack")
    store = open_store(*model.open(), pack=tmp_path / "pack")
    assert isinstance(store, GgufStore)
    assert "other.gguf" in store.note
    assert read(store, 0, 0) == model.image(0, 0)
    store.close()


def test_a_pack_that_cannot_be_opened_is_passed_over(
    model: ExpertFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed(model).close()
    real = os.open

    def opens(path: Path, *more: int) -> int:
        if Path(path).name == EXPERTS:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, *more)

    monkeypatch.setattr(os, "open", opens)
    store = open_store(*model.open())
    assert isinstance(store, GgufStore)
    assert "EACCES" in store.note
    store.close()


def test_a_damaged_image_is_caught_once_verified(model: ExpertFile) -> None:
    store = packed(model, verify=True)
    read(store, 0, 1)
    first = store.layout.slot_class(0).slot_bytes
    with (default_pack_path(model.open()[0]) / EXPERTS).open("r+b") as file:
        file.seek(first + 5)
        file.write(b"damage")
        file.seek(3 * first + 5)
        file.write(b"damage")
    with pytest.raises(StoreError, match="layer 1 expert 0 has CRC-32") as caught:
        read(store, 1, 0)
    assert caught.value.offset == 3 * first
    assert "pack --force" in caught.value.next_step
    read(store, 0, 1)  # looked at before, not again
    store.close()


def test_a_truncated_pack_names_file_and_offset(model: ExpertFile) -> None:
    store = packed(model)
    file = default_pack_path(model.open()[0]) / EXPERTS
    first = store.layout.slot_class(0).slot_bytes
    os.truncate(file, first + 100)
    with pytest.raises(StoreError, match="the file ends after 100 of") as caught:
        read(store, 0, 1)
    assert caught.value.path == str(file)
    assert caught.value.offset == first
    assert read(store, 0, 0) == model.image(0, 0)
    store.close()


def test_a_truncated_gguf_names_file_and_offset(model: ExpertFile) -> None:
    opened = model.open()
    store = GgufStore(*opened)
    last = opened[0].tensors["blk.2.ffn_down_exps.weight"]
    os.truncate(last.path, last.offset + last.nbytes - 1)
    with pytest.raises(StoreError) as caught:
        read(store, 2, 2)
    assert caught.value.path == str(last.path)
    assert caught.value.offset == last.offset + last.nbytes // 3 * 2
    store.close()


def test_only_whole_slots_of_experts_that_exist(model: ExpertFile) -> None:
    for store in (GgufStore(*model.open()), packed(model)):
        image = aligned_buffer(store.layout.slot_class(0).slot_bytes)
        for place in ((0, 3), (0, -1), (3, 0), (-1, 0)):
            with pytest.raises(IndexError, match="no expert"):
                store.read(*place, image)
        with pytest.raises(ValueError, match="an expert slot of moe_index 0"):
            store.read(0, 0, aligned_buffer(4096 * 100))
        store.close()


def test_the_faulty_store_fails_as_told(model: ExpertFile) -> None:
    store = FaultyStore(
        packed(model), io_error=[(0, 0)], short=[(0, 1)], wrong=[(0, 2)], held=[(1, 0)]
    )
    with pytest.raises(StoreError, match="EIO"):
        read(store, 0, 0)
    with pytest.raises(StoreError, match="the file ends"):
        read(store, 0, 1)
    assert read(store, 0, 2) == bytes(byte ^ 0xFF for byte in model.image(0, 2))
    with ThreadPoolExecutor(1) as threads:
        held = threads.submit(read, store, 1, 0)
        store.waiting.acquire()
        assert not held.done()
        store.heal()
        assert held.result() == model.image(1, 0)
    assert read(store, 0, 0) == model.image(0, 0)
    assert store.reads == {(0, 0): 2, (0, 1): 1, (0, 2): 1, (1, 0): 1}
    store.close()
