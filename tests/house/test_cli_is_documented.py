"""Every verb and option has help and a place in docs/usage.md."""

from __future__ import annotations

import pytest
from house.cli_tree import PAGE, Verb, commands, options, table, verbs, written_table


@pytest.mark.parametrize("verb", commands(), ids=str)
def test_a_command_says_what_it_does(verb: Verb) -> None:
    assert (verb.command.help or "").strip().endswith(".")


@pytest.mark.parametrize("verb", verbs(), ids=str)
def test_an_option_says_what_it_does(verb: Verb) -> None:
    assert [row.names for row in options(verb) if not row.help] == []


@pytest.mark.parametrize("verb", verbs(), ids=str)
def test_a_verb_has_a_section_with_an_example(verb: Verb) -> None:
    section = PAGE.read_text().partition(f"\n## `slotwise {verb}`")[2].partition("\n## ")[0]
    assert f"$ slotwise {verb} " in section.replace("\n", " ")


def test_the_options_table_is_what_help_says() -> None:
    assert written_table() == table(), "run: python tests/house/cli_tree.py"
