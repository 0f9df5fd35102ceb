"""Prompts hit their size exactly, are real text, and never begin alike."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from slotwise.errors import SlotwiseError, UsageError
from slotwise.ladder.prompts import Corpus, PromptMaker, Sizer, own_corpus, standard_corpus

CORPUS = standard_corpus()


def every_third(text: str) -> int:
    return -(-len(text) // 3)


def by_words(text: str) -> int:
    """Uneven: words cost by their length, and a cut inside a word changes little."""
    return sum(1 + len(word) // 5 for word in text.split())


@pytest.mark.parametrize("tokenize", [every_third, by_words, len])
@pytest.mark.parametrize("size", [30, 75, 512, 2048])
def test_a_prompt_has_exactly_its_tokens(tokenize: object, size: int) -> None:
    sizer = Sizer(tokenize=tokenize, overhead=9)  # type: ignore[arg-type]
    for number in range(4):
        prompt = PromptMaker(CORPUS, seed=number).make(size, round=number, sizer=sizer)
        assert tokenize(prompt.text) + 9 == size  # type: ignore[operator]


def test_the_template_is_learnt_from_the_first_answer() -> None:
    maker, sizer = PromptMaker(CORPUS, seed=1), Sizer(tokenize=every_third)
    first = maker.make(200, round=0, sizer=sizer)
    served = every_third(first.text) + 31
    sizer.served(200, prompt=first.text, body=first.body_chars, tokens=served)
    second = maker.make(200, round=1, sizer=sizer)
    assert every_third(second.text) + 31 == 200


def test_without_tokenize_the_size_is_found_from_served_counts() -> None:
    maker, sizer = PromptMaker(CORPUS, seed=1), Sizer()
    counts = []
    for number in range(7):
        prompt = maker.make(512, round=number, sizer=sizer)
        counts.append(by_words(prompt.text) + 20)
        sizer.served(512, prompt=prompt.text, body=prompt.body_chars, tokens=counts[-1])
    assert abs(counts[-1] - 512) <= 1
    assert abs(counts[0] - 512) > abs(counts[-1] - 512)


def test_salts_are_fresh_and_in_front_and_passages_are_shared_by_arms() -> None:
    maker, sizer = PromptMaker(CORPUS, seed=5), Sizer(tokenize=every_third, overhead=0)
    prompts = [maker.make(100, round=r, sizer=sizer) for r in (1, 1, 2)]
    salts = {p.text.split()[0] for p in prompts}
    assert len(salts) == 3
    assert all(salt.isdigit() and len(salt) == 12 for salt in salts)
    assert prompts[0].passage == prompts[1].passage != prompts[2].passage
    assert prompts[0].text[13:280] == prompts[1].text[13:280]
    assert len({p.sha256 for p in prompts}) == 3


def test_a_seed_makes_the_same_passages_again() -> None:
    sizer = Sizer(tokenize=every_third, overhead=0)
    made = [PromptMaker(CORPUS, seed=8).make(100, round=3, sizer=sizer) for _ in range(2)]
    assert made[0].passage == made[1].passage


def test_the_text_is_not_repeated_words() -> None:
    words = CORPUS.text.split()
    for start in Random(0).sample(range(len(words) - 400), 20):
        assert len(set(words[start : start + 400])) > 100


def test_more_tokens_than_there_is_text() -> None:
    with pytest.raises(SlotwiseError, match="more than the text has"):
        PromptMaker(Corpus("x", "y", "word " * 500), seed=0).make(5_000, round=0, sizer=Sizer())


def test_a_text_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("short")
    with pytest.raises(UsageError, match="5 characters"):
        own_corpus(path)
    path.write_bytes(b"\xff" * 5_000)
    with pytest.raises(UsageError, match="UTF-8"):
        own_corpus(path)
    path.write_text("Some words of mine.\n" * 200)
    assert own_corpus(path).name == "a text of the user"
