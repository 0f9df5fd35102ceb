"""The only room that imports ggml; here it is loaded, its threads told not to wait long.

After a graph libgomp's threads turn for milliseconds before they sleep. That core is missing for
our own threads: a read of 128 tokens took 1.2 times as long, and decode was no faster
(docs/performance.md).
"""

import os

_SPIN, _TURNS = "GOMP_SPINCOUNT", "1000"

_ours = _SPIN not in os.environ and "OMP_WAIT_POLICY" not in os.environ
if _ours:  # libgomp looks once, when it is loaded
    os.environ[_SPIN] = _TURNS

import ggml  # noqa: E402, F401

if _ours:  # not for the processes that this one starts
    del os.environ[_SPIN]
