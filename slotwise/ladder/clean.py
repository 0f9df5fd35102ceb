"""What may go into a record of what a server said: numbers, and short texts that look harmless.

Names of models and files lose their folders, everything else that could be somebody's words becomes
its checksum.
"""

from __future__ import annotations

import hashlib
import math
import re
from typing import Any

_HARMLESS = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _.:+-]{0,63}")
DEEPEST = 8
MOST_ENTRIES = 200


def clean(value: Any, depth: int = 0) -> Any:
    """`value` without what does not belong into a record; its shape stays."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return clean_text(value)
    if depth >= DEEPEST:
        return "..."
    if isinstance(value, dict):
        entries = list(value.items())[:MOST_ENTRIES]
        return {clean_text(str(k)): clean(v, depth + 1) for k, v in entries}
    if isinstance(value, list):
        return [clean(v, depth + 1) for v in value[:MOST_ENTRIES]]
    return "..."


def clean_text(text: str) -> str:
    """The text if it is short and plain, its last part if it is a path, else its checksum."""
    if not text or _HARMLESS.fullmatch(text):
        return text
    last = text.replace("\\", "/").rpartition("/")[2]
    if "/" in text and " " not in text and _HARMLESS.fullmatch(last):
        return last
    return f"sha256:{sha256(text)[:16]}"


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", errors="replace")).hexdigest()
