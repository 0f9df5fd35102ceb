"""What `slotwise demo` shows: a model that does not fit, running, and where the time went.

1. SmolLM2 is made into two mixture-of-experts files, and packed.
2. The mirror pair, in less memory than its experts need, gives the dense model's text.
3. The larger one streams its experts; the table says where the time to the first token went.
4. The same prompt with blocking, deferred and lazy refill, in turns in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from slotwise.demo.models import build_mirror_pair, build_streaming, find_smollm2
from slotwise.engine.engine import Engine
from slotwise.engine.loading import Progress
from slotwise.engine.sampling import Sampling
from slotwise.engine.settings import EngineSettings, RefillPolicy
from slotwise.engine.text import Answerer, AnswerOptions
from slotwise.errors import Refused, SlotwiseError
from slotwise.trace.record import FIRST_TOKENS, RequestRecord
from slotwise.trace.report import side_by_side, where_time_went
from slotwise.weights.layout import ExpertLayout, expert_layout
from slotwise.weights.pack import default_pack_path, write_pack
from slotwise.weights.shards import ModelFile, open_model

MIB = 1 << 20
QUESTION = "What is the capital of France?"
PASSAGE = (
    "A lighthouse keeper wrote in his journal every evening. He noted the wind, the height of the "
    "waves and the ships that passed, and he never forgot to write down what he had cooked for "
    "supper. When a ship came close he asked its captain for news, and he wrote that down too: the "
    "price of wheat in the harbour, a wedding, a war that had ended weeks before. In the winter of "
    "the great storm the lamp went out twice, and both times he climbed the stairs in the dark and "
    "lit it again with the last of his matches. His daughter kept the books dry with oiled cloth. "
    "After forty years there were so many journals that they filled the whole of the lower room, "
    "and when the light was given to a machine the keeper carried them home one by one. They lay "
    "in a barn until a teacher found them, read them aloud to her class, and sent them to the "
    "museum of the town. Tell me in some detail what a historian could learn from these journals, "
    "what they cannot tell, and which other sources one would have to look for."
)
POLICIES: tuple[RefillPolicy, ...] = ("blocking", "deferred", "lazy")
ORDER = (*POLICIES, *reversed(POLICIES), *POLICIES)


@dataclass(frozen=True)
class Stage:
    """Where the story is told and what it runs on."""

    folder: Path
    threads: int | None
    write: Callable[[str], None]
    progress: Progress

    def settings(self, megabytes: int) -> EngineSettings:
        return EngineSettings(memory=megabytes * MIB, threads=self.threads, context=1024)

    def say(self, text: str) -> None:
        self.write(text + "\n")


def tell(
    folder: Path,
    *,
    source: Path | None,
    threads: int | None,
    write: Callable[[str], None],
    progress: Progress,
) -> None:
    """Builds what is missing in `folder`, then runs the demonstration."""
    stage = Stage(folder, threads, write, progress)
    folder.mkdir(parents=True, exist_ok=True)
    smollm2 = source or find_smollm2()
    mirror, streaming = _make_models(stage, smollm2)
    _mirror_pair(stage, mirror)
    _streaming(stage, streaming)


def _make_models(stage: Stage, source: Path) -> tuple[Path, Path]:
    stage.say(f"1. {source.name} becomes two mixture-of-experts models in {stage.folder}/")
    mirror, streaming = (stage.folder / f"smollm2-{n}.gguf" for n in ("mirror", "32x4"))
    build_mirror_pair(source, mirror, progress=_named(stage, "mirror pair"))
    build_streaming(source, streaming, progress=_named(stage, "32 experts"))
    for path in (mirror, streaming):
        model = open_model(path)
        layout = expert_layout(model)
        if layout is None:
            raise SlotwiseError(f"{path} has no experts", next_step=f"Delete {path} and run again.")
        _pack(stage, model, layout)
        stage.say(
            f"   {path.name}: {layout.n_moe_layers} layers x {layout.n_experts} experts, "
            f"top-{layout.n_used}, {layout.total_bytes / MIB:,.0f} MiB of experts"
        )
    return mirror, streaming


def _pack(stage: Stage, model: ModelFile, layout: ExpertLayout) -> None:
    """The demo's folder is its own: a pack of an older demo model is written again."""
    folder, progress = default_pack_path(model), _named(stage, "packing")
    try:
        write_pack(model, layout, folder, progress=progress)
    except Refused:
        write_pack(model, layout, folder, progress=progress, force=True)


def _named(stage: Stage, what: str) -> Callable[[int, int], None]:
    return lambda done, total: stage.progress(what, done, total)


def _mirror_pair(stage: Stage, model: Path) -> None:
    megabytes = 512
    stage.say(f"\n2. The mirror pair in {megabytes} MiB; its text is the dense model's\n")
    with Engine.open(model, stage.settings(megabytes), progress=stage.progress) as engine:
        _answer(stage, Answerer(engine), QUESTION, _greedy(40))


def _streaming(stage: Stage, model: Path) -> None:
    megabytes = 900
    stage.say(f"\n3. The 32-expert model in {megabytes} MiB, most of it from disk when needed\n")
    with Engine.open(model, stage.settings(megabytes), progress=stage.progress) as engine:
        answerer = Answerer(engine)
        record = _answer(stage, answerer, PASSAGE, _greedy(FIRST_TOKENS))
        _console().print(where_time_went(record))
        stage.say("\n4. The same prompt with each way to refill, in turns\n")
        _compare_refills(stage, answerer)


def _compare_refills(stage: Stage, answerer: Answerer) -> None:
    experts = answerer.engine.loaded.experts
    if experts is None:
        raise SlotwiseError("the demo's model has no experts")
    records: dict[RefillPolicy, list[RequestRecord]] = {policy: [] for policy in POLICIES}
    for policy in ORDER:
        experts.refill_mode = policy
        answerer.engine.forget()
        for _ in answerer.reply(_user(PASSAGE), _greedy(FIRST_TOKENS)):
            pass
        records[policy].append(_last(answerer))
        stage.say("   " + refill_line(policy, records[policy][-1]))
    medians = {policy: _median(of_policy) for policy, of_policy in records.items()}
    stage.say("\n   of each the request with the median time to the first token:\n")
    for policy, record in medians.items():
        stage.say("   " + refill_line(policy, record))
    pair = (medians["blocking"], medians["deferred"])
    _console().print(side_by_side(*pair, names=("blocking", "deferred")))
    spread = max(_spread(of_policy) for of_policy in records.values()) / 1e6
    stage.say(
        f"   Requests of one policy differed by up to {spread:,.0f} ms: a smaller difference in\n"
        "   the time to the first token is the machine's. What the policy changes is the time\n"
        "   spent waiting for the refill, and what decode then has to fetch."
    )


def refill_line(policy: str, record: RequestRecord) -> str:
    """One request of a policy: its first token, its first 64, and what the policy did."""
    first = (record.time_to_first_token_ns or 0) / 1e6
    line = f"{policy:9} first token after {first:8,.1f} ms"
    if record.decode is not None and record.decode.first_64_tokens_ns is not None:
        line += f", {FIRST_TOKENS} tokens {record.decode.first_64_tokens_ns / 1e6:8,.1f} ms later"
    if record.refill is not None:
        line += f"; waited {record.refill.waited_ns / 1e6:5,.1f} ms for {record.refill.slots} slots"
    return line


def _spread(records: list[RequestRecord]) -> int:
    """Nanoseconds between the slowest and the fastest first token."""
    times = [record.time_to_first_token_ns or 0 for record in records]
    return max(times) - min(times)


def _median(records: list[RequestRecord]) -> RequestRecord:
    ordered = sorted(records, key=lambda record: record.time_to_first_token_ns or 0)
    return ordered[len(ordered) // 2]


def _answer(
    stage: Stage, answerer: Answerer, question: str, options: AnswerOptions
) -> RequestRecord:
    stage.say(f"> {question}\n")
    for piece in answerer.reply(_user(question), options):
        stage.write(piece)
    stage.write("\n\n")
    return _last(answerer)


def _greedy(max_tokens: int) -> AnswerOptions:
    return AnswerOptions(max_tokens=max_tokens, sampling=Sampling(temperature=0))


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _last(answerer: Answerer) -> RequestRecord:
    if answerer.last_record is None:
        raise SlotwiseError("the answer left no record")
    return answerer.last_record


def _console() -> Console:
    return Console(soft_wrap=False)
