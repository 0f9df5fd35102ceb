"""Two arms: what moved, what did not, what stays unexplained, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from explain import made

from slotwise.errors import Refused, UsageError
from slotwise.explain.compare import Comparison, compare
from slotwise.explain.margin import Margin
from slotwise.explain.record import Phase, Reading, Value
from slotwise.explain.wording import still_texts

NAMES = ("off.log", "pinned.log")


def arm(**more: float | int) -> Reading:
    return made.reading(made.life(made.ladder(**more)))


def compared(a: Reading, b: Reading, *, force: bool = False) -> Comparison:
    return compare(a, b, names=NAMES, force=force)


def test_the_checkpoint_arm_moves_the_rest_and_not_the_read() -> None:
    """The second finding of the refill study: the cost is in the prompt span, not in the read."""
    result = compared(arm(), arm(rest=204.0, noise=1.2))
    assert len(result.sizes) == 3
    for size in result.sizes:
        verdicts = {p.name: p.verdict for p in size.phases}
        assert verdicts == {"read (batched)": "did not move", "refill": "did not move"}
        assert size.outer.verdict == "moved"
        assert size.outer.by.estimate.value == pytest.approx(148, abs=1)
        assert size.unexplained.by.estimate.value == pytest.approx(148, abs=1)
        assert size.explained_share == pytest.approx(0, abs=0.01)


def test_a_phase_that_moved_explains_the_difference() -> None:
    size = compared(arm(), arm(refill=0.16, noise=1.2)).sizes[-1]
    verdicts = {p.name: p.verdict for p in size.phases}
    assert verdicts["refill"] == "moved"
    assert size.explained_share == pytest.approx(1.0, abs=0.01)
    assert size.unexplained.verdict == "did not move"


def test_phases_and_unexplained_add_up_to_the_outer_difference() -> None:
    for size in compared(arm(), arm(refill=0.2, rest=99.0, noise=7.0)).sizes:
        parts = sum(p.by.estimate.value for p in size.phases)
        total = parts + size.unexplained.by.estimate.value
        assert total == pytest.approx(size.outer.by.estimate.value)
        assert size.explained_ms == pytest.approx(parts)


def test_same_prompts_are_paired_and_others_are_not() -> None:
    assert all(s.outer.by.paired for s in compared(arm(), arm()).sizes)
    shorter = compared(arm(), arm(repeats=5))
    assert not any(s.outer.by.paired for s in shorter.sizes)
    assert any("5 requests in A, 4 in B" in text for text in shorter.hidden)


@pytest.mark.parametrize(
    ("margin", "noise", "verdict"),
    [("5%", 1.2, "did not move"), ("0.01ms", 1.2, "not shown to move"),
     ("5%", 400.0, "not shown to move")],
)  # fmt: skip
def test_what_did_not_move_rests_on_an_interval_inside_a_margin(
    margin: str, noise: float, verdict: str
) -> None:
    """An interval with zero in it is no proof: with enough noise everything has one."""
    b = arm(noise=noise, repeats=5)  # one fewer: unpaired
    result = compare(arm(), b, names=NAMES, margin=Margin.parse(margin))
    size = result.sizes[0]
    read = next(p for p in size.phases if p.name == "read (batched)")
    assert read.verdict == verdict
    low, high = read.by.estimate.low, read.by.estimate.high
    assert low is not None
    assert high is not None
    assert low <= 0 <= high
    inside = -size.margin_ms < low and high < size.margin_ms
    assert inside == (verdict == "did not move")
    said = "\n".join(still_texts(size))
    assert ("did not move, by less than" if inside else "would fit as well") in said


def test_a_margin_is_of_the_outer_clock_or_in_ms() -> None:
    size = compared(arm(), arm(rest=66.0, noise=1.2)).sizes[0]
    assert size.margin_ms == pytest.approx(0.05 * size.outer.a.value)
    assert size.outer.verdict == "moved, within the margin"
    assert Margin.parse("20 ms").ms(1000.0) == 20.0
    assert Margin.parse("2.5%").ms(1000.0) == 25.0


@pytest.mark.parametrize("text", ["", "5", "0%", "-3%", "5 s", "5%%", "nan%", "1e3ms"])
def test_a_margin_that_is_none_is_wrong_usage(text: str) -> None:
    with pytest.raises(UsageError) as error:
        Margin.parse(text)
    assert "--margin 5%" in (error.value.next_step or "")


def test_few_samples_say_what_they_can_reach() -> None:
    size = compared(arm(), arm()).sizes[0]
    assert any("5 pairs" in w for w in size.warnings)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"dialect": "llama.cpp"}, "other-engine"),
        ({"version": "0.1.42"}, "other-revision"),
        ({"facts": {"slot bytes": Value.measured(2_500_000)}}, "other-model"),
    ],
)
def test_what_is_not_comparable_is_refused_or_forced_and_said(
    change: dict[str, object], code: str
) -> None:
    other = made.reading(made.life(made.ladder(), **change))
    with pytest.raises(Refused) as refused:
        compared(arm(), other)
    assert [f.code for f in refused.value.findings] == [code]
    assert refused.value.exit_code == 3
    assert "--force-compare" in refused.value.findings[0].next_step
    forced = compared(arm(), other, force=True)
    assert forced.forced
    assert forced.warnings[0].startswith("FORCED although")


def test_other_prompt_sizes_are_refused() -> None:
    small = [
        made.slot_request(i, read=40, read_ms=90, refill_ms=9, slots=30, rest=9) for i in range(6)
    ]
    with pytest.raises(Refused) as refused:
        compared(arm(), made.reading(made.life(small)))
    assert [f.code for f in refused.value.findings] == ["other-sizes"]


def test_an_empty_arm_is_refused_even_when_forced() -> None:
    with pytest.raises(Refused) as refused:
        compared(arm(), made.reading(made.life([])), force=True)
    assert "arm B has no finished request" in refused.value.findings[0].found


def test_sizes_of_one_arm_only_are_listed() -> None:
    b = made.reading(made.life([r for r in made.ladder() if (r.prompt.value or 0) < 1000]))
    result = compared(arm(), b)
    assert len(result.sizes) == 2
    assert result.unmatched == ("prompt 2,001 tokens, new: only in arm A",)


def test_hidden_differences_are_listed() -> None:
    b = made.life(
        [replace(r, slots_lent=Value.measured(7)) for r in made.ladder()],
        capabilities={"lend lines": True, "prefill timing": True},
        facts={"slot bytes": Value.measured(1_900_000), "chunk tokens": Value.measured(4096)},
    )
    hidden = "\n".join(compared(arm(), made.reading(b)).hidden)
    assert "switches on: A lend lines, B lend lines, prefill timing" in hidden
    assert "chunk tokens: A none, B 4096" in hidden
    assert "prompt 201 tokens, new: lent slots: A 200, B 7" in hidden
    assert compared(arm(), arm()).hidden == ()


def test_a_reused_count_that_varied_is_listed() -> None:
    def hits(counts: tuple[int, ...]) -> Reading:
        phases = [made.measured("read (windows)", 40.0, tokens=4)]
        return made.reading(made.life([
            made.request(i, prompt=500, reused=n, phases=phases, prompt_ms=60.0 + i)
            for i, n in enumerate(counts)
        ]))  # fmt: skip

    hidden = compared(hits((490, 490, 490, 490)), hits((490, 490, 485, 490))).hidden
    assert any("reused tokens: A 490, B 485, 490" in text for text in hidden)


def test_a_phase_only_bounded_is_in_the_unexplained_part_and_lanes_are_not_added() -> None:
    def timed(requests: list[made.Request]) -> Reading:
        extra = (
            Phase("checkpoint", Value.bounded(0.0, 9.0, "old")),
            made.measured("gdn", 500.0, lane="gpu timeline"),
        )
        return made.reading(made.life([replace(r, phases=(*r.phases, *extra)) for r in requests]))

    size = compared(timed(made.ladder()), timed(made.ladder(rest=80.0))).sizes[0]
    assert [p.name for p in size.phases] == ["read (batched)", "refill"]
    assert any("checkpoint: not known in every request" in w for w in size.warnings)
    assert [(c.lane, c.name) for c in size.overlapped] == [("gpu timeline", "gdn")]
    assert size.outer.by.estimate.value == pytest.approx(24, abs=1)


def test_a_log_against_itself_moves_nothing() -> None:
    one = arm()
    for size in compared(one, one).sizes:
        assert size.n_a == size.n_b == 5
        assert size.outer.by.estimate.value == 0.0
        assert size.outer.verdict == "no interval"
