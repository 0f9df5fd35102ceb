"""Any bytes are survived: long lines, binary, gzip, half a last line, growing files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slotwise.explain.readers import follow_files, read_files
from slotwise.explain.readers import lines as lines_module
from slotwise.explain.readers.base import OTHER_SHAPES, SHAPES_LIMIT, Unknown
from slotwise.explain.readers.lines import LINE_LIMIT, Splitter, feed_block, feed_lines
from slotwise.explain.readers.strata import StrataReader

SUMMARY = (
    b"strata serve: prompt 101 tokens = 0 reused + 101 read in 90 ms (1.0 tok/s), 8 generated in "
    b"100 ms (80.0 tok/s), drafts accepted 1 of 3, 1 checkpoints\n"
)
WINDOWS = b"".join(b"strata trace: window %d %d\n" % (100 + i, 1 + i % 4) for i in range(7))
TRACED = (
    b"strata trace: request 101 0\nstrata trace: read 100 tokens (windows) in 70.0 ms\n"
    b"strata trace: prompt done (slots refilled) -1 -1\n" + WINDOWS + SUMMARY
)


class Recorder:
    def __init__(self, bulk: bytes) -> None:
        self.bulk = bulk
        self.seen: list[tuple[int, str]] = []

    def feed(self, line_no: int, line: str) -> None:
        self.seen.append((line_no, line))

    def feed_bulk(self, line_no: int, block: bytes, at: int) -> tuple[int, int]:
        """Whole lines only, and of some runs none at all."""
        count, start = 0, at
        while block.startswith(self.bulk, at) and (end := block.find(b"\n", at)) >= 0:
            count, at = count + 1, end + 1
        if count % 3 == 0:
            return 0, start
        found = block[start : at - 1].decode("latin1").split("\n")
        self.seen += [(line_no + i, line) for i, line in enumerate(found)]
        return count, at

    def feed_between(self, line_no: int, lines: bytes) -> None:
        feed_lines(self, lines, line_no)


@settings(deadline=None)
@given(st.lists(st.sampled_from([b"bulk 1", b"bulk ", b"other", b"", b"bulk"]), min_size=1))
def test_bulk_lines_come_in_order_and_numbered(lines: list[bytes]) -> None:
    recorder = Recorder(b"bulk ")
    assert feed_block(recorder, b"\n".join(lines), 5) == 5 + len(lines)
    assert recorder.seen == [(5 + i, line.decode()) for i, line in enumerate(lines)]


_windows = st.builds(
    b"strata trace: window %d %d".__mod__, st.tuples(st.integers(97, 103), st.integers(0, 11))
)
_almost_windows = st.sampled_from(
    [
        b"strata trace: window ",
        b"strata trace: window 10 1 ",
        b"strata trace: window 101",
        b"strata trace: window  11 1",
        b"strata trace: window -11 1",
        b"strata tr1ce: window  1",
        b"strata1234567 trace: window 1",
        b"strata trace1234567: window 1",
        b"strata trace: win1dow 10 1",
        b"strata trace: window1 10 1",
        b"strata trace: window 101  1",
        b"strata trace: window 10 1 1",
        b"strata trace: window 1\xc0 1",
        b"strata trace: window 1234567890123456 1",
        b"strata trace: request 11 0",
        b"",
    ]
)


@settings(deadline=None)
@given(st.lists(st.one_of(_windows, _windows, _almost_windows), min_size=1, max_size=30))
def test_windows_taken_together_are_those_taken_one_by_one(lines: list[bytes]) -> None:
    together, one_by_one = StrataReader("a"), StrataReader("a")
    assert feed_block(together, b"\n".join(lines), 5) == 5 + len(lines)
    for i, line in enumerate(lines):
        one_by_one.feed(5 + i, line.decode("utf-8", "replace"))
    assert together.draft == one_by_one.draft
    assert together.finish() == one_by_one.finish()
    assert together.unknown.counts == one_by_one.unknown.counts


@settings(deadline=None)
@given(st.binary(max_size=400), st.integers(1, 50))
def test_the_splitter_loses_nothing_short(data: bytes, step: int) -> None:
    splitter = Splitter()
    blocks = [splitter.push(data[i : i + step]) for i in range(0, len(data), step)]
    lines = [line for block in blocks if block is not None for line in block.split(b"\n")]
    expected = data.split(b"\n")
    assert splitter.rest() == expected[-1]
    assert lines == [line.removesuffix(b"\r") for line in expected[:-1]]


def test_long_lines_are_cut_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_bytes(b"x" * 3_000_000 + b"\n" + SUMMARY + b"y" * 2_000_000)
    reading = read_files([path])
    assert [len(life.requests) for life in reading.lives] == [1]
    assert reading.lines == 3
    assert any("2 lines over 64 KiB" in text for text in reading.unreadable)


def test_the_splitter_keeps_one_line_s_worth() -> None:
    splitter = Splitter()
    for _ in range(50):
        assert splitter.push(b"z" * lines_module.BLOCK) is None
        assert len(splitter.rest()) <= LINE_LIMIT
    assert splitter.push(b"\nnext\n") == b"z" * LINE_LIMIT + b"\nnext"
    assert splitter.cut == 1


@pytest.mark.parametrize(
    "form", ["plain", "gzip", "crlf", "utf-16", "container", "docker", "journal", "colours"]
)
def test_the_same_log_in_every_form(tmp_path: Path, form: str) -> None:
    data = TRACED * 3
    if form == "gzip":
        data = gzip.compress(data)
    elif form == "crlf":
        data = data.replace(b"\n", b"\r\n")
    elif form == "utf-16":
        data = data.decode().encode("utf-16")
    elif form == "container":
        start = b"strata-1  | 2026-10-09T10:00:00.123Z "
        data = b"".join(start + line for line in data.splitlines(keepends=True))
    elif form == "journal":
        start = b"Oct 09 10:00:00 host strata[123]: "
        data = b"".join(start + line for line in data.splitlines(keepends=True))
    elif form == "docker":
        lines = [{"log": line + "\n", "stream": "stderr"} for line in data.decode().splitlines()]
        data = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
    elif form == "colours":
        data = data.replace(b"strata", b"\x1b[1mstrata").replace(b"\n", b"\x1b[0m\n")
    path = tmp_path / "engine.log"
    path.write_bytes(data)
    (life,) = read_files([path]).lives
    assert [r.facts["windows"].value for r in life.requests] == [7, 7, 7]
    assert [r.facts["window tokens"].value for r in life.requests] == [16, 16, 16]
    assert {r.status for r in life.requests} == {"done"}


def test_two_digit_windows_are_counted_right(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_bytes(TRACED.replace(b"window 102 3", b"window 102 12"))
    (life,) = read_files([path]).lives
    assert life.requests[0].facts["window tokens"].value == 16 - 3 + 12


def test_a_half_last_line_is_read_and_said(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_bytes(TRACED + b"strata trace: request 102 0\nstrata trace: lent 311 sl")
    reading = read_files([path])
    (life,) = reading.lives
    assert [r.status for r in life.requests] == ["done", "incomplete"]
    assert any("last line has no end" in text for text in reading.unreadable)
    half = read_files([path], follow=True)
    assert half.unreadable == ()
    assert half.lines == reading.lines - 1


def test_a_damaged_gzip_keeps_what_came_before(tmp_path: Path) -> None:
    path = tmp_path / "engine.log.gz"
    whole = gzip.compress(TRACED * 2000, compresslevel=1)
    path.write_bytes(whole[: len(whole) // 2])
    reading = read_files([path])
    assert any("damaged" in text for text in reading.unreadable)


def test_empty_missing_and_foreign_files_are_listed(tmp_path: Path) -> None:
    empty, foreign = tmp_path / "empty.log", tmp_path / "foreign.log"
    empty.write_bytes(b"")
    foreign.write_bytes(b"nothing to see, my secret is hunter2\n" * 3)
    reading = read_files([empty, foreign, tmp_path / "missing.log"])
    assert reading.lives == ()
    assert len(reading.unreadable) == 3
    assert sum(reading.unknown.values()) == 3
    assert "hunter2" not in json.dumps(reading.to_dict())


def test_lines_before_the_dialect_is_known_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    banner = b"a banner of another program".ljust(400, b".") + b"\n"
    path.write_bytes(banner * 5000 + TRACED)
    reading = read_files([path])
    assert [len(life.requests) for life in reading.lives] == [1]
    assert sum(reading.unknown.values()) == 5000
    assert reading.lines == 5000 + TRACED.count(b"\n")


def test_unknown_shapes_are_bounded() -> None:
    unknown = Unknown(["alpha", "beta"])
    for i in range(SHAPES_LIMIT * 3):
        unknown.add(("alpha " * (i % 97)) + ("beta " * (i // 97)) + "secret 12.5")
    assert len(unknown.counts) <= SHAPES_LIMIT + 1
    assert sum(unknown.counts.values()) == SHAPES_LIMIT * 3
    assert OTHER_SHAPES in unknown.counts or len(unknown.counts) <= SHAPES_LIMIT
    assert unknown.shape("alpha my secret 12.5 words") == "alpha … N …"


def test_a_growing_file_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_bytes(TRACED[:-40])
    more = [TRACED[-40:] + TRACED[:60], TRACED[60:], b""]
    statuses: list[list[str]] = []

    def keep_going() -> bool:
        if not more:
            return False
        with path.open("ab") as log:
            log.write(more.pop(0))
        return True

    for reading in follow_files([path], interval_s=0, keep_going=keep_going):
        statuses.append([r.status for life in reading.lives for r in life.requests])
    assert statuses == [["incomplete"], ["done", "incomplete"], ["done", "done"]]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.one_of(st.binary(max_size=80), st.sampled_from(TRACED.split(b"\n")))))
def test_any_bytes_are_survived(tmp_path: Path, pieces: list[bytes]) -> None:
    path = tmp_path / "any.log"
    data = b"\n".join(pieces)
    path.write_bytes(data)
    reading = read_files([path])
    # a wide or a compressed file is counted by what came out of it
    assert reading.bytes == len(data) or data[:2] in (b"\xff\xfe", b"\xfe\xff", b"\x1f\x8b")
    json.dumps(reading.to_dict())
