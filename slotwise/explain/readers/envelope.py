"""What other programs put around an engine's lines: containers, journals, terminals, routers.

Takes it off, and says which process a line came from where the wrapping names one. The name is
a key to keep processes apart and never leaves a reader.
"""

from __future__ import annotations

import json
import re

KEY_LIMIT = 80

_COLOUR = re.compile(r"\x1b\[[0-9;?]{0,16}[A-Za-z]")
_JSON = re.compile(r'^\{"log":"((?:[^"\\]|\\.)*)"|"MESSAGE"\s*:\s*"((?:[^"\\]|\\.)*)"')
_AROUND = re.compile(
    r"(?:"
    r"<\d{1,3}>\d? ?|"
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?\s+"
    r"(?:(?:stdout|stderr) [FP] |\| )?|"
    r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d (?P<unit>\S{1,64} [^\s:]{1,64}): |"
    r"(?P<service>[A-Za-z][\w.-]{0,63})\s*\| (?!\|)|"
    r"\[(?P<port>\d{1,6})\]\s+(?!\d\d:)"
    r")"
)


def unwrapped(line: str) -> tuple[str, str]:
    """The process a line came from ("" if the line does not say) and the line it wrote."""
    if "\x1b" in line:
        line = _COLOUR.sub("", line)
    key = ""
    if line.startswith("{") and (held := _JSON.search(line)):
        line = _unescaped(held[1] if held[1] is not None else held[2]) or line
    at = 0
    for _ in range(3):
        around = _AROUND.match(line, at)
        if around is None:
            break
        at = around.end()
        name = around.lastgroup
        if name is not None:
            key += around[name][:KEY_LIMIT] + " "
    return key, line[at:] if at else line


def _unescaped(text: str) -> str:
    try:
        return json.loads(f'"{text}"').rstrip("\r\n")
    except ValueError:
        return ""
