"""Runs damaged copies of the talking model through `slotwise check` and `slotwise run`.

`python damaged_models.py MODEL FIRST COUNT` prints one line a seed, "seed check run", before which
that seed's damage may end the process. A process of its own, because ggml aborts the one it is in.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

HEADER = 12_000
"""Bytes that hold the whole header and a little of the weights."""
NUMBERS = [0, 1, 2, 3, 8, 31, 64, 65, 2**16, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**64 - 1]
SMALL = [0, 1, 2, 3, 4, 5, 7, 8, 16, 32, 64, 128, 1000, 2**31 - 1, 2**32 - 1]
SETTINGS = ("--memory", "4GiB", "--context", "64", "--chunk", "8")


def damage(data: bytes, rng: random.Random) -> bytes:
    """One to three changes: a byte, a number of 4 or 8 bytes, or the type of a tensor."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        at = rng.randrange(24, HEADER)
        match rng.choice(["byte", "number", "small", "type"]):
            case "byte":
                changed[at] = rng.randrange(256)
            case "number":
                changed[at : at + 8] = rng.choice(NUMBERS).to_bytes(8, "little")
            case "small":
                changed[at : at + 4] = rng.choice(SMALL).to_bytes(4, "little")
            case "type":
                _change_type(changed, rng)
    return bytes(changed)


def _change_type(data: bytearray, rng: random.Random) -> None:
    """After a tensor's name come the number of its dimensions, these, and its type."""
    ends = [at + 7 for at in range(HEADER) if data[at : at + 7] == b".weight"]
    end = rng.choice(ends or [HEADER])
    dims = int.from_bytes(data[end : end + 4], "little")
    at = end + 4 + 8 * min(dims, 4)
    data[at : at + 4] = rng.randrange(45).to_bytes(4, "little")


def main(model: Path, first: int, count: int) -> None:
    from slotwise.cli import main as slotwise

    data = model.read_bytes()
    results = os.fdopen(os.dup(1), "w")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        for seed in range(first, first + count):
            print(seed, end=" ", flush=True, file=results)
            path.write_bytes(damage(data, random.Random(seed)))
            with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())):
                check = slotwise(["check", str(path), *SETTINGS])
                run = slotwise(["run", str(path), "-p", "hello", "-n", "2", "--quiet",
                                "--threads", "1", *SETTINGS])  # fmt: skip
            print(check, run, flush=True, file=results)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
