"""A real browser for tests of pages: Debian's Chromium, driven through Playwright.

Playwright's own download of a browser is not used. A page that logs an error, throws, or asks
anything of another host fails the test that opened it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome")
HOW_TO_GET_IT = (
    "no Chromium on PATH. To run these tests: apt-get install --no-install-recommends chromium"
)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A running browser. Without one the test is skipped; where CI=true it fails."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI=true, and there is {HOW_TO_GET_IT}")
        pytest.skip(HOW_TO_GET_IT)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # no sandbox: Chromium's needs a user other than root; the pages are our own
        running = playwright.chromium.launch(
            executable_path=found, args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            yield running
        finally:
            running.close()


@contextmanager
def opened(
    browser: Browser, url: str, *, width: int = 1100, height: int = 900, scheme: str = "light"
) -> Iterator[Page]:
    """The page at `url`. What it did wrong while it was open fails the test at the end."""
    page = browser.new_page(
        viewport={"width": width, "height": height},
        color_scheme="dark" if scheme == "dark" else "light",
    )
    trouble: list[str] = []
    page.on("console", lambda m: trouble.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("request", lambda r: None if _own(r.url, url) else trouble.append(f"asks {r.url}"))
    try:
        page.goto(url)
        assert trouble == []
        yield page
        assert trouble == []
    finally:
        page.close()


def _own(asked: str, url: str) -> bool:
    """Whether a request stays with the page: its own file, its own host, or data inside it."""
    a, own = urlsplit(asked), urlsplit(url)
    if a.scheme in ("data", "blob"):
        return True
    return (
        asked == url if own.scheme == "file" else (a.scheme, a.netloc) == (own.scheme, own.netloc)
    )
