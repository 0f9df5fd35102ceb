"""slotwise: mixture-of-experts models through a bounded pool of expert slots.

This package root holds only the version, so that the investigation kit can be
imported where the engine's libraries are not installed.
"""

__version__ = "0.1.0"
