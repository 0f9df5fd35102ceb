"""What the demonstration says of a request."""

from __future__ import annotations

from slotwise.demo.story import ORDER, POLICIES, refill_line
from slotwise.trace import DecodeTally, Ledger, Refill, RequestRecord, Tokens

MS = 1_000_000


def record(tokens: int) -> RequestRecord:
    now = [0]
    ledger = Ledger(clock=lambda: now[0])
    with ledger.phase("read.attention"):
        now[0] += 1500 * MS
    tally = DecodeTally(start_ns=1500 * MS)
    tally.window(1500 * MS, 3700 * MS, tokens=tokens - 1)
    return RequestRecord(
        request="r1",
        status="done",
        ledger=ledger.close("done"),
        tokens=Tokens(prompt=9, reused=0, read=8, generated=tokens),
        refill=Refill(policy="blocking", slots=12, bytes=4096, waited_ns=32 * MS),
        decode=tally.record(),
    )


def test_a_line_has_the_first_token_the_first_64_and_the_refill() -> None:
    assert refill_line("blocking", record(64)) == (
        "blocking  first token after  1,500.0 ms, 64 tokens  2,200.0 ms later; "
        "waited  32.0 ms for 12 slots"
    )


def test_a_short_answer_has_no_first_64() -> None:
    assert "64 tokens" not in refill_line("lazy", record(10))


def test_every_policy_has_as_many_turns() -> None:
    assert {ORDER.count(policy) for policy in POLICIES} == {3}
    assert set(POLICIES) == {"blocking", "deferred", "lazy"}
