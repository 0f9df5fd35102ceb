"""The text that is read: real prose, because random tokens are routed unlike any real text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def prose() -> str:
    """Chapter one of Alice's Adventures in Wonderland (Lewis Carroll, 1865)."""
    return (Path(__file__).parent / "prose.txt").read_text()


def cut(tokens: Sequence[int], n: int, *, start: int = 0) -> list[int]:
    """`n` tokens of the prose from `start` on, going round at its end."""
    return [tokens[(start + i) % len(tokens)] for i in range(n)]
