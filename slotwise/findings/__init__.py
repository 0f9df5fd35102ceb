"""Findings records: claims about an engine, with what each rests on, that a program can check.

Imports without the engine and without numpy.
"""
