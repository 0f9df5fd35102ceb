"""Makes the helper files of the test folders importable, as `reference.tiny` for example."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
