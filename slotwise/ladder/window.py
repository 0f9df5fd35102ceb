"""A window of service: production is stopped, arms run, production is restored whatever happens.

Restoration runs after an error, Ctrl-C, a polite kill, the death of an arm and with a full disk;
after a kill of this very process the journal lets a second run finish it. It counts as done only
when production answers with HTTP 200 and is the same software, version and model as before.
"""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from slotwise.errors import Interrupted, NotRestored, SlotwiseError
from slotwise.ladder import processes
from slotwise.ladder.arms import Arm, Start
from slotwise.ladder.client import Client, NoAnswer
from slotwise.ladder.identity import answers, same_server, server_identity
from slotwise.ladder.journal import Journal
from slotwise.ladder.service import Service
from slotwise.ladder.signals import Say, Signals

ATTEMPTS = 3
POLL_SECONDS = 0.1
SETTLE_SECONDS = 1.0
"""Production must still answer after it: a server that is going down also answers."""

Result = TypeVar("Result")
RESTORING = "production is being restored"


@dataclass(kw_only=True)
class Outcome:
    """What a restoration found, as it goes into the record."""

    restored: bool = False
    attempts: int = 0
    http_status: int | None = None
    down_ms: float | None = None
    before: dict[str, Any]
    after: dict[str, Any] | None = None
    problems: list[str] = field(default_factory=list[str])

    def to_dict(self, journal: Journal) -> dict[str, Any]:
        steps = [{"step": s["step"], "at": s["at"]} for s in journal.window]
        return {
            "restored": self.restored, "attempts": self.attempts, "http_status": self.http_status,
            "down_ms": self.down_ms, "before": self.before, "after": self.after, "steps": steps,
        }  # fmt: skip


def in_window(
    service: Service, journal: Journal, body: Callable[[], Result], *, run: str, key: str, say: Say,
    signals: Signals, keep: Callable[[dict[str, Any]], None],
) -> Result:  # fmt: skip
    """Runs `body` while production is stopped. `keep` gets what the record says of it. `signals`
    are being caught already.

    Raises NotRestored when production does not come back, whatever else went wrong.
    """
    client = Client(service.url, key=key, timeout=30.0)
    before = _before(client, service)
    journal.write("begin", run=run, service=service.to_dict(), before=before)
    stopped_at = time.monotonic()
    try:
        try:
            journal.write("stopping")
            say("stopping production")
            processes.run_to_end(service.stop, seconds=service.stop_seconds)
            _wait_until_down(client, service)
            journal.write("stopped")
            result = body()
        finally:
            signals.only_note(RESTORING)
    finally:
        signals.only_note(RESTORING)
        outcome = restore(service, journal, before=before, mark=run, client=client, say=say)
        outcome.down_ms = (time.monotonic() - stopped_at) * 1e3
        keep(outcome.to_dict(journal))
        client.close()
        if not outcome.restored:
            raise _not_restored(service, journal, outcome)
    if signals.noted:
        raise Interrupted("while production was being restored; it is restored")
    return result


def finish(journal: Journal, *, key: str, say: Say) -> Outcome:
    """Restores what an earlier run left stopped. Raises NotRestored."""
    begin = journal.window[0]
    service = Service.from_dict(begin["service"])
    client = Client(service.url, key=key, timeout=30.0)
    signals = Signals()
    with signals.caught():
        signals.only_note(RESTORING)
        outcome = restore(
            service, journal, before=begin["before"], mark=begin["run"], client=client, say=say
        )
        client.close()
    if not outcome.restored:
        raise _not_restored(service, journal, outcome)
    return outcome


def restore(
    service: Service, journal: Journal, *, before: dict[str, Any], mark: str, client: Client,
    say: Say,
) -> Outcome:  # fmt: skip
    """Brings production back; never raises but for defects of ours."""
    outcome = Outcome(before=before)
    steps = {entry["step"] for entry in journal.window}
    if warning := journal.write_if_possible("restoring"):
        say(warning)
    left = processes.stop_marked(mark)
    if left:
        say(f"stopped {left} process(es) of an arm")
    if "stopping" not in steps:
        _verify(client, outcome)
    elif "stopped" not in steps:
        _may_be_up(client, service, outcome)
    while not outcome.restored and outcome.attempts < ATTEMPTS:
        outcome.attempts += 1
        say(f"restoring production (attempt {outcome.attempts} of {ATTEMPTS})")
        if outcome.attempts > 1:  # what came up was not it, or only half of it
            with suppress(SlotwiseError):
                processes.run_to_end(service.stop, seconds=service.stop_seconds)
        _start_production(client, service, outcome)
    step = "restored" if outcome.restored else "not-restored"
    if warning := journal.write_if_possible(step, attempts=outcome.attempts):
        say(warning)
    if outcome.restored:
        say("production is restored: HTTP 200, the same model and version as before")
    return outcome


@contextmanager
def started(
    arm: Arm, start: Start, number: int, *, url: str, mark: str, key: str, signals: Signals
) -> Iterator[float]:
    """A process of an arm, ready to be measured; yields how many ms that took.

    Raises SlotwiseError when something else answers at its address, or when it does not get ready.
    """
    client = Client(url, key=key, timeout=30.0)
    if answers(client) is not None:
        raise SlotwiseError(
            f"arm {arm.name}: something answers at {url} before it was started",
            next_step="Stop it, or give the arm a port of its own.",
        )
    begun = time.monotonic()
    command = [word.replace("{start}", str(number)) for word in start.command]
    environment = {**start.environment, processes.MARK: mark}
    process = processes.launch(command, environment=environment, log=start.log, tied=True)
    try:
        _wait_until_ready(arm, start, process, client)
        yield (time.monotonic() - begun) * 1e3
        if process.poll() is not None:
            raise SlotwiseError(
                f"arm {arm.name} ended while it was measured: "
                f"{processes.ended_with(process.returncode)}"
            )
    finally:
        client.close()
        processes.stop(process, mark=mark, hurry=signals.hurry)


def _before(client: Client, service: Service) -> dict[str, Any]:
    """Who production is. Raises SlotwiseError when it does not answer: nothing to go back to."""
    if answers(client) != 200:
        raise SlotwiseError(
            f"production does not answer with HTTP 200 at {service.url}: nothing was stopped",
            next_step="Start it first; what it is decides whether it was restored.",
        )
    try:
        return server_identity(client)
    except NoAnswer as error:
        raise SlotwiseError(f"production does not say who it is: {error}") from error


def _verify(client: Client, outcome: Outcome) -> None:
    """Whether production is there, still there a moment later, and what it was."""
    outcome.http_status = answers(client)
    if outcome.http_status != 200:
        outcome.problems = ["it does not answer with HTTP 200"]
        return
    time.sleep(SETTLE_SECONDS)
    try:
        after = server_identity(client)
        outcome.http_status = answers(client)
    except NoAnswer as error:
        outcome.problems = [f"it answered, and then no more: {error}"]
        return
    outcome.after = after
    outcome.problems = same_server(outcome.before, after)
    if outcome.http_status != 200:
        outcome.problems.append(f"HTTP {outcome.http_status}")
    outcome.restored = not outcome.problems


def _may_be_up(client: Client, service: Service, outcome: Outcome) -> None:
    """The stop was begun and perhaps not finished: a server on its way down is waited for."""
    end = time.monotonic() + service.stop_seconds
    while answers(client) is not None and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
    if answers(client) is not None:
        _verify(client, outcome)


def _start_production(client: Client, service: Service, outcome: Outcome) -> None:
    log = Path(service.log) if service.log else None
    try:
        process = processes.launch(service.start, environment={}, log=log, tied=False)
    except (SlotwiseError, OSError) as error:
        outcome.problems = [str(error)]
        return
    processes.leave_running(process)
    end = time.monotonic() + service.ready_seconds
    while time.monotonic() < end:
        if answers(client) == 200:
            break
        if process.poll():
            break
        time.sleep(POLL_SECONDS)
    _verify(client, outcome)
    code = process.poll()
    if not outcome.restored and code:
        outcome.problems.append(f"{service.start[0]} ended with {processes.ended_with(code)}")


def _wait_until_down(client: Client, service: Service) -> None:
    end = time.monotonic() + service.stop_seconds
    while answers(client) is not None:
        if time.monotonic() > end:
            raise SlotwiseError(
                f"production still answers {service.stop_seconds:g} s after it was stopped",
                next_step="Check production.stop in the service file.",
            )
        time.sleep(POLL_SECONDS)


def _wait_until_ready(
    arm: Arm, start: Start, process: subprocess.Popen[bytes], client: Client
) -> None:
    end = time.monotonic() + start.ready_seconds
    while answers(client) != 200:
        if process.poll() is not None:
            where = f"Its output is in {start.log}." if start.log else "Give start.log a file."
            raise SlotwiseError(
                f"arm {arm.name}: {start.command[0]} ended before it was ready: "
                f"{processes.ended_with(process.returncode)}",
                next_step=where,
            )
        if time.monotonic() > end:
            raise SlotwiseError(
                f"arm {arm.name} is not ready after {start.ready_seconds:g} s",
                next_step="Give start.ready_seconds more, or look at start.log.",
            )
        time.sleep(POLL_SECONDS)


def _not_restored(service: Service, journal: Journal, outcome: Outcome) -> NotRestored:
    return NotRestored(
        f"PRODUCTION IS NOT RESTORED at {service.url}: {'; '.join(outcome.problems)}",
        next_step=f"Run: slotwise ladder restore {journal.path}\n"
        f"       or start it by hand: {shlex.join(service.start)}",
    )
