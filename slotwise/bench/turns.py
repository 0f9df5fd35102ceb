"""One turn: a process of its own, cold, in a memory group or with everything in memory, that reads
one prompt and decodes. And the order of the turns."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Literal

from slotwise.bench.cgroup import MemoryGroup, memory_group
from slotwise.bench.child import Child, WorkerEnded, crowding
from slotwise.bench.cold import drop
from slotwise.bench.peers import Peer
from slotwise.bench.stats import alternating
from slotwise.bench.workers.protocol import Answer

OURS, PEER = "slotwise", "llama.cpp"
Arm = Literal["slotwise", "llama.cpp"]
WARM_TOKENS = 64
"""Read before the clock starts where everything is in memory."""
CONTEXT_STEP = 256
MOST_CROWDING = 0.15
"""A turn in which a computing thread waited longer for a core says more of others than of us."""
MOST_TRIES = 3


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be measured. `limits` in bytes; None: everything in memory."""

    model: Path
    files: tuple[Path, ...]
    """What the engines read: emptied from the page cache before a turn in a group."""
    limits: tuple[int | None, ...]
    prompts: tuple[int, ...]
    decode: int
    decode_after: int
    """The prompt size after which `decode` tokens are decoded."""
    decode_seconds: float
    pairs: int
    threads: int
    io_lanes: int
    peer: Peer | None
    grouped: bool
    """Whether control groups can be made; without, a limit is our budget and the peer is left
    out."""
    lock: Path | None = None
    minutes: float | None = None
    """No new round begins after so long."""

    @property
    def context(self) -> int:
        return -(-(max(self.prompts) + self.decode + 1) // CONTEXT_STEP) * CONTEXT_STEP

    def arms(self, limit: int | None) -> tuple[Arm, ...]:
        if self.peer is None or (limit is not None and not self.grouped):
            return ("slotwise",)
        return ("slotwise", "llama.cpp")

    def turns(self) -> Iterator[Turn]:
        """Round by round; within one prompt and limit the arms take turns, A B, then B A."""
        for number in range(self.pairs):
            for limit in self.limits:
                for prompt in self.prompts:
                    arms = self.arms(limit)
                    for arm in alternating(2, arms)[len(arms) * (number % 2) :][: len(arms)]:
                        yield Turn(arm=arm, limit=limit, prompt=prompt, number=number)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """`number` counts the rounds: turns of the same number, limit and prompt are a pair."""

    arm: str
    limit: int | None
    prompt: int
    number: int

    def __str__(self) -> str:
        where = "all in memory" if self.limit is None else f"{self.limit / 2**20:,.0f} MiB"
        return f"{self.arm}, {where}, {self.prompt:,} tokens"


@dataclass(kw_only=True)
class Runner:
    """Does turns. `follow` is what our engine answered, by prompt size: the peer is fed it."""

    plan: Plan
    tokens: Callable[[int], Sequence[int]]
    scratch: Path
    """A folder for routing traces."""
    follow: dict[int, list[int]] = field(default_factory=dict)
    routings: dict[int, Path] = field(default_factory=dict)
    workers: dict[str, Any] = field(default_factory=dict)
    """What each kind of worker says of itself."""

    def run(self, turn: Turn) -> list[dict[str, Any]]:
        """The samples of one turn: the last one counts. A turn is taken again where others kept our
        threads from the cores, a few times at most; then the least crowded one counts."""
        tries: list[dict[str, Any]] = []
        while len(tries) < MOST_TRIES and (not tries or _crowded(tries[-1])):
            tries.append(self._once(turn))
        tries.sort(key=lambda sample: sample.get("crowding", 0.0), reverse=True)
        for sample in tries[:-1]:
            sample["set_aside"] = f"others had the cores for {sample['crowding']:.0%} of the time"
        return tries

    def _once(self, turn: Turn) -> dict[str, Any]:
        """The sample of one turn. A worker that ends early makes a sample with its `failed`."""
        sample: dict[str, Any] = {
            "arm": turn.arm, "limit_bytes": turn.limit, "prompt_tokens": turn.prompt,
            "round": turn.number,
        }  # fmt: skip
        with ExitStack() as stack:
            stack.enter_context(locked(self.plan.lock))
            group = None
            if turn.limit is not None:
                cold = drop(self.plan.files)
                sample["cold"] = {"how": cold.how, "cached_bytes": cold.cached_bytes}
                if self.plan.grouped:
                    group = stack.enter_context(memory_group(turn.limit))
            begin = perf_counter_ns()
            try:
                with self._child(turn, group) as child:
                    sample["load_ns"] = perf_counter_ns() - begin
                    sample |= self._measure(turn, child)
            except WorkerEnded as error:
                sample["failed"] = str(error)
            if group:
                sample["group"] = {
                    "version": group.files.version,
                    "peak_bytes": group.peak(),
                    "oom_kills": group.oom_kills(),
                }
        return sample

    def _child(self, turn: Turn, group: MemoryGroup | None) -> Child:
        plan = self.plan
        common = ("--threads", str(plan.threads), "--context", str(plan.context))
        if turn.arm == PEER and plan.peer:
            return Child(plan.peer.worker, *plan.peer.arguments, str(plan.model), *common,
                         python=plan.peer.python, group=group)  # fmt: skip
        memory = "all" if turn.limit is None else "auto" if group else str(turn.limit)
        arguments = (*common, "--memory", memory, "--io-lanes", str(plan.io_lanes))
        return Child("engine", str(plan.model), *arguments, group=group)

    def _measure(self, turn: Turn, child: Child) -> dict[str, Any]:
        decode = self.plan.decode if turn.prompt == self.plan.decode_after else 0
        where = "all" if turn.limit is None else str(turn.limit)
        self.workers[f"{turn.arm} {where}"] = child.ready
        if turn.limit is None:
            warm = self.tokens(WARM_TOKENS)
            self._ask(turn, child, warm, 0)
        tokens = self.tokens(turn.prompt)
        before, begin = child.schedule(), perf_counter_ns()
        answer = self._ask(turn, child, tokens, decode)
        crowded = crowding(before, child.schedule(), perf_counter_ns() - begin)
        memory = child.memory()
        if turn.arm == OURS:
            self._learn(turn, child, tokens, decode, answer)
        return {
            "first_ns": answer["first_ns"],
            "decode_ns": answer["decode_ns"],
            "decode_tokens": answer["decode_tokens"],
            "read_bytes": answer["read_bytes"],
            "decode_bytes": answer["decode_bytes"],
            "read_cpu_ns": answer["read_cpu_ns"],
            "decode_cpu_ns": answer["decode_cpu_ns"],
            "crowding": crowded,
            "memory": memory,
            "expert_slots": child.ready.get("expert_slots"),
            "budget_bytes": child.ready.get("budget_bytes"),
            "tokens_match": _match(answer.get("tokens"), self.follow.get(turn.prompt)),
            "record": answer.get("record"),
        }

    def _ask(self, turn: Turn, child: Child, tokens: Sequence[int], decode: int) -> Answer:
        seconds = self.plan.decode_seconds
        if turn.arm == OURS:
            return child.ask("request", tokens=tokens, max_tokens=decode + 1, seconds=seconds)
        follow = self.follow.get(turn.prompt, [])[:decode]
        follow += tokens[: decode - len(follow)]  # our own answer may have been cut short
        return child.ask("request", tokens=tokens, follow=follow, seconds=seconds)

    def _learn(
        self, turn: Turn, child: Child, tokens: Sequence[int], decode: int, answer: Answer
    ) -> None:
        """Our answer and our routing, once for each prompt size."""
        longer = len(answer["tokens"]) > len(self.follow.get(turn.prompt, []))
        if longer:
            self.follow[turn.prompt] = answer["tokens"]
        if turn.prompt not in self.routings and child.ready["expert_slots"]:
            path = self.scratch / f"routing-{turn.prompt}.jsonl"
            child.ask("routing", tokens=tokens, max_tokens=decode + 1, path=str(path))
            self.routings[turn.prompt] = path


def _crowded(sample: Mapping[str, Any]) -> bool:
    return sample.get("crowding", 0.0) > MOST_CROWDING


def _match(found: Sequence[int] | None, known: Sequence[int] | None) -> bool | None:
    """Whether both begin with the same tokens; None where there is nothing to compare."""
    if found is None or known is None:
        return None
    n = min(len(found), len(known))
    return list(found[:n]) == list(known[:n])


@contextmanager
def locked(path: Path | None) -> Iterator[None]:
    """While the file is locked nobody else who asks for it measures."""
    if path is None:
        yield
        return
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
