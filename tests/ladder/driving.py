"""Plans for tests: a ladder of small sizes against the small server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slotwise.ladder.arms import Arm, Engaged
from slotwise.ladder.prompts import standard_corpus
from slotwise.ladder.run import Plan, run_ladder

CORPUS = standard_corpus()
LEVER = Engaged(counter="response:slotwise.lever", equals="on")
NO_LEVER = Engaged(counter="response:slotwise.lever", equals="off")


def plan(out: Path, **changes: Any) -> Plan:
    usual = {
        "url": None, "arms": (Arm(name="server"),), "sizes": (60, 120), "samples": 2, "starts": 1,
        "seed": 3, "endpoint": "chat", "max_tokens": 3, "reuse": False, "model": None,
        "corpus": CORPUS, "timeout": 20.0, "trace": None, "service": None, "out": out,
    }  # fmt: skip
    return Plan(**{**usual, **changes})


def run(out: Path, **changes: Any) -> dict[str, Any]:
    """The record on disk; what it raises goes through."""
    run_ladder(plan(out, **changes), progress=lambda *_: None, say=lambda _: None)
    return json.loads(out.read_text())


def with_mode(mode: str) -> tuple[Arm, ...]:
    return (Arm(name="server", fields={"mode": mode}),)


def a_b() -> tuple[Arm, ...]:
    return (
        Arm(name="off", engaged=(NO_LEVER,)),
        Arm(name="on", fields={"lever": "on"}, engaged=(LEVER,)),
    )
