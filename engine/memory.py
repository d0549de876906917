"""Refusing what free memory cannot hold, before it is allocated."""

from __future__ import annotations

from pathlib import Path

import psutil

from engine.errors import MemoryShortage

COMPUTE_BUFFER_BYTES = 200 * 2**20
"""What llama.cpp's compute buffers take at our batch sizes, roughly."""


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
