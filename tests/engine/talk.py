"""The small model that has a tokenizer and a chat template, and answers worth looking at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.rig import GREEDY, settings
from house.talking_model import write_talking_model

from slotwise.engine.engine import Engine
from slotwise.engine.text import Answerer, AnswerOptions

SECRET = "Zebrafish swim at midnight"


def options(n: int = 8) -> AnswerOptions:
    return AnswerOptions(max_tokens=n, sampling=GREEDY)


@contextmanager
def answerer(path: Path, *, trace: Path | None = None, **chosen: Any) -> Iterator[Answerer]:
    with Engine.open(path, settings(**chosen), trace=trace) as engine:
        yield Answerer(engine)


def user(*texts: str) -> list[dict[str, str]]:
    """Alternating messages, the user's first."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


__all__ = ["SECRET", "answerer", "options", "user", "write_talking_model"]
