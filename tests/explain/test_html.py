"""The HTML page: what is in it, and what a browser draws of it in light and dark."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest
from browser import opened
from explain import made

from slotwise.explain import drawing
from slotwise.explain.compare import compare
from slotwise.explain.html import MOST_WATERFALLS, comparison_page, levers_page, page
from slotwise.explain.levers import predict_levers
from slotwise.explain.record import Life, Reading, Value
from slotwise.explain.summary import explain, summarise


def rendered(*lives: Life) -> str:
    return page(explain(made.reading(*lives)))


@cache
def everything() -> str:
    big = [
        made.slot_request(i, read=t, read_ms=t * 2.1, refill_ms=t / 9, slots=t // 20, rest=1e3)
        for i, t in enumerate((60_000, 126_993))
    ]
    lives = (made.awkward(), made.table_of_document_two(), made.life(made.ladder()), made.life(big))
    return rendered(*lives)


class Balance(HTMLParser):
    """Fails on a tag that is closed and was not opened last."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Nothing to close."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_needs_nothing_else() -> None:
    text = everything()
    parser = Balance()
    parser.feed(text)
    assert parser.open == []
    assert not re.search(r"https?:|<script|<link|@import|src=|javascript:", text)
    assert re.findall(r"url\(([^)]*)", text)
    assert all(target.startswith("#hatch") for target in re.findall(r"url\(([^)]*)", text))


def test_the_numbers_of_the_tables_are_on_the_page() -> None:
    text = everything()
    for said in ("0.319 ms/slot", "0.706 ms/token", "109.5 ms", "no interval, n = 1", "Crossing"):
        assert said in text


def test_what_a_log_says_is_text_never_markup() -> None:
    life = made.life(
        [made.request(0, prompt=9, phases=[made.measured("<b>x</b>", 5.0)], warnings=("<i>w",))],
        notes=("<script>alert(1)</script>",),
    )
    text = rendered(life)
    assert "<script" not in text
    assert "<b>x" not in text
    assert "&lt;b&gt;x" in text


def test_nothing_read_is_a_page_too() -> None:
    assert "0 engine lives" in rendered()
    assert "No request in this life" in rendered(made.life([]))
    empty = made.request(0, prompt=1, phases=[], prompt_ms=0.0)
    assert "Request 1" in rendered(made.life([empty]))


def test_many_requests_are_drawn_up_to_a_limit() -> None:
    text = rendered(made.life(made.ladder(repeats=40)))
    assert text.count("<article>") == MOST_WATERFALLS
    assert f"{120 - MOST_WATERFALLS} more requests are in the numbers" in text


def test_bars_of_the_sum_lie_end_to_end_on_one_scale_per_size() -> None:
    life = made.life(made.ladder())
    full = drawing.scales(life, summarise(life))
    first, other = life.requests[0], life.requests[3]
    assert full[first.index] == full[other.index] >= drawing.extent(first)
    fall = drawing.waterfall(first, full_ms=full[0], colours=drawing.hues(life))
    bars = fall.lanes[0].bars
    for before, after in pairwise(bars):
        assert after.left == pytest.approx(before.left + before.width)
    assert bars[0].width == pytest.approx(96 * (first.phases[0].ms.value or 0) / full[0])
    assert bars[-1].kind == "rest"
    assert bars[-1].left + bars[-1].width == pytest.approx(fall.markers[0].at)


def test_bounded_and_missing_are_drawn_as_such_and_overlapped_lanes_apart() -> None:
    life = made.awkward()
    fall = drawing.waterfall(life.requests[0], full_ms=1000.0, colours=drawing.hues(life))
    assert [b.kind for b in fall.lanes[0].bars] == ["known", "known", "bounded", "missing", "rest"]
    assert [lane.name for lane in fall.lanes[1:]] == [
        "GPU timeline", "gpu timeline, its buckets", "host: staging",
    ]  # fmt: skip
    assert [lane.bars[0].left for lane in fall.lanes] == [0.0] * 4
    assert len(fall.lanes[2].bars) == 2


def test_a_negative_rest_has_no_width() -> None:
    request = made.request(0, prompt=9, phases=[made.measured("read", 50.0)], prompt_ms=40.0)
    assert (request.remainders[0].ms.value or 0) < 0
    bars = drawing.waterfall(request, full_ms=50.0, colours={}).lanes[0].bars
    assert bars[-1].width == 0.0


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.0, 6169.0), (0.0, 0.003), (-50.0, 900.0)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    ticks = drawing.nice_ticks(low, high, count=5)
    assert 2 <= len(ticks) <= 7
    assert all(low - 1e-9 <= t <= high + 1e-9 for t in ticks)


# --- what a browser draws


@pytest.fixture(
    scope="module",
    params=[("light", 1100), ("dark", 1100), ("light", 390), ("dark", 390)],
    ids=lambda p: f"{p[0]}-{p[1]}",
)
def drawn(
    request: pytest.FixtureRequest, browser: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    scheme, width = request.param
    file = tmp_path_factory.mktemp("page") / "page.html"
    file.write_text(everything(), encoding="utf-8")
    with opened(browser, file.as_uri(), width=width, scheme=scheme) as page_of_it:
        yield page_of_it


BOXES = """() => [...document.querySelectorAll('svg.waterfall')].map(fall => {
  const box = e => {
    const r = e.getBoundingClientRect(); return [r.left, r.right, r.top, r.bottom] };
  return { own: box(fall), bars: [...fall.querySelectorAll('.piece rect')].map(box),
    texts: [...fall.querySelectorAll('.piece')].map(p => { const t = p.querySelector('text');
      return t && getComputedStyle(t).display !== 'none'
        ? [box(t), box(p.querySelector('rect'))] : null }).filter(Boolean) };
})"""

COLOURS = """() => {
  const paint = (e, what) => getComputedStyle(e)[what];
  const ground = paint(document.body, 'backgroundColor');
  const raised = paint(document.querySelector('article'), 'backgroundColor');
  const pairs = [[paint(document.body, 'color'), ground]];
  for (const e of document.querySelectorAll('.soft, .warn, summary, .lane'))
    if (!e.closest('svg')) pairs.push(
      [paint(e, 'color'), e.closest('article, figure') ? raised : ground]);
  for (const t of document.querySelectorAll('.known-piece text'))
    pairs.push([paint(t, 'fill'), paint(t.parentNode.querySelector('rect'), 'fill')]);
  for (const t of document.querySelectorAll('svg text.soft'))
    pairs.push([paint(t, 'fill'), raised]);
  return pairs }"""


def luminance(colour: str) -> float:
    """Relative luminance of `rgb(r, g, b)` (WCAG 2)."""
    channels = [int(v) / 255 for v in re.findall(r"[0-9]+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_bars_add_up_and_nothing_overflows(drawn: Any) -> None:
    width = drawn.evaluate("document.documentElement.clientWidth")
    assert drawn.evaluate("document.documentElement.scrollWidth") <= width
    falls = drawn.evaluate(BOXES)
    assert len(falls) == 1 + 3 + 3 + 18 + 2  # three more lanes in the first life
    for fall in falls:
        left, right, top, bottom = fall["own"]
        assert 0 <= left < right <= width
        for before, after in pairwise(fall["bars"]):
            assert after[0] == pytest.approx(before[1], abs=0.6)
        for bar in fall["bars"]:
            assert left - 0.6 <= bar[0] <= bar[1] <= right + 0.6
            assert top <= bar[2] < bar[3] <= bottom
        for text, bar in fall["texts"]:
            assert bar[0] <= text[0]
            assert text[1] <= bar[1] + 0.6


def test_widths_are_the_times(drawn: Any) -> None:
    """Request 3 of the study: 1,245 ms of reading and 188.2 ms of refill."""
    bars = drawn.evaluate(BOXES)[6]["bars"]
    read, refill, rest = (right - left for left, right, _, _ in bars)
    assert read / refill == pytest.approx(1245.0 / 188.2, rel=0.02)
    assert rest / refill == pytest.approx(56.0 / 188.2, rel=0.03)


def test_text_can_be_read(drawn: Any) -> None:
    for text, behind in drawn.evaluate(COLOURS):
        light, dark = sorted((luminance(text), luminance(behind)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, behind)


def test_the_scheme_is_followed(drawn: Any) -> None:
    ground = luminance(drawn.evaluate("getComputedStyle(document.body).backgroundColor"))
    dark = drawn.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    assert ground < 0.1 if dark else ground > 0.9


def test_fits_are_drawn_inside_their_frames(drawn: Any) -> None:
    figures = drawn.evaluate(
        """() => [...document.querySelectorAll('figure svg')].map(s => {
          const own = s.getBoundingClientRect();
          const parts = [...s.querySelectorAll('circle, text')].map(c => c.getBoundingClientRect());
          return [s.querySelectorAll('circle').length,
            parts.every(c => c.left >= own.left - 1 && c.right <= own.right + 1
              && c.top >= own.top - 1 && c.bottom <= own.bottom + 1)] })"""
    )
    assert [count for count, _ in figures] == [3] * 4 + [15] * 4 + [2] * 4
    assert all(inside for _, inside in figures)


def test_there_are_words_for_every_picture(drawn: Any) -> None:
    named = drawn.evaluate(
        """() => [...document.querySelectorAll('svg[role=img]')]
          .every(s => (s.getAttribute('aria-label') || '').length > 8)"""
    )
    assert named
    assert drawn.evaluate("document.querySelectorAll('.bounded-piece').length") == 1
    assert drawn.evaluate("document.querySelectorAll('.missing-piece').length") == 1


def test_every_bar_says_what_it_is_by_keyboard(drawn: Any) -> None:
    drawn.evaluate("document.activeElement.blur()")
    hits = drawn.locator(".fall .hit")
    assert hits.count() == drawn.locator(".fall .piece").count()
    hit = hits.first
    assert not hit.locator(".tip").is_visible()
    hit.focus()
    assert hit.locator(".tip").is_visible()
    assert hit.locator(".tip").inner_text() == hit.get_attribute("aria-label")


def test_names_and_times_of_short_bars_are_in_the_list_below(drawn: Any) -> None:
    listed = drawn.locator("article").first.locator(".key").first.inner_text()
    for said in ("lend 2.00", "refill 0.0..200.0", "checkpoint -", "left over"):
        assert said in listed


# --- two arms, and levers


def arm(**more: float) -> Reading:
    return made.reading(made.life(made.ladder(**more)))


@pytest.fixture(scope="module", params=[("light", 1100), ("dark", 390)], ids=str)
def arms_drawn(
    request: pytest.FixtureRequest, browser: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, Any]]:
    scheme, width = request.param
    folder = tmp_path_factory.mktemp("arms")
    compared = compare(arm(), arm(rest=204.0, noise=9.0), names=("<a>.log", "b.log"))
    levers = predict_levers(
        arm(noise=5.0), with_lever=arm(refill=0.0, noise=4.0), lever_key="deferred-refill",
        arm="deferred.log",
    )  # fmt: skip
    for name, text in (("c", comparison_page(compared)), ("l", levers_page(levers))):
        parser = Balance()
        parser.feed(text)
        assert parser.open == []
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    c, v = ((folder / f"{name}.html").as_uri() for name in "cl")
    with (
        opened(browser, c, width=width, scheme=scheme) as first,
        opened(browser, v, width=width, scheme=scheme) as second,
    ):
        yield first, second


ROWS = """() => [...document.querySelectorAll('.forest')].map(f => {
  const x = e => { const r = e.getBoundingClientRect(); return [r.left, r.right] };
  return [...f.querySelectorAll('svg.row')].map(row => ({
    kind: row.getAttribute('class'), own: x(row), says: row.getAttribute('aria-label'),
    band: row.querySelector('.band') && x(row.querySelector('.band')),
    zero: row.querySelector('.zero') && x(row.querySelector('.zero'))[0],
    whisker: row.querySelector('.whisker') && x(row.querySelector('.whisker')),
    spot: row.querySelector('.spot') && x(row.querySelector('.spot')) })) })"""


def test_dots_lie_where_the_numbers_say(arms_drawn: tuple[Any, Any]) -> None:
    compared, _ = arms_drawn
    forests = compared.evaluate(ROWS)
    assert len(forests) == 3
    for rows in forests:
        read, _, unexplained, clock = rows
        assert "k-still" in read["kind"]
        assert "k-moved" in clock["kind"]
        assert "did not move" in read["says"]
        for row in rows:
            assert row["own"][0] <= row["whisker"][0] <= row["whisker"][1] <= row["own"][1]
        left, right = read["whisker"]
        assert read["band"][0] - 1 <= left <= read["zero"] <= right <= read["band"][1] + 1
        middle = sum(unexplained["spot"]) / 2
        assert middle > clock["zero"] + 0.5 * (clock["own"][1] - clock["zero"])
    assert "<a>.log" in compared.inner_text("main")


def test_predicted_is_drawn_beside_measured(arms_drawn: tuple[Any, Any]) -> None:
    _, levers = arms_drawn
    forests = levers.evaluate(ROWS)
    assert len(forests) == 3
    for rows in forests:
        now, predicted, expected, measured = rows
        assert predicted["spot"][0] < now["spot"][0]
        assert expected["spot"] is None
        assert expected["whisker"][0] <= sum(measured["spot"]) / 2 <= expected["whisker"][1]
    assert "as predicted" in levers.inner_text("main")
    assert "Assumes: nothing before the first token waits" in levers.inner_text("main")


def test_pages_of_arms_are_as_wide_as_the_window(arms_drawn: tuple[Any, Any]) -> None:
    for one in arms_drawn:
        width = one.evaluate("document.documentElement.clientWidth")
        assert one.evaluate("document.documentElement.scrollWidth") <= width


def test_levers_that_cannot_be_predicted_are_a_page_too() -> None:
    text = levers_page(predict_levers(made.reading(made.life([]))))
    assert "No lever could be predicted" in text
    assert "no finished request with a known size" in text


def test_a_first_token_that_is_known_is_marked() -> None:
    request = made.request(
        0, prompt=9, phases=[made.measured("read", 50.0)], ttft_ms=Value.measured(80.0)
    )
    fall = drawing.waterfall(request, full_ms=drawing.extent(request), colours={})
    assert [t.at for t in fall.markers] == pytest.approx([60.0, 96.0])
