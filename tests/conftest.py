"""What every test needs."""

from __future__ import annotations

import signal

# A shell that starts the tests in the background leaves SIGINT ignored, for every child too; then
# nothing that tests Ctrl-C could work. A handled signal is the default one again in a child.
signal.signal(signal.SIGINT, signal.default_int_handler)
