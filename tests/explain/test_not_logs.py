"""Text that speaks of logs, or quotes a line of one, is not read as a log."""

from __future__ import annotations

from pathlib import Path

import pytest

from slotwise.explain.readers import read_files

DATA = Path(__file__).parents[1] / "data" / "explain"
TEXTS = [*sorted(DATA.glob("*/SOURCE.txt")), DATA / "misreads" / "MISREADS.md"]
DOCUMENTS = sorted(Path(__file__).parents[2].glob("*.md"))
PROSE = """\
# Notes on the server

We run vLLM and SGLang behind one gateway, ktransformers on the old machine. The vllm log says
little of a single request, so we also keep the client's numbers.

The line to look for is `prompt eval time =     222.00 ms /    37 tokens`, printed once for every
request; the older servers wrote `llama_print_timings` in front of it. Nothing here is a log.

What we found:

- the first request is slow, because the model is read from the disk;
- later ones are not;
- what was read before need not be read again.

See also the answer of the maintainers, who say the same in other words.
"""


@pytest.mark.parametrize("path", TEXTS + DOCUMENTS, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_descriptions_are_no_logs(path: Path) -> None:
    reading = read_files([path])
    assert reading.lives == ()
    assert any("no known dialect" in text for text in reading.unreadable)


def test_prose_that_quotes_a_line(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(PROSE, encoding="utf-8")
    reading = read_files([path])
    assert reading.lives == ()
    assert sum(reading.unknown.values()) > 0


def test_a_long_start_does_not_hide_a_log(tmp_path: Path) -> None:
    """Density is asked of small files only: a server may say much before its first request."""
    block = (DATA / "made" / "llamacpp-2023-11-two-slots.log").read_text(encoding="utf-8")
    path = tmp_path / "server.log"
    path.write_text("some other program says something\n" * 390 + block, encoding="utf-8")
    (life,) = read_files([path]).lives
    assert len(life.requests) == 3
