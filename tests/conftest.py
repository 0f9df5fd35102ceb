"""What every test needs, and a browser for those that look at pages."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from browser import chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# A shell that starts the tests in the background leaves SIGINT ignored, for every child too; then
# nothing that tests Ctrl-C could work. A handled signal is the default one again in a child.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium for the whole run; see `browser.py` for opening pages in it."""
    with chromium() as running:
        yield running
