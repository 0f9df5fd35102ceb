"""Both stores give the same bytes, and say what went wrong when they cannot."""

from __future__ import annotations

import errno
import os
import shutil
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


def packed(model: ExpertFile, *, verify: bool = True) -> PackStore:
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
    gguf, pack = GgufStore(*model.open()), packed(model)
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


def damage(file: Path, *offsets: int) -> None:
    with file.open("r+b") as opened:
        for offset in offsets:
            opened.seek(offset)
            opened.write(b"damage")


def experts_file(model: ExpertFile) -> Path:
    return default_pack_path(model.open()[0]) / EXPERTS


def test_a_damaged_image_is_caught_when_it_is_first_read(model: ExpertFile) -> None:
    store = packed(model)
    first = store.layout.slot_class(0).slot_bytes
    read(store, 0, 1)
    stamp = experts_file(model).stat()
    damage(experts_file(model), first + 5, 3 * first + 5)
    os.utime(experts_file(model), ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    with pytest.raises(StoreError, match="layer 1 expert 0 has CRC-32") as caught:
        read(store, 1, 0)
    assert caught.value.offset == 3 * first
    assert "pack --force" in caught.value.next_step
    read(store, 0, 1)  # compared before, and the file does not look changed: not again
    store.close()


def test_a_file_that_somebody_wrote_to_is_compared_anew(model: ExpertFile) -> None:
    store = packed(model)
    first = store.layout.slot_class(0).slot_bytes
    for expert in range(3):
        read(store, 0, expert)
    damage(experts_file(model), first + 5)
    with pytest.raises(StoreError, match="layer 0 expert 1 has CRC-32"):
        read(store, 0, 1)
    assert read(store, 0, 2) == model.image(0, 2)
    with pytest.raises(StoreError, match="layer 0 expert 1 has CRC-32"):
        read(store, 0, 1)  # a wrong expert is never taken for compared
    store.close()


def test_a_write_between_a_read_and_its_check_is_not_missed(
    model: ExpertFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = packed(model)
    read_into = store._file.read_into

    def interrupted(offset: int, target: memoryview) -> int:
        nbytes = read_into(offset, target)
        damage(experts_file(model), 5)
        return nbytes

    monkeypatch.setattr(store._file, "read_into", interrupted)
    assert read(store, 0, 0) == model.image(0, 0)  # what was read was still right
    monkeypatch.undo()
    with pytest.raises(StoreError, match="layer 0 expert 0 has CRC-32"):
        read(store, 0, 0)
    store.close()


def test_without_checksums_damage_goes_unnoticed(model: ExpertFile) -> None:
    store = packed(model, verify=False)
    damage(experts_file(model), 5)
    assert read(store, 0, 0) != model.image(0, 0)
    store.close()


@pytest.mark.parametrize("how", ["replaced", "deleted"])
def test_a_pack_that_is_replaced_or_deleted_is_read_on(model: ExpertFile, how: str) -> None:
    """The open file is the old one, whatever its name stands for now."""
    store = packed(model)
    file = experts_file(model)
    if how == "replaced":
        other = file.with_name("other")
        other.write_bytes(bytes(file.stat().st_size))
        other.replace(file)
    else:
        shutil.rmtree(file.parent)
    for moe_index in range(3):
        assert read(store, moe_index, 2) == model.image(moe_index, 2)
    store.close()


def test_packing_again_leaves_an_open_pack_alone(model: ExpertFile) -> None:
    store = packed(model)
    index = write_pack(*model.open(), default_pack_path(model.open()[0]), force=True)
    assert index.written == 9
    assert read(store, 1, 1) == model.image(1, 1)
    store.close()


def test_two_stores_on_one_pack(model: ExpertFile) -> None:
    stores = [packed(model), packed(model)]
    with ThreadPoolExecutor(4) as threads:
        images = [threads.submit(read, stores[n % 2], n % 3, n // 2 % 3) for n in range(60)]
        for n, image in enumerate(images):
            assert image.result() == model.image(n % 3, n // 2 % 3)
    for store in stores:
        store.close()


def test_a_model_that_somebody_wrote_to_is_refused(model: ExpertFile) -> None:
    """A GGUF has no checksums to tell which experts are still right."""
    opened = model.open()
    store = GgufStore(*opened)
    last = opened[0].tensors["blk.2.ffn_down_exps.weight"]
    assert read(store, 2, 2) == model.image(2, 2)
    damage(last.path, last.offset)
    with pytest.raises(
        StoreError, match="the model file was changed while it was in use"
    ) as caught:
        read(store, 2, 2)
    assert caught.value.path == str(last.path)
    store.close()


def test_a_model_that_changed_after_its_header_was_read(model: ExpertFile) -> None:
    opened = model.open()
    last = opened[0].tensors["blk.2.ffn_down_exps.weight"]
    with last.path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(StoreError, match="changed"):
        GgufStore(*opened)


def test_an_expert_can_be_named_before_it_is_read(model: ExpertFile) -> None:
    gguf, pack = GgufStore(*model.open()), packed(model)
    gate = model.open()[0].tensors["blk.1.ffn_gate_exps.weight"]
    assert gguf.where(1, 2) == (str(gate.path), gate.offset + gate.nbytes // 3 * 2)
    first, second = (pack.layout.slot_class(n).slot_bytes for n in (0, 1))
    assert pack.where(1, 2) == (str(experts_file(model)), 3 * first + 2 * second)
    gguf.close()
    pack.close()


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
