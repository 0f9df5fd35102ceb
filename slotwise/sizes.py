"""Sizes as people write them."""

from __future__ import annotations

import re

from slotwise.errors import UsageError

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)},
    **{prefix: 1024**power for power, prefix in enumerate("KMGT", start=1)},
}


def parse_size(text: str) -> int:
    """Bytes. "6GiB" and "6G" are 6 * 1024**3, "6GB" is 6 * 1000**3, "800" is 800 bytes."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise UsageError(
            f"{text!r} is not a size", next_step="Write for example 6GiB, 800MiB or 2.5G."
        )
    return int(float(match[1]) * unit)
