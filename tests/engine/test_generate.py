"""One request end to end: its answer, its books, and every way it can end early."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from engine.rig import (
    CHUNK,
    GREEDY,
    OTHER,
    PROMPT,
    Small,
    check_idle,
    faulty_engine,
    generate,
    open_engine,
    record_of,
    window_logits,
)
from reference.tiny import random_tokens

from slotwise.engine.engine import Engine
from slotwise.engine.prompt import Cancelled
from slotwise.errors import Refused, SlotwiseError, UsageError

N = 4


@pytest.fixture(scope="module")
def model(small: Callable[[str], Small]) -> Small:
    return small("gpt-oss")


@pytest.fixture(scope="module")
def opened(model: Small) -> Iterator[Engine]:
    with open_engine(model, slots=12) as engine:
        yield engine


@pytest.fixture
def engine(opened: Engine) -> Engine:
    """With few expert slots and nothing in its state; what is resident is left to chance."""
    opened.loaded.state.reuse([-1])
    return opened


@pytest.fixture(scope="module")
def answer(model: Small) -> list[int]:
    """To PROMPT, by an engine that has everything and does nothing else."""
    with open_engine(model) as engine:
        return generate(engine, n=N)


def check_serves(engine: Engine, answer: list[int]) -> None:
    """Nothing is left of what came before: the next request is answered as always."""
    check_idle(engine)
    assert generate(engine, n=N) == answer
    assert record_of(engine).status == "done"
    check_idle(engine)


# -- the books


@pytest.mark.parametrize("kind", ["gpt-oss", "qwen3moe-mixed", "llama"])
@pytest.mark.parametrize("refill", ["deferred", "blocking", "lazy"])
def test_the_ledger_of_prompts_of_every_size(
    kind: str, refill: str, small: Callable[[str], Small]
) -> None:
    with open_engine(small(kind), refill=refill, slots=12) as engine:
        for size in (1, 2, CHUNK, CHUNK + 1, 2 * CHUNK + 1):
            assert len(generate(engine, random_tokens(size, seed=size), 3)) == 3
            record = record_of(engine)
            assert (record.tokens.prompt, record.tokens.reused) == (size, 0)
            assert record.tokens.generated == 3
            assert record.decode is not None
            assert (record.decode.windows, record.decode.tokens) == (2, 2)
            phases = record.ledger.phases
            chunks = -(-(size - 1) // CHUNK)
            layers = engine.loaded.blueprint.architecture.hyper.n_layers
            assert record.ledger.phases["first_window"].calls == 1
            assert (phases["read.embed"].calls >= chunks) if chunks else "read.embed" not in phases
            if chunks:
                assert phases["read.attention"].calls == chunks * layers
            check_idle(engine)


def test_what_happens_before_the_tokens_is_in_the_same_ledger(engine: Engine) -> None:
    name, ledger = engine.new_ledger()
    with ledger.phase("tokenize"):
        pass
    list(engine.generate(PROMPT, sampling=GREEDY, max_tokens=1, opened=(name, ledger)))
    record = record_of(engine)
    assert record.request == name
    assert list(record.ledger.phases)[:2] == ["tokenize", "lookup"]
    assert list(record.ledger.phases)[-1] == "other"


@pytest.mark.parametrize("refill", ["deferred", "lazy"])
def test_no_refill_before_the_first_token(model: Small, refill: str) -> None:
    with open_engine(model, refill=refill, slots=24) as engine:
        generate(engine)
        record = record_of(engine)
        assert record.loan is not None
        assert "refill" not in record.ledger.phases
        assert record.refill is not None
        assert record.refill.waited_ns == 0
        assert record.refill.policy == refill


def test_a_blocking_refill_is_waited_for_and_named(model: Small) -> None:
    with open_engine(model, refill="blocking", slots=24) as engine:
        steps = engine.generate(PROMPT, sampling=GREEDY, max_tokens=2)
        next(steps)
        experts = engine.loaded.experts
        assert experts is not None
        assert experts.pool.counts(0).free == 0, "the first token came before the refill had ended"
        list(steps)
        record = record_of(engine)
        assert record.ledger.phases["refill"].calls == 1
        assert record.refill is not None
        assert record.refill.slots > 0
        assert 0 < record.refill.waited_ns <= record.ledger.ns("refill")


def test_a_deferred_refill_fills_the_slots_while_it_decodes(model: Small) -> None:
    with open_engine(model, refill="deferred", chunk=100, slots=48) as engine:
        steps = engine.generate(random_tokens(100), sampling=GREEDY, max_tokens=3)
        next(steps)
        experts = engine.loaded.experts
        assert experts is not None
        assert experts.pool.counts(0).free > 0, "nothing was lent, or a refill came too early"
        next(steps)
        with experts._lanes.lock:
            while experts._refill.active:
                experts._lanes.wait()
        assert experts.pool.counts(0).free == 0
        list(steps)
        refill = record_of(engine).refill
        assert refill is not None
        assert refill.slots > 0
        assert refill.bytes > 0


def test_a_lazy_refill_does_nothing(model: Small) -> None:
    with open_engine(model, refill="lazy", slots=24) as engine:
        generate(engine, n=1)
        record = record_of(engine)
        assert record.refill is not None
        assert (record.refill.slots, record.refill.bytes) == (0, 0)
        assert record.refill_experts.bytes == 0


def test_reads_from_the_store_are_counted_once(model: Small) -> None:
    with open_engine(model, slots=1, refill="lazy") as engine:
        generate(engine)
        record = record_of(engine)
        read, decode = record.prefill_experts, record.decode_experts
        slot_bytes = model.layout.classes[0].slot_bytes
        for counts in (read, decode):
            assert counts.misses
            assert counts.bytes is not None
            assert counts.bytes >= counts.misses * slot_bytes // 2
        assert record.ledger.phases["read.expert_wait"].bytes == read.bytes
        assert record.loan is not None
        assert record.ledger.phases["lend"].slots == record.loan.slots > 0
        chosen = model.layout.n_used * model.layout.n_moe_layers
        assert decode.hits is not None
        assert decode.misses is not None
        assert decode.hits + decode.misses == chosen * 4  # the first window and 3 more
        assert record.lanes


def test_a_record_of_the_settings(engine: Engine) -> None:
    generate(engine, n=1)
    s = record_of(engine).settings
    assert (s.threads, s.context_tokens, s.chunk_tokens, s.kv_type) == (1, 256, CHUNK, "f32")
    assert (s.refill, s.policy, s.io_lanes) == ("deferred", "two-rate", 4)
    assert s.expert_slots == sum(engine.loaded.plan.slots)


def test_a_dense_model_has_no_experts_in_its_books(small: Callable[[str], Small]) -> None:
    with open_engine(small("llama")) as engine:
        generate(engine)
        record = record_of(engine)
        assert (record.loan, record.refill, record.settings.expert_slots) == (None, None, None)
        assert record.ledger.ns("read.ffn") > 0


# -- a conversation


def test_a_follow_up_reads_only_what_is_new(engine: Engine, model: Small) -> None:
    said = generate(engine, PROMPT, N)
    follow_up = [*PROMPT, *said, *OTHER]
    tokens, logits = window_logits(engine, follow_up)
    counts = record_of(engine).tokens
    # The last token of the answer was given, but never read.
    assert counts.reused == len(PROMPT) + N - 1
    assert counts.read == len(follow_up) - counts.reused - 1
    with open_engine(model) as fresh:
        expected_tokens, expected = window_logits(fresh, follow_up)
        assert record_of(fresh).tokens.reused == 0
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
    assert tokens == expected_tokens


def test_the_same_prompt_again_reads_its_last_token_only(engine: Engine, answer: list[int]) -> None:
    generate(engine, n=N)
    assert generate(engine, n=N) == answer
    record = record_of(engine)
    assert (record.tokens.reused, record.tokens.read) == (len(PROMPT) - 1, 0)
    assert record.loan is None
    assert record.refill is None
    assert "lend" not in record.ledger.phases


def test_what_differs_is_read_again(engine: Engine, model: Small) -> None:
    generate(engine, n=N)
    changed = [*PROMPT[:9], (PROMPT[9] + 1) % 300, *PROMPT[10:]]
    tokens, logits = window_logits(engine, changed)
    assert record_of(engine).tokens.reused == 9
    with open_engine(model) as fresh:
        expected_tokens, expected = window_logits(fresh, changed)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
    assert tokens == expected_tokens


def test_a_shorter_prompt_forgets_the_rest(engine: Engine, answer: list[int]) -> None:
    generate(engine, [*PROMPT, *OTHER], 3)
    assert generate(engine, n=N) == answer
    assert record_of(engine).tokens.reused == len(PROMPT) - 1


def test_reading_for_other_purposes_starts_from_nothing(engine: Engine, answer: list[int]) -> None:
    generate(engine, n=N)
    engine.read_only(PROMPT)
    assert engine.loaded.state.tokens == PROMPT
    engine.logits(OTHER, one_by_one=True)
    assert generate(engine, n=N) == answer
    assert record_of(engine).tokens.reused == 0


# -- where an answer ends


def test_one_token(engine: Engine, answer: list[int]) -> None:
    steps = list(engine.generate(PROMPT, sampling=GREEDY, max_tokens=1))
    assert [(s.token, s.first) for s in steps] == [(answer[0], True)]
    record = record_of(engine)
    assert (record.decode, record.tokens.generated, record.status) == (None, 1, "done")


def test_only_the_first_step_is_the_first(engine: Engine) -> None:
    steps = list(engine.generate(PROMPT, sampling=GREEDY, max_tokens=3))
    assert [s.first for s in steps] == [True, False, False]


def test_a_stop_token_ends_the_answer_and_is_not_given(engine: Engine, answer: list[int]) -> None:
    place = next(i for i, token in enumerate(answer) if token not in answer[:i] and i)
    assert generate(engine, n=N, stop=frozenset([answer[place]])) == answer[:place]
    record = record_of(engine)
    assert (record.status, record.tokens.generated) == ("done", place)
    check_serves(engine, answer)


def test_a_stop_token_at_once(engine: Engine, answer: list[int]) -> None:
    assert generate(engine, n=N, stop=frozenset([answer[0]])) == []
    record = record_of(engine)
    assert (record.status, record.ledger.status) == ("done", "done")
    assert record.tokens.generated == 0
    assert "emit" not in record.ledger.phases
    check_serves(engine, answer)


def test_a_full_context_ends_the_answer(model: Small) -> None:
    with open_engine(model, context=20, slots=12) as engine:
        for size, expected in ((19, 1), (17, 3), (1, 19)):
            assert len(generate(engine, random_tokens(size, seed=9), 100)) == expected
            assert record_of(engine).status == "done"
        with pytest.raises(UsageError, match="context holds 20"):
            generate(engine, random_tokens(20, seed=9), 1)
        assert record_of(engine).status == "failed"
        check_idle(engine)


def test_a_context_that_outgrows_its_graphs(model: Small) -> None:
    """Attention looks at 256 positions, then at 512: the answer goes on the same way."""
    prompt = random_tokens(251, seed=4)
    with open_engine(model, context=300, chunk=64) as engine:
        tokens = generate(engine, prompt, 12)
        again, logits = window_logits(engine, [*prompt, *tokens[:-1]], 1)
        expected = engine.logits([*prompt, *tokens[:-1]])[-1]
    assert again == tokens[-1:]
    np.testing.assert_allclose(logits[0], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 3, "empty"),
        (PROMPT, 0, "max_tokens is 0"),
        ([1, 300, 2], 3, "token id 300"),
        ([1, -1, 2], 3, "token id -1"),
        ([5] * 256, 3, "256 tokens"),
    ],
)
def test_a_request_that_makes_no_sense(
    engine: Engine, answer: list[int], prompt: list[int], max_tokens: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        engine.generate(prompt, max_tokens=max_tokens)
    record = record_of(engine)
    assert (record.status, record.ledger.status) == ("failed", "failed")
    check_serves(engine, answer)


# -- ended from outside


class SetAfter(threading.Event):
    """An event that is set from the n-th question on."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.left = n

    def is_set(self) -> bool:
        self.left -= 1
        if self.left < 0:
            self.set()
        return super().is_set()


def test_cancelled_at_every_moment(
    engine: Engine, answer: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question whether to go on is one moment: before every layer of the read and before
    every window. Waits ask too, but how many there are is chance: they are left out here."""
    assert engine.loaded.experts is not None
    monkeypatch.setattr(engine.loaded.experts, "watch", lambda check: None)
    seen: set[tuple[int, int]] = set()
    for n in range(100):
        engine.loaded.state.reuse([-1])
        cancel = SetAfter(n)
        try:
            assert generate(engine, n=N, cancel=cancel) == answer
        except Cancelled:
            record = record_of(engine)
            assert record.status == "cancelled"
            seen.add((record.tokens.read, record.tokens.generated))
            assert record.ledger.status == ("done" if record.tokens.generated else "cancelled")
            assert len(engine.loaded.state.tokens) >= record.tokens.read
            check_idle(engine)
        else:
            break
    read = len(PROMPT) - 1
    assert seen == {(0, 0), (CHUNK, 0), (read, 0), *((read, 1 + i) for i in range(N - 1))}
    check_serves(engine, answer)


def test_what_was_read_before_a_cancel_is_not_read_again(engine: Engine, answer: list[int]) -> None:
    layers = engine.loaded.blueprint.architecture.hyper.n_layers
    with pytest.raises(Cancelled):
        generate(engine, cancel=SetAfter(layers + 1))
    assert record_of(engine).tokens.read == CHUNK
    assert generate(engine, n=N) == answer
    assert record_of(engine).tokens.reused == CHUNK


def test_cancelled_by_another_thread_while_an_expert_is_awaited(
    model: Small, answer: list[int]
) -> None:
    with faulty_engine(model, slots=1) as (engine, store):
        engine.read_only(OTHER)
        store.held = all_experts(model)
        cancel = threading.Event()

        def stop() -> None:
            store.waiting.acquire()
            cancel.set()
            store.release()

        thread = threading.Thread(target=stop)
        thread.start()
        with pytest.raises(Cancelled):
            generate(engine, cancel=cancel)
        thread.join()
        assert record_of(engine).status == "cancelled"
        check_serves(engine, answer)


def all_experts(model: Small) -> set[tuple[int, int]]:
    layout = model.layout
    return {(i, e) for i in range(layout.n_moe_layers) for e in range(layout.n_experts)}


@pytest.mark.parametrize("after", [1, 2, 3])
def test_an_answer_that_nobody_reads_to_its_end(
    engine: Engine, answer: list[int], after: int
) -> None:
    steps = engine.generate(PROMPT, sampling=GREEDY, max_tokens=N)
    for _ in range(after):
        next(steps)
    steps.close()  # type: ignore[attr-defined]
    record = record_of(engine)
    assert (record.status, record.tokens.generated) == ("cancelled", after)
    check_serves(engine, answer)


def test_an_answer_that_nobody_begins_to_read(engine: Engine, answer: list[int]) -> None:
    engine.generate(PROMPT, sampling=GREEDY, max_tokens=N).close()  # type: ignore[attr-defined]
    check_serves(engine, answer)


def test_one_request_at_a_time(engine: Engine, answer: list[int]) -> None:
    """Two would write into the same state, and every later answer might be wrong."""
    steps = engine.generate(PROMPT, sampling=GREEDY, max_tokens=N)
    tokens = [next(steps).token, next(steps).token]
    with pytest.raises(UsageError, match="has not ended"):
        generate(engine, OTHER)
    assert record_of(engine).status == "failed"
    tokens += [step.token for step in steps]
    assert tokens == answer
    check_serves(engine, answer)


def test_a_loan_that_cannot_be_had(engine: Engine, answer: list[int]) -> None:
    generate(engine, OTHER)
    assert record_of(engine).loan is not None
    with (
        patch.object(engine.loaded.experts, "lend", side_effect=SlotwiseError("no")),
        pytest.raises(SlotwiseError, match="no"),
    ):
        generate(engine)
    record = record_of(engine)
    assert (record.status, record.loan, record.tokens.read) == ("failed", None, 0)
    check_serves(engine, answer)


@pytest.mark.parametrize("after", [1, 2])
def test_an_error_of_the_reader(engine: Engine, answer: list[int], after: int) -> None:
    steps: Any = engine.generate(PROMPT, sampling=GREEDY, max_tokens=N)
    for _ in range(after):
        next(steps)
    with pytest.raises(ZeroDivisionError):
        steps.throw(ZeroDivisionError())
    assert record_of(engine).status == "failed"
    check_serves(engine, answer)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_exception_at_any_graph(
    engine: Engine, answer: list[int], error: type[BaseException]
) -> None:
    """Ctrl-C comes where it likes; so may a defect."""
    backend, compute = engine.loaded.backend, engine.loaded.backend.compute
    for n in range(0, 200, 7):
        engine.loaded.state.reuse([-1])
        left = iter(range(n))

        def failing(graph: Any, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise error
            compute(graph)

        with patch.object(backend, "compute", failing):
            try:
                generate(engine, n=N)
                break
            except error:
                record = record_of(engine)
        assert record.status == ("cancelled" if error is KeyboardInterrupt else "failed")
        check_idle(engine)
    else:
        pytest.fail("the request never got through: 200 graphs were not enough")
    check_serves(engine, answer)


# -- opening and closing


def io_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("io-lane")]


def test_closing_ends_the_lanes_and_the_files(model: Small) -> None:
    before = io_threads()
    engine = open_engine(model, io_lanes=3)
    assert len(io_threads()) == len(before) + 3
    steps = engine.generate(PROMPT, sampling=GREEDY, max_tokens=N)
    next(steps)
    next(steps)  # a refill is under way
    engine.close()
    engine.close()
    assert io_threads() == before


def test_an_engine_that_cannot_be_opened_leaves_nothing_open(model: Small, tmp_path: Any) -> None:
    before = io_threads()
    with pytest.raises(SlotwiseError, match="trace cannot be created"):
        open_engine(model, trace=tmp_path / "no" / "folder.jsonl")
    (tmp_path / "p.json").write_text("?")
    with pytest.raises(Refused, match="not JSON"):
        open_engine(model, profile=tmp_path / "p.json")
    assert io_threads() == before
