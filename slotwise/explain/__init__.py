"""The investigation kit: reads logs other engines wrote and says where the time went.

Imports without the engine, without ggml and without numpy.
"""
