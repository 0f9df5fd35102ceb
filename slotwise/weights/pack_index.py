"""The index of a pack: what it was made from, what its slots look like, a checksum per expert.

A pack is a folder with `experts.bin` (slot images in (moe_index, expert) order, each at a multiple
of 4096 bytes) and `index.json`, schema ``slotwise.pack/v1``. The index names its source by digest,
which covers names, sizes and headers but no tensor data: a source edited in place is not noticed.
Nothing here writes `experts.bin`; that is pack.py.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from zlib_ng import zlib_ng

from slotwise.errors import Finding, Refused, StoreError
from slotwise.weights.direct_io import DirectFile, aligned_buffer
from slotwise.weights.ggml_types import GGML_TYPES
from slotwise.weights.layout import ExpertLayout
from slotwise.weights.shards import ModelFile

SCHEMA = "slotwise.pack/v1"
EXPERTS = "experts.bin"
INDEX = "index.json"
MAX_INDEX_BYTES = 64 << 20

_PACK_AGAIN = "Run `slotwise pack --force` on the model to write the pack again."


@dataclass(frozen=True)
class PackIndex:
    """One pack as its index describes it."""

    path: Path
    """The pack's folder."""
    digest: str
    """`ModelFile.digest` of the source."""
    files: tuple[tuple[str, int], ...]
    """Base name and size in bytes of every source file."""
    layout: dict[str, Any]
    """`layout_record` of the layout the slots were written with."""
    nbytes: int
    """Size of experts.bin."""
    checksums: tuple[tuple[int, ...], ...]
    """CRC-32 of every slot image, by moe_index and expert."""
    written: int = 0
    """Experts that the call of `write_pack` returning this wrote; 0: the pack was complete."""

    def to_dict(self) -> dict[str, Any]:
        """The document of index.json, its own checksum included."""
        document = {
            "schema": SCHEMA,
            "source": {
                "digest": self.digest,
                "files": [{"name": name, "size": size} for name, size in self.files],
            },
            "layout": self.layout,
            "experts": {"file": EXPERTS, "bytes": self.nbytes, "crc32": self.checksums},
        }
        return {**document, "checksum": _checksum(document)}


def checksum(image: memoryview | bytes) -> int:
    """CRC-32 (zlib's) of a slot image; the GIL is free meanwhile."""
    return zlib_ng.crc32(image)


def default_pack_path(model: ModelFile) -> Path:
    """`<model stem>.slotpack` beside the model; a split model's number is not part of its stem."""
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", model.path.stem)
    return model.path.with_name(f"{stem}.slotpack")


def layout_record(layout: ExpertLayout) -> dict[str, Any]:
    """The layout as the index holds it, in plain JSON types."""
    return {
        "n_experts": layout.n_experts,
        "n_used": layout.n_used,
        "layers": list(layout.layers),
        "class_of": list(layout.class_of),
        "classes": [
            {
                "slot_bytes": slot.slot_bytes,
                "projections": [
                    {
                        "name": projection.name,
                        "type": GGML_TYPES[projection.type].name,
                        "n_in": projection.n_in,
                        "n_out": projection.n_out,
                        "offset": projection.offset,
                        "nbytes": projection.nbytes,
                    }
                    for projection in slot.projections
                ],
            }
            for slot in layout.classes
        ],
    }


def layer_offsets(layout: ExpertLayout) -> list[int]:
    """Where each layer's first slot image starts in experts.bin, and last the file's size."""
    offsets = [0]
    for moe_index in range(layout.n_moe_layers):
        offsets.append(offsets[-1] + layout.n_experts * layout.slot_class(moe_index).slot_bytes)
    return offsets


def read_index(path: Path) -> PackIndex:
    """The index of the pack in folder `path`; Refused if it is missing, damaged or newer."""
    index, findings = inspect_index(path)
    if index is None:
        raise Refused(findings)
    return index


def inspect_index(path: Path) -> tuple[PackIndex | None, list[Finding]]:
    """Like `read_index`, with findings instead of an exception; whatever bytes the file holds."""
    file = path / INDEX
    try:
        if file.stat().st_size > MAX_INDEX_BYTES:
            return None, [_damaged(file, f"more than {MAX_INDEX_BYTES:,} bytes")]
        document = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None, [_missing(file)]
    except OSError as error:
        return None, [_damaged(file, f"cannot be read ({error.strerror})")]
    except (ValueError, RecursionError):
        return None, [_damaged(file, "not JSON")]
    return _parse(path, document)


def _parse(path: Path, document: Any) -> tuple[PackIndex | None, list[Finding]]:
    file = path / INDEX
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        if isinstance(schema, str) and re.fullmatch(r"slotwise\.pack/v\d+", schema):
            return None, [_other_schema(file, schema)]
        return None, [_damaged(file, f"schema {str(schema)[:80]!r}", expected=repr(SCHEMA))]
    written = document.pop("checksum", None)
    try:
        expected = _checksum(document)
    except (ValueError, RecursionError):
        return None, [_damaged(file, "not an index")]
    if written != expected:
        return None, [_damaged(file, f"checksum {str(written)[:80]!r}", expected=repr(expected))]
    try:
        return _index(path, document), []
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        return None, [_damaged(file, f"an index that lacks {error}")]


def _index(path: Path, document: dict[str, Any]) -> PackIndex:
    source, experts = document["source"], document["experts"]
    return PackIndex(
        path=path,
        digest=str(source["digest"]),
        files=tuple((str(file["name"]), int(file["size"])) for file in source["files"]),
        layout=dict(document["layout"]),
        nbytes=int(experts["bytes"]),
        checksums=tuple(tuple(int(crc) for crc in layer) for layer in experts["crc32"]),
    )


def _checksum(document: dict[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def check_pack(
    path: Path,
    model: ModelFile,
    layout: ExpertLayout,
    *,
    deep: bool = False,
    lanes: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> list[Finding]:
    """Every reason not to read this model's experts from the pack in folder `path`.

    A pack that is not there is a warning, all else are refusals. `deep` reads all of experts.bin
    on `lanes` threads and compares every checksum; `progress` gets bytes done and bytes in all.
    """
    index, findings = inspect_index(path)
    if index is None:
        return findings
    findings = [*_check_source(index, model), *_check_layout(index, layout)]
    if not findings:
        findings = _check_size(index, layout)
    if findings or not deep:
        return findings
    try:
        return _check_experts(index, layout, lanes=lanes, progress=progress)
    except StoreError as error:
        return [_unreadable(error)]


def source_files(model: ModelFile) -> tuple[tuple[str, int], ...]:
    """Base name and size of every shard."""
    return tuple((shard.path.name, shard.size) for shard in model.shards)


def _check_source(index: PackIndex, model: ModelFile) -> Iterator[Finding]:
    if index.digest != model.digest:
        yield _refusal(
            "pack-of-another-source",
            index.path / INDEX,
            found=f"a pack of {_name_source(index.digest, index.files)}",
            expected=f"one of {_name_source(model.digest, source_files(model))}",
        )


def _name_source(digest: str, files: tuple[tuple[str, int], ...]) -> str:
    names = ", ".join(f"{name} ({size:,} bytes)" for name, size in files[:2])
    more = f" and {len(files) - 2} more files" if len(files) > 2 else ""
    return f"{names}{more}, digest {digest[:12]}"


def _check_layout(index: PackIndex, layout: ExpertLayout) -> Iterator[Finding]:
    differences = list(_differences("layout", index.layout, layout_record(layout)))
    shape = [len(layer) for layer in index.checksums]
    if not differences and shape != [layout.n_experts] * layout.n_moe_layers:
        differences = [("experts.crc32 per layer", shape, layout.n_experts)]
    if differences:
        yield _refusal(
            "pack-layout",
            index.path / INDEX,
            found="; ".join(f"{key} = {str(found)[:80]}" for key, found, _ in differences[:3]),
            expected="; ".join(f"{key} = {str(want)[:80]}" for key, _, want in differences[:3]),
        )


def _differences(key: str, found: Any, expected: Any) -> Iterator[tuple[str, Any, Any]]:
    """Where two JSON values differ: the place, and the two values there."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for name in sorted(found.keys() | expected.keys(), key=str):
            yield from _differences(f"{key}.{name}", found.get(name), expected.get(name))
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for number, (left, right) in enumerate(zip(found, expected, strict=True)):
            yield from _differences(f"{key}[{number}]", left, right)
    elif found != expected:
        yield key, found, expected


def _check_size(index: PackIndex, layout: ExpertLayout) -> list[Finding]:
    file = index.path / EXPERTS
    try:
        size = f"{file.stat().st_size:,} bytes"
    except OSError as error:
        size = f"no readable file ({error.strerror})"
    expected = f"{layer_offsets(layout)[-1]:,} bytes"
    if size == expected:
        return []
    return [_refusal("pack-size", file, found=size, expected=expected)]


def _check_experts(
    index: PackIndex,
    layout: ExpertLayout,
    *,
    lanes: int,
    progress: Callable[[int, int], None] | None,
) -> list[Finding]:
    offsets = layer_offsets(layout)
    findings: list[Finding] = []
    with DirectFile(index.path / EXPERTS) as file, ThreadPoolExecutor(lanes) as threads:

        def check(moe_index: int) -> Finding | None:
            return _check_layer(index, layout, file, moe_index, offsets[moe_index])

        for moe_index, finding in enumerate(threads.map(check, range(layout.n_moe_layers))):
            if finding:
                findings.append(finding)
            if progress:
                progress(offsets[moe_index + 1], offsets[-1])
    return findings


def _check_layer(
    index: PackIndex, layout: ExpertLayout, file: DirectFile, moe_index: int, offset: int
) -> Finding | None:
    image = aligned_buffer(layout.slot_class(moe_index).slot_bytes)
    wrong: list[int] = []
    for expert, expected in enumerate(index.checksums[moe_index]):
        try:
            file.read_into(offset + expert * image.nbytes, image)
        except StoreError as error:
            return _unreadable(error)
        if checksum(image) != expected:
            wrong.append(expert)
    if not wrong:
        return None
    some = ", ".join(map(str, wrong[:8])) + (", ..." if len(wrong) > 8 else "")
    return _refusal(
        "pack-checksum",
        file.path,
        found=f"layer {layout.layers[moe_index]}: {len(wrong)} experts ({some}) fail their CRC-32",
        expected=f"all {layout.n_experts} to match {INDEX}",
    )


def _missing(file: Path) -> Finding:
    return _finding(
        "warning",
        "pack-missing",
        file,
        found="no finished pack",
        expected="a pack of the model",
        next_step="Run `slotwise pack` on the model (it goes on where an interrupted run stopped).",
    )


def _other_schema(file: Path, schema: str) -> Finding:
    return _finding(
        "refusal",
        "pack-schema",
        file,
        found=f"schema {schema[:80]}",
        expected=SCHEMA,
        next_step=f"Use the slotwise that wrote it, or write it again. {_PACK_AGAIN}",
    )


def _unreadable(error: StoreError) -> Finding:
    return _refusal(
        "pack-unreadable",
        Path(error.path),
        found=f"at byte {error.offset:,}: {error.cause}",
        expected="a slot image",
    )


def _damaged(file: Path, found: str, *, expected: str = "an undamaged pack index") -> Finding:
    return _refusal("pack-index", file, found=found, expected=expected)


def _refusal(code: str, where: Path, *, found: str, expected: str) -> Finding:
    return _finding("refusal", code, where, found=found, expected=expected, next_step=_PACK_AGAIN)


def _finding(
    level: Literal["refusal", "warning"],
    code: str,
    where: Path,
    *,
    found: str,
    expected: str,
    next_step: str,
) -> Finding:
    return Finding(
        level=level,
        code=code,
        where=str(where),
        found=found,
        expected=expected,
        next_step=next_step,
    )
