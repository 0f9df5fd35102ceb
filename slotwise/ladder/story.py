"""`slotwise ladder demo`: the refill before the first token, on our own server from end to end.

Production (the server as anybody runs it) is stopped, three arms take turns, production is restored
and checked. The report and a findings record that cites it are written. Everything goes through the
command line and files, as a user's own ladder would.
"""

from __future__ import annotations

import hashlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from slotwise import __version__
from slotwise.errors import Interrupted, SlotwiseError
from slotwise.findings.citations import head_of
from slotwise.findings.schema import FINDINGS_SCHEMA
from slotwise.ladder import processes
from slotwise.ladder.client import Client
from slotwise.ladder.identity import answers
from slotwise.ladder.signals import Signals

PROGRAM = [sys.executable, "-c", "from slotwise.cli import entry; entry()"]
RECORD = "response:slotwise.record."
ARMS: dict[str, tuple[list[str], dict[str, str]]] = {
    "blocking": (["--refill", "blocking", "--conversations", "off"],
                 {"settings.refill": 'is = "blocking"',
                  "refill.waited_ns": "above = 0\nevery_sample = false"}),
    "deferred": (["--refill", "deferred", "--conversations", "off"],
                 {"settings.refill": 'is = "deferred"',
                  "refill.slots": "above = 0\nevery_sample = false"}),
    "shadow": (["--refill", "blocking", "--conversations", "shadow"],
               {"conversation.engaged": "above = 0",
                "conversation.idle_checkpoint_tokens": "above = 0\nevery_sample = false"}),
}  # fmt: skip
"""Options of the server, and the counters of an answer that prove them: a setting, and what it did.
A refill has nothing to do where reads have filled all slots before, so it must act once."""
READY_SECONDS = 300.0
PRODUCTION_LOG = "production.log"
EVIDENCE = "report"


def tell(
    model: Path, folder: Path, *, memory: str, threads: int | None, sizes: str, samples: int
) -> int:
    """Runs the whole story in `folder`; the exit code of the findings' check."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    serve = [*PROGRAM, "serve", str(model.resolve()), "--memory", memory]
    serve += ["--threads", str(threads)] if threads else []
    ports = _free_ports(2)
    _write_files(folder, serve, ports)
    signals = Signals()
    command, url = [*serve, "--port", str(ports[0])], f"http://127.0.0.1:{ports[0]}"
    with signals.caught(), _production(command, url, folder, signals):
        _ladder(folder, sizes, samples, signals)
        said = _call("ladder", "report", str(folder / "run.json"), "--json")
        (folder / "report.json").write_text(said)
        _call("ladder", "report", str(folder / "run.json"), "--html",
              str(folder / "report.html"), "--force")  # fmt: skip
    if signals.noted:
        raise Interrupted("everything is ended")
    record = findings(json.loads(said), (folder / "report.json").read_bytes())
    (folder / "findings.json").write_text(json.dumps(record, indent=1) + "\n")
    click.echo(f"\nFindings, checked ({folder.name}/findings.json):")
    return subprocess.run(
        [*PROGRAM, "findings", "check", str(folder / "findings.json")], check=False
    ).returncode


def findings(report: Mapping[str, Any], evidence: bytes) -> dict[str, Any]:
    """What the report shows, as a findings record whose numbers point into it."""
    claims = [*_refill_claims(report), *map(_share_claim, _by_arms(report))]
    failed = sum(n for arm in report["arms"] for s, n in arm["statuses"].items() if s != "ok")
    return {
        "schema": FINDINGS_SCHEMA,
        "title": "The refill of lent expert slots, on and off the path to the first token",
        "subject": _subject(),
        "status": "measured",
        "claims": claims,
        "evidence": [{"id": EVIDENCE, "path": "report.json", "kind": "other",
                      "sha256": hashlib.sha256(evidence).hexdigest()}],
        "limitations": [
            "One machine, one model made for demonstration, one run of each arm's two starts.",
            "Client and server share the machine.",
        ],
        "observations": [{
            "statement": f"Run {report['run']} is {report['status']}; production was restored: "
                         f"{report['service']['restored']}.",
            "evidence": [EVIDENCE], "warnings": list(report["warnings"]),
            "n": sum(sum(arm["statuses"].values()) for arm in report["arms"]),
            "method": f"slotwise ladder with arms in turns; {failed} samples were not usable",
        }],
        "invocation": "slotwise ladder demo",
        "tool": {"name": "slotwise", "version": __version__},
    }  # fmt: skip


def _subject() -> dict[str, Any]:
    """The revision of the checkout that was measured, or why there is none."""
    root = Path(__file__).parents[2]
    if (root / ".git").exists():
        _, revision = head_of(root)
        return {"repository": "slotwise", "revision": revision}
    return {
        "repository": "slotwise", "revision": None,
        "missing": {"revision": f"slotwise {__version__} as it is installed, not a checkout"},
    }  # fmt: skip


def _refill_claims(report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for index, arm in enumerate(report["arms"]):
        if arm["name"] == "blocking" and arm["refill"]:
            term = f"/arms/{index}/refill/rate/terms/0/value"
            number = _number(report, term, "ms", digits=3)
            yield _claim(
                "refill-per-slot",
                f"Waited for, the refill takes {number['value']} ms per expert slot.",
                [number],
                "Another time per slot on this machine with this model.",
            )


def _by_arms(report: Mapping[str, Any]) -> list[list[tuple[int, Mapping[str, Any]]]]:
    arms: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
    for index, share in enumerate(report["shares"]):
        arms.setdefault(share["names"][1], []).append((index, share))
    return list(arms.values())


def _share_claim_parts(index: int) -> dict[str, str]:
    return {
        "first token": f"/shares/{index}/first_token/estimate/value",
        "refill": f"/shares/{index}/refill/estimate/value",
        "read": f"/shares/{index}/read/estimate/value",
        "lookup and checkpoint": f"/shares/{index}/conversation/estimate/value",
    }


def _share_claim(shares: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[str, Any]:
    first, second = shares[0][1]["names"]
    numbers, texts = [], []
    for index, share in shares:
        said = []
        for name, pointer in _share_claim_parts(index).items():
            value = _at(share, pointer.split("/", 3)[3])
            number = {"value": round(value, 1) + 0.0, "unit": "ms", "how": "measured",
                      "evidence": EVIDENCE, "pointer": pointer}  # fmt: skip
            numbers.append(number)
            said.append(f"{name} {number['value']} ms")
        shown = "" if share["first_token"]["p"] is not None and _moved(share) else ", not shown"
        texts.append(f"{share['label']}: {'; '.join(said)} (first token{shown or ', shown'})")
    return _claim(
        f"{second}-against-{first}",
        f"Change from {first} to {second} in the mean. " + ". ".join(texts) + ".",
        numbers,
        "A run of both arms in which the change of the first token lies outside its interval.",
    )


def _moved(share: Mapping[str, Any]) -> bool:
    estimate = share["first_token"]["estimate"]
    return estimate["low"] is not None and not estimate["low"] <= 0 <= estimate["high"]


def _number(report: Mapping[str, Any], pointer: str, unit: str, *, digits: int) -> dict[str, Any]:
    return {
        "value": round(_at(report, pointer[1:]), digits), "unit": unit, "how": "measured",
        "evidence": EVIDENCE, "pointer": pointer,
    }  # fmt: skip


def _at(tree: Any, path: str) -> float:
    for key in path.split("/"):
        tree = tree[int(key)] if isinstance(tree, list) else tree[key]
    return tree


def _claim(
    name: str, statement: str, numbers: list[dict[str, Any]], refuted_by: str
) -> dict[str, Any]:
    return {
        "id": name, "statement": statement, "status": "measured", "sources": [],
        "evidence": [EVIDENCE], "numbers": numbers, "refuted_by": refuted_by,
    }  # fmt: skip


def _write_files(folder: Path, serve: Sequence[str], ports: Sequence[int]) -> None:
    production = [*serve, "--port", str(ports[0])]
    pid = folder / "production.pid"
    stop = [sys.executable, "-c", STOP, str(pid)]
    start = [sys.executable, "-c", START, str(pid), *production]
    (folder / "window.toml").write_text(
        f"[production]\nurl = 'http://127.0.0.1:{ports[0]}'\n"
        f"stop = {json.dumps(stop)}\nstart = {json.dumps(start)}\nlog = '{PRODUCTION_LOG}'\n"
    )
    for name, (options, engaged) in ARMS.items():
        command = [*serve, "--port", str(ports[1]), *options]
        (folder / f"{name}.toml").write_text(
            f"url = 'http://127.0.0.1:{ports[1]}'\n[start]\ncommand = {json.dumps(command)}\n"
            f"log = '{name}.log'\n"
            + "".join(
                f'[[engaged]]\ncounter = "{RECORD}{counter}"\n{must}\n'
                for counter, must in engaged.items()
            )
        )


def _ladder(folder: Path, sizes: str, samples: int, signals: Signals) -> None:
    arms = [word for name in ARMS for word in ("--arm", f"{name}={folder / name}.toml")]
    call = [
        *PROGRAM, "ladder", "--service", str(folder / "window.toml"), *arms, "--sizes", sizes,
        "--samples", str(samples), "--max-tokens", "16", "--out", str(folder / "run.json"),
        "--force",
    ]  # fmt: skip
    ladder = subprocess.Popen(call, preexec_fn=processes.dies_with_parent(signal.SIGTERM))
    try:
        code = ladder.wait()
    except BaseException:  # subprocess.run would kill it, and production would stay down
        signals.only_note("the ladder is restoring production")
        ladder.terminate()
        ladder.wait()
        raise
    if code:
        raise SlotwiseError(
            f"the ladder ended with exit code {code}", next_step="What it said is above."
        )


def _call(*arguments: str) -> str:
    done = subprocess.run([*PROGRAM, *arguments], stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise SlotwiseError(
            f"slotwise {' '.join(arguments[:2])} ended with exit code {done.returncode}",
            next_step="What it said is above.",
        )
    return done.stdout.decode()


START = """import os, sys; open(sys.argv[1], "w").write(str(os.getpid()))
os.execv(sys.argv[2], sys.argv[2:])"""
STOP = """import os, signal, sys, time
pid = int(open(sys.argv[1]).read()); os.kill(pid, signal.SIGTERM)
def alive():
    try: return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError: return False
while alive(): time.sleep(0.05)"""


@contextmanager
def _production(command: Sequence[str], url: str, folder: Path, signals: Signals) -> Iterator[None]:
    """The server as anybody runs it: there before the window, and again after it."""
    pid = folder / "production.pid"
    with (folder / PRODUCTION_LOG).open("ab") as log:
        first = subprocess.Popen(
            [sys.executable, "-c", START, str(pid), *command], stdin=subprocess.DEVNULL,
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        _wait(url, first)
        yield
    finally:
        signals.only_note("production is being stopped")
        subprocess.run([sys.executable, "-c", STOP, str(pid)], check=False, stderr=subprocess.PIPE)
        first.wait()


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    client, end = Client(url), time.monotonic() + READY_SECONDS
    while answers(client) != 200:
        if process.poll() is not None or time.monotonic() > end:
            raise SlotwiseError(f"the server did not get ready at {url}")
        time.sleep(0.1)
    client.close()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports
