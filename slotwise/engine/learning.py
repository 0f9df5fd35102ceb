"""Learns a profile: reads text as prompts and counts which experts the router chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slotwise.engine.engine import Engine
from slotwise.engine.loading import Progress
from slotwise.engine.session import settings_from
from slotwise.errors import UsageError
from slotwise.experts.profile import Profile, ProfileRecorder, save_profile
from slotwise.outputs import check_output
from slotwise.weights.shard_set import sibling_files
from slotwise.weights.tokenizer import Tokenizer

HOTTEST_SHARE = 0.25


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What was learnt. Shares are of all choices the router made."""

    profile: str
    tokens: int
    moe_layers: int
    experts: int
    hottest_quarter_share: float
    never_used: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        total = self.moe_layers * self.experts
        return [
            f"{self.profile}: {self.moe_layers} layers x {self.experts} experts, "
            f"learnt from {self.tokens:,} tokens",
            f"the hottest quarter of the experts served {self.hottest_quarter_share:.0%} "
            f"of the choices; {self.never_used:,} of {total:,} were never chosen",
        ]


def learn_profile(
    model: Path,
    texts: Sequence[Path],
    *,
    out: Path | None,
    force: bool,
    options: Mapping[str, Any],
    progress: Progress | None,
) -> Summary:
    """Reads every file through the model and saves the counts. Raises UsageError, StoreError."""
    target = out or model.with_suffix(".profile.json")
    check_output(target, force=force, inputs=[*sibling_files(model), *texts])
    with Engine.open(model, settings_from(options), progress=progress) as engine:
        layout = engine.loaded.blueprint.layout
        if layout is None or engine.loaded.experts is None:
            raise UsageError(f"{model.name} has no experts", next_step="It needs no profile.")
        tokens = _tokens(engine, texts)
        recorder = ProfileRecorder(layout)
        engine.loaded.experts.recorder = recorder
        _read_all(engine, tokens, progress)
        learnt = recorder.profile(model_name=model.name, model_digest=engine.model.digest)
    save_profile(target, learnt)
    return _summary(target, len(tokens), learnt)


def _tokens(engine: Engine, texts: Sequence[Path]) -> list[int]:
    n_vocab = engine.loaded.blueprint.architecture.hyper.n_vocab
    tokenizer = Tokenizer.from_metadata(engine.model.metadata, n_vocab=n_vocab)
    tokens = [
        token
        for path in texts
        for token in tokenizer.encode(path.read_bytes(), special=False, add_bos=False)
    ]
    if not tokens:
        names = ", ".join(path.name for path in texts)
        raise UsageError(f"no text in {names}", next_step="Give text that the model will see.")
    return tokens


def _read_all(engine: Engine, tokens: Sequence[int], progress: Progress | None) -> None:
    """In pieces that fit the context, each from an empty state."""
    length = engine.loaded.settings.context - 1
    for first in range(0, len(tokens), length):
        engine.read_only(tokens[first : first + length])
        if progress is not None:
            progress("learning", min(first + length, len(tokens)), len(tokens))


def _summary(path: Path, n_tokens: int, learnt: Profile) -> Summary:
    counts = np.sort(learnt.counts.ravel())[::-1]
    hottest = counts[: max(1, int(counts.size * HOTTEST_SHARE))].sum()
    return Summary(
        profile=str(path),
        tokens=n_tokens,
        moe_layers=learnt.shape[0],
        experts=learnt.shape[1],
        hottest_quarter_share=float(hottest / max(1, counts.sum())),
        never_used=int((counts == 0).sum()),
    )
