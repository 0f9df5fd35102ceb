"""`llama`: Llama and Mistral (dense), Mixtral and its kin (experts)."""

from __future__ import annotations

from slotwise.models import layers
from slotwise.models.base import Architecture


class Llama(Architecture):
    """Rotates neighbouring pairs; Mixtral's expert weights are normalised."""

    name = "llama"
    rope_mode = layers.ROPE_NORMAL
    normalises_weights = True
