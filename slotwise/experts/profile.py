"""A profile: how often the router chose each expert of one model, learnt from some text.

It decides which experts fill the slots at start. It is a ranking, so it may be old or of another
quantisation; only its shape must be the model's. Format `slotwise.profile/v1`, JSON:

    {"schema": "slotwise.profile/v1", "model": {"name": ..., "digest": ...},
     "layers": L, "experts": E, "counts": [[E integers], ... L rows]}

Layers are those with experts, in the model's order. A profile holds no text and no token ids.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slotwise.errors import Finding, Refused, SlotwiseError
from slotwise.weights.header import refusal, shown
from slotwise.weights.layout import ExpertLayout
from slotwise.weights.pack_journal import replace_file

SCHEMA = "slotwise.profile/v1"
MAX_BYTES = 16 << 20
MAX_COUNT = 2**53
"""The largest count: JSON readers elsewhere keep integers exact up to here."""

_RELEARN = "Make one for this model with `slotwise profile`."


@dataclass(frozen=True, kw_only=True)
class Profile:
    """`counts` int64 [layers with experts, experts]."""

    counts: NDArray[np.int64] = field(repr=False, compare=False)
    model_name: str
    model_digest: str
    """ModelFile.digest of the model it was learnt with."""

    @property
    def shape(self) -> tuple[int, int]:
        """(layers with experts, experts a layer)."""
        layers, experts = self.counts.shape
        return layers, experts


class ProfileRecorder:
    """Counts what the router chooses, on the engine's thread."""

    def __init__(self, layout: ExpertLayout) -> None:
        self._counts = np.zeros((layout.n_moe_layers, layout.n_experts), np.int64)

    def add(self, moe_index: int, ids: NDArray[np.integer]) -> None:
        """Expert ids of one layer, of any shape; an expert counts as often as it is named."""
        self._counts[moe_index] += np.bincount(ids.reshape(-1), minlength=self._counts.shape[1])

    def profile(self, *, model_name: str, model_digest: str) -> Profile:
        """What was counted so far."""
        return Profile(counts=self._counts.copy(), model_name=model_name, model_digest=model_digest)


def save_profile(path: Path, profile: Profile) -> None:
    """Writes the whole file or leaves the old one. Raises SlotwiseError when it cannot."""
    layers, experts = profile.shape
    head = {
        "schema": SCHEMA,
        "model": {"name": profile.model_name, "digest": profile.model_digest},
        "layers": layers,
        "experts": experts,
    }
    rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in profile.counts.tolist())
    text = json.dumps(head)[:-1] + f', "counts": [\n{rows}\n]}}\n'
    try:
        replace_file(path, text)
    except OSError as error:
        raise SlotwiseError(
            f"{path} cannot be written: {error.strerror or error}",
            next_step="Check the folder, its permissions and the room on the disk.",
        ) from error


def load_profile(path: Path) -> Profile:
    """Raises Refused, naming what was found and what was expected, for anything but a profile."""
    try:
        return _parse(_read_json(path))
    except _BadProfileError as bad:
        raise Refused([refusal(path, bad.code, bad.found, bad.expected, _RELEARN)]) from None


def profile_findings(path: Path, layout: ExpertLayout, model_digest: str) -> list[Finding]:
    """Refuses a file that is no profile or whose shape is not the model's; warns when the
    profile was learnt with another file."""
    try:
        profile = load_profile(path)
    except Refused as refused:
        return list(refused.findings)
    shape = (layout.n_moe_layers, layout.n_experts)
    if profile.shape != shape:
        found = "is a profile of {} layers x {} experts".format(*profile.shape)
        expected = "{} layers x {} experts, as the model has".format(*shape)
        return [refusal(path, "profile-shape", found, expected, _RELEARN)]
    if profile.model_digest == model_digest:
        return []
    return [
        Finding(
            level="warning",
            code="profile-other-model",
            where=str(path),
            found=f"was learnt with another file, {shown(profile.model_name)}",
            expected="the same file as the model's",
            next_step="It still works if that is the same model in another quantisation.",
        )
    ]


class _BadProfileError(Exception):
    """Why bytes are not a profile."""

    def __init__(self, code: str, found: str, expected: str) -> None:
        super().__init__(code)
        self.code, self.found, self.expected = code, found, expected


def _read_json(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        raise _BadProfileError(
            "profile-unreadable", f"cannot be read: {error}", "a readable file"
        ) from None
    if len(raw) > MAX_BYTES:
        raise _BadProfileError(
            "profile-too-big", f"is over {MAX_BYTES:,} bytes", "a profile, far smaller"
        )
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        cause = str(error) or type(error).__name__
        raise _BadProfileError(
            "profile-not-json", f"is not JSON ({cause[:120]})", "a profile"
        ) from None


def _parse(data: Any) -> Profile:
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise _BadProfileError("profile-schema", f"has the schema {shown(str(schema))}", SCHEMA)
    model = data.get("model")
    model = model if isinstance(model, dict) else {}
    name, digest = model.get("name"), model.get("digest")
    if not isinstance(name, str) or not isinstance(digest, str):
        raise _BadProfileError("profile-model", 'lacks "model"', "an object with name and digest")
    layers, experts = data.get("layers"), data.get("experts")
    if type(layers) is not int or type(experts) is not int or min(layers, experts) < 1:
        found = f"says {shown(str(layers))} layers x {shown(str(experts))} experts"
        raise _BadProfileError("profile-shape", found, "two positive whole numbers")
    counts = _parse_counts(data.get("counts"), layers, experts)
    return Profile(counts=counts, model_name=name, model_digest=digest)


def _parse_counts(rows: Any, layers: int, experts: int) -> NDArray[np.int64]:
    if not isinstance(rows, list) or len(rows) != layers:
        found = f"has {len(rows):,} rows" if isinstance(rows, list) else "has no list"
        raise _BadProfileError(
            "profile-counts", f"{found} of counts", f"{layers} rows, one a layer"
        )
    for layer, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != experts:
            found = f"has {len(row):,} counts" if isinstance(row, list) else "has no list"
            raise _BadProfileError(
                "profile-counts", f"{found} in row {layer}", f"{experts}, one an expert"
            )
        for expert, count in enumerate(row):
            if type(count) is not int or not 0 <= count <= MAX_COUNT:
                found = f"has {shown(str(count))} in row {layer}, expert {expert}"
                raise _BadProfileError(
                    "profile-counts", found, f"a whole number from 0 to {MAX_COUNT:,}"
                )
    return np.array(rows, np.int64)
