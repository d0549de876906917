"""Refusing what free memory cannot hold, before it is allocated."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from pathlib import Path

import psutil

from engine.config import ModelPlacement
from engine.errors import MemoryShortage
from engine.runtime.devices import has_gpu
from engine.runtime.model import Model
from engine.runtime.parts import split_paths

COMPUTE_BUFFER_BYTES = 200 * 2**20
"""What llama.cpp's compute buffers take at our batch sizes, roughly."""


def weights_in_memory(path: Path, placement: ModelPlacement) -> int:
    """Bytes of main memory that a model's weights and buffers take; what lies on a GPU is not among them.

    Raises:
        ModelFileError: the file cannot be read.
    """
    size_bytes = sum(part.stat().st_size for part in split_paths(path) if part.is_file())
    if not has_gpu() or placement.gpu_layers <= 0:
        return round(size_bytes * _share(placement, 1)) + COMPUTE_BUFFER_BYTES
    with contextlib.closing(Model(path, vocabulary_only=True)) as model:
        return round(size_bytes * _share(placement, model.stated_layers)) + COMPUTE_BUFFER_BYTES


def cache_in_memory(model: Model, placement: ModelPlacement, context_tokens: int) -> int:
    """Bytes of main memory that a context of so many tokens takes with its buffers; a layer's cache lies with it."""
    cache_bytes = model.kv_bytes_per_token * context_tokens
    return round(cache_bytes * _share(placement, model.layers)) + COMPUTE_BUFFER_BYTES


def _share(placement: ModelPlacement, layers: int) -> float:
    """Of a model with so many layers, what does not lie on a GPU."""
    if not has_gpu():
        return 1.0
    return 0.0 if placement.gpu_layers < 0 else max(0.0, 1 - placement.gpu_layers / max(1, layers))


def check_memory(path: Path, needed_bytes: int, what: str) -> None:
    """Refuse a load that free memory cannot hold.

    Raises:
        MemoryShortage: with both figures.
    """
    free_bytes = psutil.virtual_memory().available
    if needed_bytes > free_bytes:
        raise MemoryShortage(
            f"{path.name}: {what} needs about {_gigabytes(needed_bytes)} and {_gigabytes(free_bytes)} are free; "
            "choose a smaller model or context, load fewer drafters, or close other programs"
        )


def _gigabytes(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.1f} GB"


def give_back_freed() -> None:
    """Let the system have what was freed; GNU's malloc keeps tens of megabytes of a closed context for later."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(ctypes.c_size_t(0))
