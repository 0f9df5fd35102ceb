"""The architectures we can run, by their GGUF name."""

from __future__ import annotations

from slotwise.models.base import Architecture
from slotwise.models.gpt_oss import GptOss
from slotwise.models.llama import Llama
from slotwise.models.olmoe import Olmoe
from slotwise.models.qwen2moe import Qwen2Moe
from slotwise.models.qwen3moe import Qwen3Moe

ARCHITECTURES: dict[str, type[Architecture]] = {
    cls.name: cls for cls in (Llama, Qwen3Moe, Qwen2Moe, Olmoe, GptOss)
}
