"""Every error a user can meet, and the exit code it leads to.

SlotwiseError (1)          something failed while running
├── UsageError (2)         wrong options
├── Refused (3)            preflight found reasons not to start; holds all of them
├── StoreError (1)         an expert could not be read: file, offset, cause
├── NotRestored (5)        a window of service ended and production is not as it was
└── Interrupted (130)      the user stopped it; everything is cleaned up

`cli.py` is the only place that prints one and turns it into an exit code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal


class SlotwiseError(Exception):
    """A failure with a next step. `str()` is what was found and where."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, next_step: str = "") -> None:
        super().__init__(message)
        self.next_step = next_step


class UsageError(SlotwiseError):
    """The command line or an API call asks for something that makes no sense."""

    exit_code = 2


class PromptTooLong(UsageError):
    """A prompt has no room in the context."""

    def __init__(self, tokens: str, context: int) -> None:
        super().__init__(
            f"the prompt has {tokens} tokens, the context holds {context:,} and at least one must "
            "be left for the answer",
            next_step="Give a larger --context or a shorter prompt.",
        )


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One reason to refuse (or to warn): what, where, what was expected, what to do."""

    level: Literal["refusal", "warning"]
    code: str
    """Short stable name, kebab-case, for example ``tensor-out-of-bounds``."""
    where: str
    """File, and tensor or key or byte offset where that is known."""
    found: str
    expected: str
    next_step: str

    def __str__(self) -> str:
        return f"{self.where}: {self.found}; expected {self.expected}. {self.next_step}"


class Refused(SlotwiseError):
    """Preflight refuses to start. `findings` holds every reason at once."""

    exit_code = 3

    def __init__(self, findings: Sequence[Finding]) -> None:
        refusals = [f for f in findings if f.level == "refusal"]
        super().__init__("\n".join(str(f) for f in refusals))
        self.findings = tuple(findings)


class StoreError(SlotwiseError):
    """An expert could not be read from the slow tier."""

    def __init__(self, path: str, offset: int, cause: str, *, next_step: str = "") -> None:
        super().__init__(f"{path} at byte {offset:,}: {cause}", next_step=next_step)
        self.path, self.offset, self.cause = path, offset, cause


class NotRestored(SlotwiseError):
    """Production was stopped for a measurement and is not as it was before. The loudest error."""

    exit_code = 5


class Interrupted(SlotwiseError):
    """Stopped by the user after cleaning up."""

    exit_code = 130
