"""Prompts and conversations in text: phases, templates, character boundaries, cancelling."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine.rig import Small, check_idle, record_of
from engine.talk import SECRET, answerer, options, user

from slotwise.engine.text import Answerer
from slotwise.errors import PromptTooLong, Refused, UsageError


@pytest.fixture(scope="module")
def opened(talking: Path) -> Iterator[Answerer]:
    with answerer(talking, slots=8) as opened:
        yield opened


@pytest.fixture
def talker(opened: Answerer) -> Answerer:
    opened.engine.loaded.state.reuse([-1])
    return opened


def test_a_prompt_that_is_continued(talker: Answerer) -> None:
    text = "".join(talker.continue_text(SECRET, options()))
    record = record_of(talker.engine)
    assert record.tokens.prompt == len(talker.tokenizer.encode(SECRET, special=True))
    assert list(record.ledger.phases)[:2] == ["tokenize", "lookup"]
    assert 0 < len(text) <= 8
    check_idle(talker.engine)


def test_pieces_are_whole_characters_and_none_is_lost(talker: Answerer) -> None:
    pieces = list(talker.continue_text(SECRET, options(40)))
    text = "".join(pieces)
    text.encode()  # no lone surrogates
    tokens = talker.engine.loaded.state.tokens[len(SECRET) :]
    assert text.startswith(talker.tokenizer.decode(tokens)[:-1])


def test_a_conversation_reuses_what_it_has_read(talker: Answerer, talking: Path) -> None:
    first = "".join(talker.reply(user("hello"), options()))
    assert list(record_of(talker.engine).ledger.phases)[:3] == ["template", "tokenize", "lookup"]
    before = len(talker.engine.loaded.state.tokens)
    second = "".join(talker.reply(user("hello", first, "and now?"), options()))
    counts = record_of(talker.engine).tokens
    assert 0 < counts.reused <= before
    assert counts.reused > len("<|im_start|>") + len("hello")
    with answerer(talking) as fresh:
        expected = "".join(fresh.reply(user("hello", first, "and now?"), options()))
        assert record_of(fresh.engine).tokens.reused == 0
    assert second == expected


def test_cancelling_ends_the_pieces_without_an_error(talker: Answerer) -> None:
    cancel = threading.Event()
    pieces = []
    for piece in talker.continue_text(SECRET, options(40), cancel=cancel):
        pieces.append(piece)
        if len(pieces) == 3:
            cancel.set()
    assert len(pieces) in (3, 4)  # a last one may hold the rest of a character
    assert record_of(talker.engine).status == "cancelled"
    assert record_of(talker.engine).tokens.generated == 3
    check_idle(talker.engine)


def test_pieces_that_nobody_reads_to_their_end(talker: Answerer) -> None:
    pieces = talker.continue_text(SECRET, options(40))
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert record_of(talker.engine).status == "cancelled"
    check_idle(talker.engine)


def test_an_empty_prompt(talker: Answerer) -> None:
    with pytest.raises(UsageError, match="the prompt is empty"):
        "".join(talker.continue_text("", options()))
    assert record_of(talker.engine).status == "failed"
    assert "".join(talker.continue_text(SECRET, options()))


def test_a_text_that_is_too_long_however_it_is_cut_is_not_cut(
    talker: Answerer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*_: object, **__: object) -> list[int]:
        raise AssertionError("it was cut")

    monkeypatch.setattr(talker.tokenizer, "encode", cut)
    with pytest.raises(PromptTooLong, match=r"at least [\d,]+ tokens"):
        "".join(talker.continue_text("x" * 4_000_000, options()))
    with pytest.raises(PromptTooLong):
        "".join(talker.reply(user("x" * 4_000_000), options()))
    assert record_of(talker.engine).status == "failed"


def test_a_model_without_text(small: Callable[[str], Small]) -> None:
    with answerer(small("llama").path) as mute:
        assert mute.template is None
        with pytest.raises(Refused):
            "".join(mute.continue_text("x", options()))
        with pytest.raises(UsageError, match="no chat template"):
            "".join(mute.reply(user("x"), options()))
