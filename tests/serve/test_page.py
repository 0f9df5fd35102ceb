"""The page in a real browser: a message is sent, tokens stream, and the waterfall adds up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from browser import opened
from serve.served import PATIENCE, Served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WIDE, NARROW = 1200, 400


def say(page: Page, text: str, *, tokens: int = 12) -> None:
    page.set_default_timeout(PATIENCE * 1000)
    page.fill("#temperature", "0")
    page.fill("#max-tokens", str(tokens))
    page.fill("#text", text)
    page.press("#text", "Enter")


def until(page: Page, expression: str) -> None:
    """Waits for it from outside: the page's own policy forbids the browser to poll for it."""
    deadline = time.monotonic() + PATIENCE
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(20)


def numbers(page: Page, selector: str) -> list[int]:
    return page.eval_on_selector_all(selector, "all => all.map(e => Number(e.dataset.ns))")


@pytest.mark.parametrize(("width", "scheme"), [(WIDE, "light"), (WIDE, "dark"), (NARROW, "light")])
def test_a_message_and_its_waterfall(
    served: Served, browser: Browser, width: int, scheme: str
) -> None:
    with opened(browser, served.url, width=width, scheme=scheme) as page:
        say(page, f"Hello from {width} pixels, {scheme}")
        page.wait_for_selector(".about")
        record = served.service.ended[0]["record"]
        shown = dict(
            page.eval_on_selector_all(
                "#phases tr", "all => all.map(e => [e.dataset.phase, Number(e.dataset.ns)])"
            )
        )
        assert shown == {name: p["ns"] for name, p in record["ledger"]["phases"].items()}
        assert sum(shown.values()) == record["ledger"]["wall_ns"] == numbers(page, "#sum")[0]
        assert page.inner_text("#check") == "= wall time, measured apart"
        said = page.inner_text(".said.assistant")
        assert said
        overflow = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
        assert not page.evaluate(overflow)


def test_bars_stand_one_after_the_other(served: Served, browser: Browser) -> None:
    with opened(browser, served.url) as page:
        say(page, "Where do the bars stand?")
        page.wait_for_selector(".about")
        places = page.eval_on_selector_all(
            "#phases .track i",
            "all => all.map(e => [parseFloat(e.style.left), parseFloat(e.style.width)])",
        )
        end = 0.0
        for left, width in places:
            assert left == pytest.approx(min(end, 99.5), abs=0.01)
            end += width
        assert end == pytest.approx(100, abs=0.01)


def test_tokens_stream_and_escape_stops_them(served: Served, browser: Browser) -> None:
    window = served.engine.window
    gate = Gate(window, after=4)
    served.engine.window = gate  # type: ignore[method-assign]
    try:
        with opened(browser, served.url) as page:
            say(page, "Stream, please", tokens=200)
            until(page, "document.querySelector('.said.assistant')?.textContent.length >= 3")
            assert page.is_disabled("#send")
            page.keyboard.press("Escape")
            page.wait_for_selector(".problem")
            assert page.inner_text(".problem").strip() == "(stopped)"
            gate.open()
            page.wait_for_selector("#send:enabled")
    finally:
        gate.open()
        served.engine.window = window  # type: ignore[method-assign]
    served.wait_for(lambda: served.service.desk.current is None)
    assert served.service.ended[0]["state"] == "cancelled"
    served.check_serves()


def test_a_message_waits_until_the_model_is_loaded(served: Served, browser: Browser) -> None:
    """The server says so for its first three looks, then what it really is."""
    looks = []

    def answer(route: Any) -> None:
        looks.append(len(served.service.ended))
        if len(looks) > 3:
            route.continue_()
        else:
            route.fulfill(json={"state": "loading"})

    before = len(served.service.ended)
    with opened(browser, served.url) as page:
        page.route("**/health", answer)
        page.reload()
        until(page, "document.getElementById('dot').dataset.state === 'loading'")
        say(page, "Hello, early")
        page.wait_for_selector(".about")
        assert page.query_selector(".problem") is None
    assert len(looks) > 3
    assert looks[:3] == [before] * 3, "the question did not wait"


class Gate:
    """A window function that lets so many windows through, and the rest when it is opened."""

    def __init__(self, window: Callable[..., Any], *, after: int) -> None:
        self._window, self._left, self._opened = window, after, threading.Event()

    def __call__(self, token: int, position: int) -> Any:
        if not self._left:
            self._opened.wait(PATIENCE)
        self._left = max(0, self._left - 1)
        return self._window(token, position)

    def open(self) -> None:
        self._opened.set()


def test_a_second_answer_goes_on_and_an_older_one_can_be_looked_at(
    served: Served, browser: Browser
) -> None:
    with opened(browser, served.url) as page:
        say(page, "The first of two")
        page.wait_for_selector(".about")
        say(page, "The second of two")
        page.wait_for_selector(".about >> nth=1")
        second, first = (entry["record"] for entry in list(served.service.ended)[:2])
        assert second["tokens"]["reused"] > 0
        assert numbers(page, "#sum") == [second["ledger"]["wall_ns"]]
        page.focus(".about >> nth=0")
        page.keyboard.press("Enter")
        assert numbers(page, "#sum") == [first["ledger"]["wall_ns"]]
        assert page.get_attribute(".about >> nth=0", "aria-pressed") == "true"


def test_the_pool_is_shown(served: Served, browser: Browser) -> None:
    slots = served.engine.expert_slots()
    with opened(browser, served.url) as page:
        page.wait_for_selector("#pool:not([hidden])")
        text = page.inner_text("#pool-text")
    total = sum(slots.values())
    assert text.startswith(f"{slots['resident']} of {total} expert slots filled")


def test_what_a_model_says_is_text_not_a_page(served: Served, browser: Browser) -> None:
    with opened(browser, served.url) as page:
        say(page, "<img src=x onerror=alert(1)><b>bold</b>")
        page.wait_for_selector(".about")
        assert page.locator("#log img, #log b").count() == 0
        assert "<b>bold</b>" in page.inner_text(".said.user")


def test_a_server_with_a_key_asks_for_it(serve: Callable[..., Any], browser: Browser) -> None:
    with serve(api_keys=("sesame",)) as served:
        page = browser.new_page()
        try:
            page.set_default_timeout(PATIENCE * 1000)
            page.goto(served.url)
            page.wait_for_selector("#key-form:not([hidden])")
            page.fill("#key", "sesame")
            page.press("#key", "Enter")
            say(page, "Open")
            page.wait_for_selector(".about")
        finally:
            page.close()
