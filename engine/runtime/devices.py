"""What llama.cpp can run on here, and the cache format that follows from it."""

from __future__ import annotations

from engine.config import Exactness, KvType
from engine.runtime.api import native


def has_gpu() -> bool:
    """Whether this build of llama.cpp can place layers on a GPU."""
    return native().has_gpu_offload


def choose_kv_type(exactness: Exactness) -> KvType:
    """The target's cache format.

    On a CPU, BF16 gives bit-equal logits in every batch size, which F16 does only in short contexts; F16 is faster for
    long prompts. GPUs are built for F16.
    """
    return KvType.F16 if exactness is Exactness.FAST or has_gpu() else KvType.BF16
