"""Guards what a user has: no verb writes over an input, or over a file without being told to."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from slotwise.errors import UsageError


def check_output(path: Path, *, force: bool, inputs: Iterable[Path] = ()) -> None:
    """Raises UsageError if `path` is one of `inputs`, or is there already and `force` is not set.

    Devices and pipes (/dev/null, /dev/stdout) may always be written.
    """
    if not path.exists() or not path.is_file():
        return
    for given in inputs:
        if given.exists() and path.samefile(given):
            raise UsageError(
                f"{path} is an input of this command and would be written over",
                next_step="Name another file.",
            )
    if not force:
        raise UsageError(f"{path} exists already", next_step="Name another file, or give --force.")
