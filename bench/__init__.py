"""Benchmarks. Each `python -m bench.NAME` writes one JSON record and prints one table.

They are not tests: run them alone on a quiet machine, see docs/performance.md.
"""
