"""The bar while long logs are read: there after a while, true, and silent where nobody watches."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
from rich.console import Console

from slotwise.explain import progress


def terminal() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, force_terminal=True, width=80), text


@pytest.mark.skipif(not Path("/proc/self/fdinfo").exists(), reason="needs Linux's /proc")
def test_the_bar_is_as_far_as_the_open_file(tmp_path: Path) -> None:
    first, second = tmp_path / "a.log", tmp_path / "b.log"
    for path in (first, second):
        path.write_bytes(b"x" * 1_000_000)
    console, text = terminal()
    with (
        second.open("rb", buffering=0) as file,
        progress.reading([first, second], after_s=0.0, console=console),
    ):
        file.read(500_000)
        end = time.monotonic() + 30
        while "1.5/2.0 MB" not in text.getvalue() and time.monotonic() < end:
            time.sleep(0.05)
    assert "1.5/2.0 MB" in text.getvalue()


def test_a_short_read_shows_nothing(tmp_path: Path) -> None:
    console, text = terminal()
    with progress.reading([tmp_path / "a.log"], after_s=600.0, console=console):
        pass
    assert text.getvalue() == ""


def test_where_nobody_watches_nothing_is_shown(tmp_path: Path) -> None:
    text = io.StringIO()
    with progress.reading([tmp_path], after_s=0.0, console=Console(file=text)):
        time.sleep(0.3)
    assert text.getvalue() == ""


def test_an_error_ends_the_bar(tmp_path: Path) -> None:
    console, _ = terminal()
    with (
        pytest.raises(KeyboardInterrupt),
        progress.reading([tmp_path / "none"], after_s=0.0, console=console),
    ):
        raise KeyboardInterrupt
