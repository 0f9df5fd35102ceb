"""Processes that are measured. Each speaks JSON lines on stdin and stdout (see `protocol`)."""
