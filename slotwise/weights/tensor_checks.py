"""Do the tensors of one GGUF file make sense: types, shapes, and places in the file?

One finding per kind of problem and file, naming the first tensor: one damaged byte can upset
thousands of them. Does not know which tensors a model needs; that is preflight's part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from slotwise.errors import Finding
from slotwise.weights.ggml_types import GGML_TYPES, type_name
from slotwise.weights.header import REDOWNLOAD, Shard, TensorInfo, refusal, shown


def tensor_findings(shard: Shard) -> Iterator[Finding]:
    """Every reason in this file's tensor list not to read the tensors."""
    path, tensors = shard.path, shard.tensors
    yield from _type_findings(path, tensors)
    seen: set[str] = set()
    if twice := [t for t in tensors if t.name in seen or seen.add(t.name)]:
        yield _finding(path, "duplicate-tensor", twice, "is listed twice", "each name once")
    if impossible := [t for t in tensors if t.type in GGML_TYPES and t.nbytes == 0]:
        kind = GGML_TYPES[impossible[0].type]
        found = f"of type {kind.name} has the shape {list(impossible[0].shape)}"
        expected = f"sizes above 0, rows of whole blocks of {kind.block}, no overflow"
        yield _finding(path, "tensor-shape", impossible, found, expected)
    if crooked := [t for t in tensors if (t.offset - shard.data_offset) % shard.alignment]:
        found = f"starts {crooked[0].offset - shard.data_offset:,} bytes into the data"
        expected = f"a multiple of {shard.alignment}"
        yield _finding(path, "tensor-misaligned", crooked, found, expected)
    yield from _place_findings(shard)


def _type_findings(path: Path, tensors: Sequence[TensorInfo]) -> Iterator[Finding]:
    supported = {t.id: t.name for t in GGML_TYPES.values() if t.supported}
    for kind in sorted({t.type for t in tensors} - supported.keys()):
        users = [t for t in tensors if t.type == kind]
        code = "type-unsupported" if kind in GGML_TYPES else "type-unknown"
        found = f"has the quant type {type_name(kind)}, which is not supported"
        expected = "one of " + ", ".join(supported.values())
        step = "Use a file quantised to one of these types."
        yield _finding(path, code, users, found, expected, next_step=step)


def _place_findings(shard: Shard) -> Iterator[Finding]:
    placed = sorted((t for t in shard.tensors if t.nbytes), key=lambda t: t.offset)
    if not placed:
        return
    # Every known writer packs tensors one after the other. A file shorter than its packed tensors
    # was cut; a tensor that ends beyond even that has a wrong offset. With tensors of unknown size
    # nobody can tell, and a cut is the more likely.
    align = shard.alignment
    packed = sum(-(-t.nbytes // align) * align for t in placed[:-1]) + placed[-1].nbytes
    all_sized = len(placed) == len(shard.tensors)
    packed_end = shard.data_offset + packed if all_sized else max(_end(t) for t in placed)
    beyond = [t for t in placed if _end(t) > shard.size]
    stray = [t for t in beyond if _end(t) > packed_end]
    if len(stray) < len(beyond):
        found = f"is truncated: {packed_end - shard.size:,} bytes are missing, {len(beyond):,} of "
        found += f"{len(shard.tensors):,} tensors do not fit (first {shown(beyond[0].name)})"
        expected = f"{packed_end:,} bytes, it has {shard.size:,}"
        yield refusal(shard.path, "file-truncated", found, expected)
    if stray:
        found = f"ends at byte {_end(stray[0]):,}"
        expected = f"at most {shard.size:,}, the size of the file"
        yield _finding(shard.path, "tensor-out-of-bounds", stray, found, expected)
    lapping = [(left, right) for left, right in pairwise(placed) if right.offset < _end(left)]
    if lapping:
        left, right = lapping[0]
        found = f"overlaps {shown(left.name)} by {_end(left) - right.offset:,} bytes"
        tensors = [right for _, right in lapping]
        yield _finding(shard.path, "tensor-overlap", tensors, found, "separate tensors")


def _end(tensor: TensorInfo) -> int:
    return tensor.offset + tensor.nbytes


def _finding(
    path: Path,
    code: str,
    tensors: Sequence[TensorInfo],
    found: str,
    expected: str,
    *,
    next_step: str = REDOWNLOAD,
) -> Finding:
    more = f" (and {len(tensors) - 1:,} more tensors)" if len(tensors) > 1 else ""
    where = f"{path}: tensor {shown(tensors[0].name)}"
    return refusal(where, code, found + more, expected, next_step)
