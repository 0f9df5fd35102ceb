"""The command line as a process of its own: signals, closed and full streams, odd locales."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from slotwise.trace import read_trace

ROOT = Path(__file__).parents[2]
FEW = ("--threads", "1", "--context", "256", "--chunk", "32", "-n", "6", "--temp", "0")
LONG = ("--threads", "1", "--context", "16000", "-n", "15000", "--temp", "0")
"""Long enough to be interrupted while it answers: the model never says the end token to it."""
LIMIT = 60

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX signals and streams")


def command(*arguments: str | Path) -> list[str]:
    start = "from slotwise.cli import entry; entry()"
    return [sys.executable, "-W", "error", "-c", start, *map(str, arguments)]


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG", "PYTHON"))}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def slotwise(*arguments: str | Path, env: dict[str, str] | None = None, **more: Any) -> Any:
    """Runs to its end; returns the process with bytes of both streams where they were caught."""
    usual: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    usual |= {"stdout": subprocess.PIPE, "timeout": LIMIT} | more
    if "input" in usual:
        del usual["stdin"]
    result = subprocess.run(command(*arguments), env=environment(**(env or {})), **usual)
    check_quiet(result.stderr)
    return result


def check_quiet(err: bytes | None) -> None:
    for words in (b"Traceback", b"internal error", b"Exception ignored", b"core dumped"):
        assert words not in (err or b"")


@contextmanager
def started(*arguments: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command(*arguments),
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def first_byte(stream: IO[bytes] | None) -> bytes:
    """Waits for it: the answer has begun then."""
    assert stream is not None
    byte = stream.read(1)
    assert byte
    return byte


def end_of(process: subprocess.Popen[bytes]) -> tuple[int, bytes, bytes]:
    out, err = process.communicate(timeout=LIMIT)
    check_quiet(err)
    return process.returncode, out, err


# -- Ctrl-C


def test_ctrl_c_ends_the_answer_in_order(talking: Path, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    with started("run", talking, "-p", "hello", "--trace", trace, *LONG) as process:
        first_byte(process.stdout)
        process.send_signal(signal.SIGINT)
        code, out, err = end_of(process)
    assert code == 130
    assert out.endswith(b"\n"), "the terminal's next line begins at its left"
    assert b"cancelled" in err
    read = read_trace(trace)
    assert read.warnings == (), "the trace has its end mark"
    assert [r.status for r in read.records] == ["cancelled"]
    record = read.records[0]
    assert record.ledger.status == "done"
    assert 0 < record.tokens.generated < 15000


def test_a_second_ctrl_c_is_no_reason_for_a_traceback(talking: Path) -> None:
    with started("run", talking, "-p", "hello", *LONG) as process:
        first_byte(process.stdout)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        code, _, _ = end_of(process)
    assert code == 130


def test_ctrl_c_in_a_chat_ends_the_answer_and_not_the_chat(talking: Path) -> None:
    with started("chat", talking, *LONG) as process:
        assert process.stdin is not None
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        first_byte(process.stdout)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        summary = b""
        while b"first token" not in summary:
            summary = process.stderr.readline()
            assert summary, "the chat has ended"
        code, _, err = end_of(process)  # closes its standard input
    assert code == 0
    assert b"interrupted" not in err


def test_ctrl_c_while_it_waits_for_a_message(talking: Path) -> None:
    with started("chat", talking, *FEW) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        while b"first token" not in process.stderr.readline():
            assert process.poll() is None
        insist(process, lambda: process.send_signal(signal.SIGINT))  # its input is still open
        code, _, _ = end_of(process)
    assert code == 130


def insist(process: subprocess.Popen[bytes], interrupt: Callable[[], object]) -> None:
    """Interrupts until the process ends: Python misses a signal that comes just before a read."""
    for _ in range(LIMIT // 2):
        interrupt()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2)
            return
    pytest.fail("it does not end")


def test_terminated_in_the_middle_leaves_a_trace_that_can_be_read(
    talking: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "t.jsonl"
    with started("run", talking, "-p", "hello", "--trace", trace, *LONG) as process:
        first_byte(process.stdout)
        process.kill()
        process.wait(LIMIT)
    read = read_trace(trace)
    assert any("no end mark" in warning for warning in read.warnings)
    assert read.records == ()


# -- streams


def test_a_reader_that_has_seen_enough(talking: Path) -> None:
    """`slotwise run ... | head -c 1`"""
    with started("run", talking, "-p", "hello", *LONG) as process:
        first_byte(process.stdout)
        assert process.stdout is not None
        process.stdout.close()
        process.wait(LIMIT)
        assert process.stderr is not None
        check_quiet(process.stderr.read())
    assert process.returncode == 1


@pytest.mark.parametrize("arguments", [("run", "MODEL", "-p", "x", *FEW), ("check", "MODEL")])
def test_a_full_device(talking: Path, arguments: tuple[str, ...]) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("there is no /dev/full here")
    chosen = [talking if a == "MODEL" else a for a in arguments]
    with full.open("wb") as stdout:
        result = slotwise(*chosen, stdout=stdout)
    assert result.returncode == 1
    assert result.stderr.endswith(b"error: No space left on device\n")


@pytest.mark.parametrize(
    ("closed", "code"), [(0, 2), (1, 1), (2, 0)], ids=["stdin", "stdout", "stderr"]
)
def test_a_closed_stream(talking: Path, closed: int, code: int) -> None:
    prompt = () if closed == 0 else ("-p", "x")
    result = slotwise("run", talking, *prompt, *FEW, preexec_fn=lambda: os.close(closed))
    assert result.returncode == code
    assert bool(result.stdout.strip()) == (code == 0)


# -- locales and terminals


@pytest.mark.parametrize(
    "env",
    [
        {"LC_ALL": "C"},
        {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"PYTHONIOENCODING": "ascii:strict"},
    ],
    ids=str,
)
def test_any_locale(talking: Path, env: dict[str, str]) -> None:
    result = slotwise("run", talking, "-p", "h\N{LATIN SMALL LETTER E WITH ACUTE}", *FEW, env=env)
    assert result.returncode == 0
    assert b"first_window" in result.stderr


def test_input_that_is_not_in_the_encoding(talking: Path) -> None:
    strict = {"PYTHONIOENCODING": "utf-8:strict"}
    assert slotwise("run", talking, *FEW, env=strict, input=b"h\xc3\xa9 \xff").returncode == 0


def test_what_nobody_looks_at_has_no_colours_and_whole_lines(talking: Path) -> None:
    result = slotwise("run", talking, "-p", "hello", *FEW)
    assert b"\x1b" not in result.stderr
    missing = next(line for line in result.stderr.splitlines() if line.startswith(b"warning:"))
    assert b"Run `slotwise pack`" in missing


def test_no_color_is_honoured_where_colours_are_forced(talking: Path) -> None:
    forced = slotwise("run", talking, "-p", "hello", *FEW, env={"FORCE_COLOR": "1"})
    assert b"\x1b[" in forced.stderr, "nothing to switch off: this test could not fail"
    plain = slotwise("run", talking, "-p", "hello", *FEW, env={"FORCE_COLOR": "1", "NO_COLOR": "1"})
    assert not any(b"\x1b[%d" % colour in plain.stderr for colour in range(30, 50))


class Terminal:
    """A process whose three streams are one terminal."""

    def __init__(self, *arguments: str | Path) -> None:
        self.master, slave = os.openpty()
        self.process = subprocess.Popen(
            command(*arguments),
            env=environment(TERM="xterm"),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self.seen = b""

    def until(self, words: bytes) -> None:
        while words not in self.seen:
            assert select.select([self.master], [], [], LIMIT)[0], self.seen
            self.seen += os.read(self.master, 4096)
        self.seen = self.seen.partition(words)[2]

    def wait(self) -> None:
        """Until something is there to be seen."""
        assert self.seen or select.select([self.master], [], [], LIMIT)[0]

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def end(self) -> int:
        rest = self.seen
        with contextlib.suppress(OSError):
            while more := os.read(self.master, 4096):
                rest += more
        os.close(self.master)
        check_quiet(rest)
        return self.process.wait(LIMIT)


def test_a_chat_at_a_terminal(talking: Path) -> None:
    terminal = Terminal("chat", talking, *FEW)
    terminal.until(b"> ")
    terminal.type(b"hello\r")
    terminal.until(b"first token")
    terminal.until(b"> ")
    terminal.type(b"\r")  # an empty line is no message
    terminal.until(b"> ")
    terminal.type(b"and now?\r")
    terminal.until(b" reused")
    terminal.until(b"> ")
    terminal.type(b"\x04")
    assert terminal.end() == 0


def test_ctrl_c_at_the_prompt_of_a_terminal(talking: Path) -> None:
    terminal = Terminal("chat", talking, *FEW)
    terminal.until(b"> ")
    insist(terminal.process, lambda: terminal.type(b"\x03"))
    assert terminal.end() == 130


def test_ctrl_c_during_an_answer_at_a_terminal(talking: Path) -> None:
    terminal = Terminal("chat", talking, *LONG)
    terminal.until(b"> ")
    terminal.type(b"hello\r")
    terminal.until(b"hello\r\n")
    terminal.wait()  # for the first byte of the answer
    terminal.type(b"\x03")
    terminal.until(b"first token")
    terminal.until(b"> ")
    terminal.type(b"\x04")
    assert terminal.end() == 0
