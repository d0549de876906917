"""What llama.cpp can run on here, and the cache format that follows from it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from engine.config import Exactness, KvType
from engine.runtime.api import native


@dataclass(frozen=True, slots=True)
class Device:
    """A processor llama.cpp can place layers on."""

    name: str
    description: str
    free_bytes: int
    total_bytes: int


def has_gpu() -> bool:
    """Whether this build of llama.cpp can place layers on a GPU."""
    return native().has_gpu_offload


def list_devices() -> tuple[Device, ...]:
    """All devices of all backends; empty where the library does not tell."""
    library = _ggml()
    if library is None:
        return ()
    devices = []
    for index in range(library.ggml_backend_dev_count()):
        device = library.ggml_backend_dev_get(index)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        library.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        name = library.ggml_backend_dev_name(device).decode("utf-8", "replace")
        description = library.ggml_backend_dev_description(device).decode("utf-8", "replace")
        devices.append(Device(name, description, free.value, total.value))
    return tuple(devices)


def _ggml() -> Any:
    """The library that lists devices, which llama-cpp-python loads but does not bind."""
    native()
    from llama_cpp import _ggml

    library = _ggml.libggml
    try:
        library.ggml_backend_dev_count.restype = ctypes.c_size_t
        library.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
        library.ggml_backend_dev_get.restype = ctypes.c_void_p
        for name in ("ggml_backend_dev_name", "ggml_backend_dev_description"):
            getattr(library, name).argtypes = [ctypes.c_void_p]
            getattr(library, name).restype = ctypes.c_char_p
        size_pointer = ctypes.POINTER(ctypes.c_size_t)
        library.ggml_backend_dev_memory.argtypes = [ctypes.c_void_p, size_pointer, size_pointer]
        library.ggml_backend_dev_memory.restype = None
    except AttributeError:
        return None
    return library


def choose_kv_type(exactness: Exactness) -> KvType:
    """What the target's cache format is expected to be; `engine.setting` measures it.

    On a CPU, keys in BF16 beside values in F16 give bit-equal logits in every batch size. F16 alone does so only in
    short contexts: through a long cache of one such format llama.cpp goes by other ways for other sizes of a pass. GPUs
    are built for F16.
    """
    return KvType.F16 if exactness is Exactness.FAST or has_gpu() else KvType.BF16_F16
