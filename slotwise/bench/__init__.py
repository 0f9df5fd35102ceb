"""Measures the engine, alone or against llama.cpp, and how near it is to what is possible."""
