"""What may leave a reader as a version."""

from __future__ import annotations

import re

import pytest

from slotwise.explain.readers.common import VERSION


@pytest.mark.parametrize(
    "text",
    ["0.6.3.post1", "0.11.0rc2.dev34+g1234567.cu128", "b11434", "b11020-1a2b3c4", "v0.1.32", "7"],
)
def test_versions_as_engines_print_them(text: str) -> None:
    assert re.fullmatch(VERSION, text)


@pytest.mark.parametrize(
    "text", ["9f8e7d6c5b4a39281706f5e4d3c2b1a0", "7secretkey", "sk-123", "1/2"]
)
def test_a_key_is_no_version(text: str) -> None:
    assert not re.fullmatch(VERSION, text)
