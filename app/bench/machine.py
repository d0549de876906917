"""What a figure depends on besides the program: the machine, the versions, the model files; and memory used so far."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from engine.config import SetConfig
from engine.drafters.model import DRAFTER_KV_TYPE
from engine.loader import FREE_DRAFTERS, LoadedSet
from engine.runtime.api import native
from engine.runtime.devices import list_devices
from models.gguf_file import read_header
from models.identity import sha256_of
from models.progress import Progress


def machine_document(config: SetConfig) -> dict[str, Any]:
    """The machine and the versions, as plain data."""
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "devices": [device.description for device in list_devices()],
        "physical_cores": psutil.cpu_count(logical=False),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": config.placement.threads,
        "gpu_layers": config.placement.gpu_layers,
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "llama_cpp_python": native().version,
        "llama_cpp": _llama_version(),
        "llama_cpp_features": native().system_info.strip(" |"),
    }


def models_document(target: Path, drafters: Sequence[str], report: Callable[[Progress], None]) -> dict[str, Any]:
    """The files, by hash, as plain data.

    Args:
        drafters: Free drafters by name, others by path.
        report: Hears how far hashing has come.
    """
    return {
        "target": _model(target, report),
        "drafters": [{"name": spec} if spec in FREE_DRAFTERS else _model(Path(spec), report) for spec in drafters],
    }


def kv_document(loaded: LoadedSet) -> dict[str, str]:
    """Number formats of the caches, and how exact drafting is with them."""
    return {
        "target": loaded.context.settings.kv_type.name,
        "drafters": DRAFTER_KV_TYPE.name,
        "exactness": loaded.setting.badge,
    }


def _model(path: Path, report: Callable[[Progress], None]) -> dict[str, Any]:
    facts = read_header(path)
    return {
        "name": path.stem,
        "sha256": sha256_of(path, report),
        "size_bytes": facts.size_bytes,
        "quantisation": facts.quantisation,
        "expansion": facts.expansion,
    }


def _llama_version() -> str:
    try:
        return str(native().lib.llama_version().decode())
    except AttributeError:  # older releases do not say
        return "of unknown version"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def peak_memory_bytes() -> int:
    """The most memory this process has held at once."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
