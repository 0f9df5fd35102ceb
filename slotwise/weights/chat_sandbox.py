"""The jinja2 environment that chat templates run in; imported only when one is compiled.

jinja2's sandbox keeps a template away from everything but its input. This adds what it lacks: a
budget for loop rounds, calls and what is built, and limits on what `+`, `~`, `*` and `**` make.
Padding to a huge width by a filter or a format is not caught.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS = 2_000_000
"""The work of one rendering, in loop rounds: seconds at most."""
MAX_SIZE = 16 << 20
"""Characters of anything a template builds, its output too."""
_MAX_ITEMS = 1 << 20
_MAX_BITS = 4096
_CALL_STEPS = 20
_CHARACTERS_PER_STEP = 256


class ConversationRefused(jinja2.TemplateError):
    """The template itself says that it cannot render this conversation."""


class _GenerationTag(Extension):
    """``{% generation %}`` marks the model's own words for training; here it changes nothing."""

    tags: set[str] = {"generation"}  # noqa: RUF012 (jinja2 declares it as an instance's)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class Sandbox(ImmutableSandboxedEnvironment):
    """One template's environment; `steps_left` is set before each rendering."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        # Not optimized: constants are computed inside the limits, and only when rendered.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
        )
        self.steps_left = MAX_STEPS
        self.filters |= {"tojson": _to_json, "_rounds": self._rounds, "_sized": self._sized}
        del self.globals["lipsum"]  # slow, and no conversation needs it
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def compile_guarded(self, source: str) -> jinja2.Template:
        """Compiles `source` with every loop and every `~` inside the limits."""
        return self.from_string(_Guard(self).visit(self.parse(source)))

    def call(self, context: Context, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._spend(_CALL_STEPS)
        return super().call(context, callee, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator != "+":
            _check_growth(operator, left, right)
        return self._sized(super().call_binop(context, operator, left, right))

    def _spend(self, steps: int) -> None:
        self.steps_left -= steps
        if self.steps_left < 0:
            raise SecurityError("it takes too many loop rounds and calls, or builds too much")

    def _sized(self, value: Any) -> Any:
        if isinstance(value, (str, list, tuple)):
            self._spend(len(value) // _CHARACTERS_PER_STEP)
            _check_length(len(value), value)
        return value

    def _rounds(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self._spend(1)
            yield value


class _Guard(NodeTransformer):
    """Puts each loop's values through `_rounds` and each joined text through `_sized`."""

    def __init__(self, environment: Sandbox) -> None:
        self.environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 (the name jinja2 calls)
        self.generic_visit(node)
        node.iter = self._filtered(node.iter, "_rounds")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._filtered(node, "_sized")

    def _filtered(self, node: Any, name: str) -> nodes.Filter:
        line, environment = node.lineno, self.environment
        return nodes.Filter(node, name, [], [], None, None, lineno=line, environment=environment)


def _check_growth(operator: str, left: Any, right: Any) -> None:
    """SecurityError before a product or a power gets too large to be made at all."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        if (bits * right if operator == "**" else bits + right.bit_length()) > _MAX_BITS:
            raise SecurityError("a number gets too large")
    for value, times in ((left, right), (right, left)):
        if isinstance(value, (str, list, tuple)) and isinstance(times, int):
            _check_length(len(value) * times, value)


def _check_length(length: int, value: Any) -> None:
    limit = MAX_SIZE if isinstance(value, str) else _MAX_ITEMS
    if length > limit:
        raise SecurityError(f"a value gets longer than {limit:,}")


def _raise_exception(message: str) -> NoReturn:
    raise ConversationRefused(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
