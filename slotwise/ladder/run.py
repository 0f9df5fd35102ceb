"""Drives a ladder: starts arms, takes samples in the planned order, keeps the record up to date.

The record on disk is whole after every sample, whatever ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slotwise.errors import Finding, Interrupted, Refused, SlotwiseError, UsageError
from slotwise.ladder import processes, window
from slotwise.ladder.arms import Arm, check_arms
from slotwise.ladder.clean import clean
from slotwise.ladder.client import Client, NoAnswer
from slotwise.ladder.identity import machine, server_identity
from slotwise.ladder.journal import Journal, state_folder
from slotwise.ladder.pairing import pair
from slotwise.ladder.prompts import Corpus, PromptMaker, Sizer
from slotwise.ladder.proof import judge_arms
from slotwise.ladder.record import Record, new_record
from slotwise.ladder.samples import PATHS, Asking, Target, take, token_counts
from slotwise.ladder.schedule import Block, Step, schedule
from slotwise.ladder.service import Service
from slotwise.ladder.signals import Say, Signals, never_failing

ERRORS_IN_A_ROW = 3
FIELDS = {"llama.cpp": {"cache_prompt": False, "ignore_eos": True}}
"""What a server is asked beside, by its name: not to reuse even the tokens before the salt (the
chat template's), and not to end an answer early."""

LIMITATIONS = (
    "client and server share what this machine has when the server is local",
    "an event of the stream may carry several tokens: token_ms are times of events",
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure."""

    url: str | None
    arms: tuple[Arm, ...]
    sizes: tuple[int, ...]
    samples: int
    starts: int
    seed: int
    endpoint: str
    max_tokens: int
    reuse: bool
    model: str | None
    corpus: Corpus = field(repr=False)
    timeout: float
    trace: Path | None
    service: Service | None
    out: Path
    key: str = field(default="", repr=False)

    @property
    def processes(self) -> bool:
        return any(arm.start for arm in self.arms)

    def blocks(self) -> list[Block]:
        return schedule(
            arms=len(self.arms), sizes=self.sizes, samples=self.samples, seed=self.seed,
            starts=self.starts, processes=self.processes,
        )  # fmt: skip


Progress = Callable[[int, int, str], None]


def run_ladder(plan: Plan, *, progress: Progress, say: Say) -> Record:
    """Takes all samples. Raises Refused when nothing usable was measured, and whatever stopped it
    before; the record is on disk in any case."""
    _check(plan)
    record = new_record(plan.out, plan=_planned(plan), machine=machine(), key=plan.key)
    record.data["limitations"] += LIMITATIONS
    record.save()
    signals = Signals()
    with signals.caught():
        _drive(plan, record, signals, never_failing(progress), never_failing(say))
    if signals.noted and record.data["status"] == "done":
        raise Interrupted("all samples had been taken; the record is whole")
    _refuse_nothing(record)
    return record


def _drive(plan: Plan, record: Record, signals: Signals, progress: Progress, say: Say) -> None:
    """Takes the samples, and completes the record whatever ends that."""
    driver = _Driver(plan, record, signals, progress, say)
    try:
        driver.run()
        record.end("done")
    except (KeyboardInterrupt, SystemExit):
        record.end("interrupted", "by a signal")
        raise
    except BaseException as error:
        record.end("failed", clean_reason(error))
        raise
    finally:
        signals.only_note("the record is being written")
        processes.stop_marked(record.data["run"])
        try:
            record.data["pairing"] = pair(record, traces_of(plan), plan.arms)
        except (OSError, SlotwiseError) as error:
            record.warn(f"no trace was read: {clean_reason(error)}")
            say(f"no trace was read: {error}")
        judge_arms(record.data)
        record.save()


def traces_of(plan: Plan) -> dict[str, list[Path]]:
    """Trace files by arm; those that are not there are left out."""
    out: dict[str, list[Path]] = {}
    for arm in plan.arms:
        path = arm.trace or plan.trace
        if path is not None:
            names = [Path(str(path).replace("{start}", str(k))) for k in range(plan.starts)]
            out[arm.name] = [name for name in dict.fromkeys(names) if name.is_file()]
    return out


class _Driver:
    def __init__(
        self, plan: Plan, record: Record, signals: Signals, progress: Progress, say: Say
    ) -> None:
        self.plan, self.record, self.signals = plan, record, signals
        self.progress, self.say = progress, say
        self.asking = Asking(
            endpoint=plan.endpoint, max_tokens=plan.max_tokens, seed=plan.seed, reuse=plan.reuse
        )
        self.prompts = PromptMaker(plan.corpus, seed=plan.seed)
        self.sizers: dict[str, Sizer] = {}
        self.done = 0
        record.data["arms"] = [_arm_record(arm) for arm in plan.arms]

    def run(self) -> None:
        service = self.plan.service
        if service is None:
            self._all_blocks()
            return
        journal = Journal(state_folder() / f"{service.key}.journal")
        try:
            if journal.unfinished:
                self.say("an earlier window was not finished: production is restored first")
                window.finish(journal, key=self.plan.key, say=self.say)
            window.in_window(
                service, journal, self._all_blocks, run=self.record.data["run"],
                key=self.plan.key, say=self.say, signals=self.signals,
                keep=lambda said: self.record.data.update(service=said),
            )  # fmt: skip
        finally:
            journal.close()

    def _all_blocks(self) -> None:
        for block in self.plan.blocks():
            if block.arm is None:
                self._block(block, self._targets(self.plan.arms, ready_ms=None))
                continue
            with self._running(self.plan.arms[block.arm], block.steps[0].start) as ready_ms:
                target = self._target(self.plan.arms[block.arm], ready_ms=ready_ms)
                self._block(block, {block.arm: target})

    @contextmanager
    def _running(self, arm: Arm, number: int) -> Iterator[float | None]:
        if arm.start is None:
            yield None
            return
        self.say(f"starting arm {arm.name}")
        with window.started(
            arm, arm.start, number, url=self._url(arm), mark=self.record.data["run"],
            key=self.plan.key, signals=self.signals,
        ) as ready_ms:  # fmt: skip
            yield ready_ms

    def _targets(self, arms: Sequence[Arm], *, ready_ms: float | None) -> dict[int, Target]:
        return {i: self._target(arm, ready_ms=ready_ms) for i, arm in enumerate(arms)}

    def _target(self, arm: Arm, *, ready_ms: float | None) -> Target:
        client = Client(self._url(arm), key=self.plan.key, timeout=self.plan.timeout)
        try:
            identity = server_identity(client, ready_ms=ready_ms)
            model = self.plan.model or _first_model(client)
        except NoAnswer as error:
            raise Refused([_no_server(client.url, str(error))]) from error
        usual = FIELDS.get(identity["software"] or "", {})
        fields = {**usual, **({"cache_prompt": True} if usual and self.plan.reuse else {}),
                  **arm.fields}  # fmt: skip
        entry = next(a for a in self.record.data["arms"] if a["name"] == arm.name)
        entry["servers"].append(identity)
        entry["fields"] = _kept_fields(fields)
        sizer = self.sizers.setdefault(client.url, Sizer())
        sizer.tokenize = _tokenizer(client, model)
        return Target(arm=arm, client=client, model=model, fields=fields, sizer=sizer)

    def _url(self, arm: Arm) -> str:
        url = arm.url or self.plan.url
        if url is None:
            raise UsageError(f"arm {arm.name} has no url", next_step="Give --url.")
        return url

    def _block(self, block: Block, targets: dict[int, Target]) -> None:
        errors = 0
        for number, step in enumerate(block.steps):
            target = targets[step.arm]
            sample = self._sample(target, step, first=number == 0 and block.arm is not None)
            errors = errors + 1 if sample["status"] == "error" else 0
            if errors >= ERRORS_IN_A_ROW:
                left = len(block.steps) - number - 1
                self.done += left
                self.record.warn(
                    f"arm {target.arm.name}, start {step.start}: given up after {errors} errors "
                    f"in a row ({sample['why']}); {left} samples were not taken"
                )
                break

    def _sample(self, target: Target, step: Step, *, first: bool) -> dict[str, Any]:
        prompt = self.prompts.make(step.size, round=step.round, sizer=target.sizer)
        if self.plan.reuse:
            self._prime(target, prompt)
        sample, remark = take(
            target, step, prompt, asking=self.asking, record=self.record, first=first
        )
        self.record.save()
        self.done += 1
        self.progress(self.done, self.record.data["plan"]["steps"], _in_words(sample))
        if sample["status"] != "ok":
            self.say(f"sample {sample['index']}: {sample['status']}: {sample['why']} {remark}")
        _refuse_unproven(target.arm, self.record)
        return sample

    def _prime(self, target: Target, prompt: Any) -> None:
        answer = target.client.stream(
            PATHS[self.asking.endpoint],
            self.asking.body(target, prompt, max_tokens=1),
            request_id=f"{self.record.data['run']}-prime",
        )
        tokens = token_counts(answer.blocks)
        self.record.data["probes"].append(
            {
                "began_ns": self.record.since_zero(answer.began_ns),
                "prompt": tokens["prompt"],
                "generated": tokens["generated"],
            }
        )


def _check(plan: Plan) -> None:
    check_arms(list(plan.arms))
    if plan.service is not None and not plan.processes:
        raise UsageError(
            "--service stops production, and no arm starts a server to measure instead",
            next_step="Give arms with [start], or leave --service out.",
        )
    for arm in plan.arms:
        if arm.url is None and plan.url is None:
            raise UsageError(f"arm {arm.name} has no url", next_step="Give --url.")


def _planned(plan: Plan) -> dict[str, Any]:
    corpus = plan.corpus
    return {
        "sizes": list(plan.sizes),
        "samples": plan.samples,
        "starts": plan.starts,
        "seed": plan.seed,
        "endpoint": plan.endpoint,
        "max_tokens": plan.max_tokens,
        "reuse": plan.reuse,
        "text": {
            "name": corpus.name, "sha256": corpus.sha256, "chars": len(corpus.text),
            "licence": corpus.licence,
        },
        "steps": sum(len(block.steps) for block in plan.blocks()),
    }  # fmt: skip


def _arm_record(arm: Arm) -> dict[str, Any]:
    return {
        "name": arm.name,
        "file_sha256": arm.sha256,
        "switched_on_by": arm.switched_on_by,
        "fields": _kept_fields(arm.fields),
        "environment": sorted(arm.start.environment) if arm.start else [],
        "engaged": [engaged.to_dict() for engaged in arm.engaged],
        "servers": [],
    }


def _kept_fields(fields: Any) -> dict[str, Any]:
    return {str(key): clean(value) for key, value in fields.items()}


def _tokenizer(client: Client, model: str) -> Callable[[str], int | None] | None:
    """The server's own count of a text, or None where it has no /tokenize."""

    def count(text: str) -> int | None:
        try:
            status, said = client.post(
                "/tokenize", {"content": text, "prompt": text, "model": model}
            )
        except NoAnswer:
            return None
        if status != 200 or not isinstance(said, dict):
            return None
        tokens = said.get("count", said.get("tokens"))
        if isinstance(tokens, list):
            return len(tokens)
        return tokens if isinstance(tokens, int) else None

    return count if count("one two three") else None


def _first_model(client: Client) -> str:
    status, _, page = client.get("/v1/models")
    models = page.get("data") if status == 200 and isinstance(page, dict) else None
    names = [m.get("id") for m in models or () if isinstance(m, dict)]
    if not names or not isinstance(names[0], str):
        raise SlotwiseError(
            f"{client.url}/v1/models names no model (HTTP {status})",
            next_step="Give --model, or OPENAI_API_KEY if the server wants a key.",
        )
    return names[0]


def _no_server(url: str, reason: str) -> Finding:
    return Finding(
        level="refusal", code="no-server", where=url, found=reason,
        expected="an OpenAI-compatible server", next_step="Start it, or check --url.",
    )  # fmt: skip


def _refuse_unproven(arm: Arm, record: Record) -> None:
    """Stops a run as soon as every size has shown that the server does not have an arm's counter:
    no sample could count."""
    own = [s for s in record.data["samples"] if s["arm"] == arm.name and s["status"] != "error"]
    if len({s["target_tokens"] for s in own}) < len(record.data["plan"]["sizes"]):
        return
    absent = [
        engaged for position, engaged in enumerate(arm.engaged)
        if engaged.source != "trace" and all(s["engaged"][position] is None for s in own)
    ]  # fmt: skip
    if absent:
        raise Refused([
            Finding(
                level="refusal", code="engaged-counter-absent", where=f"arm {arm.name}",
                found=f"the arm's counter {engaged.counter} is absent",
                expected=f"it to say {engaged.expected}",
                next_step="Name a counter that this server has, in [engaged] of the arm's file.",
            )
            for engaged in absent
        ])  # fmt: skip


def _refuse_nothing(record: Record) -> None:
    """Exit code 3 when an arm has not one usable sample."""
    samples = record.data["samples"]
    for arm in record.data["arms"]:
        own = [s for s in samples if s["arm"] == arm["name"]]
        if any(s["status"] == "ok" and not s["cold"] for s in own):
            continue
        reasons = dict.fromkeys(s["why"] for s in own if s["why"])
        raise Refused([Finding(
            level="refusal", code="nothing-measured", where=f"arm {arm['name']}",
            found=f"no usable sample of {len(own)}: {'; '.join(reasons) or 'none was warm'}",
            expected="at least one", next_step=f"The samples are in {record.path}.",
        )])  # fmt: skip


def clean_reason(error: BaseException) -> str:
    """The kind of an error; its text may hold paths."""
    return type(error).__name__


def _in_words(sample: dict[str, Any]) -> str:
    ms = sample["edges_ms"]["first_token"]
    said = f"first token {ms:,.1f} ms" if ms is not None else sample["why"]
    return f"{sample['arm']}, {sample['target_tokens']:,} tokens: {said}"
