"""Measures any OpenAI-compatible server with a ladder of prompt sizes, and keeps every raw sample.

Knows servers, not engines: nothing here imports one.
"""
