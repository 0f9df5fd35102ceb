"""Turns Q2_0 blocks into Q4_0 blocks that hold exactly the same values.

Q2_0 (ggml type 42) is newer than the ggml this project computes with. One Q2_0 block is 64 values:
an fp16 scale d and 16 bytes, code j in bits 2*(j%4) of byte j//4, value = (code - 1) * d. One Q4_0
block is 32 values: an fp16 scale and 16 bytes, the low nibbles hold the first 16 values and the
high nibbles the last 16, value = (nibble - 8) * d. So nibble = code + 7 and the scale is copied:
nothing is rounded, and the result takes twice the bytes.

It widens nothing else and never narrows.
"""

from __future__ import annotations

import numpy as np

Q2_0_BYTES = 18
"""Bytes of one Q2_0 block; it becomes two Q4_0 blocks of 18 bytes."""

_NIBBLES = (((np.arange(256)[:, None] >> np.array([0, 2, 4, 6])) & 3) + 7).astype(np.uint8)
# One Q2_0 byte -> its four nibbles side by side in 32 bits, so that a block is eight look-ups.
_FOUR = _NIBBLES.view(np.uint32)[:, 0]


def widen_q2_0(raw: np.ndarray, *, out: np.ndarray | None = None) -> np.ndarray:
    """Q2_0 bytes in, Q4_0 bytes of the same values out.

    `raw` is uint8, one dimension, a whole number of 18-byte blocks. The result is uint8 with twice
    as many bytes; `out`, where given, is that array to fill (one dimension, contiguous).
    """
    if raw.dtype != np.uint8 or raw.ndim != 1 or raw.size % Q2_0_BYTES:
        raise ValueError(
            f"Q2_0 data is one dimension of uint8 in blocks of {Q2_0_BYTES} bytes, "
            f"not {raw.dtype} of shape {raw.shape}"
        )
    if out is None:
        out = np.empty(2 * raw.size, np.uint8)
    narrow = raw.reshape(-1, 1, Q2_0_BYTES)
    wide = out.reshape(-1, 2, Q2_0_BYTES)
    wide[..., :2] = narrow[..., :2]
    # [block, which half of 32 values, low or high nibbles, 4 bytes of 4 codes]
    nibbles = _FOUR[narrow[..., 2:].reshape(-1, 2, 2, 4)]
    wide[..., 2:] = (nibbles[:, :, 0] | nibbles[:, :, 1] << 4).view(np.uint8)
    return out
