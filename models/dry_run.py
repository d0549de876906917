"""Asks llama.cpp what a model and its context would take, without loading a weight.

It runs as a process of its own, `python -m models.dry_run`: a model that llama.cpp cannot lay out without its weights
ends that process and not the app. Requests come as JSON on stdin, findings go as JSON to stdout. llama.cpp tells sizes
in its log only, so they are read from there.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from engine.config import KvType
from engine.errors import QuorumError
from engine.runtime.api import native
from engine.runtime.context import Context, ContextSettings
from engine.runtime.model import Model
from engine.runtime.vocabulary import Vocabulary

_MEBIBYTE = 2**20
_MOST_CONTEXT_TOKENS = 2**22
"""More than any model is made for: a slip of the finger, over which a dry run would take half a minute."""
_PATIENCE_SECONDS = 60
_BUFFER = re.compile(r"(?P<device>\S+)\s+(?P<kind>model|output|compute) buffer size =\s*(?P<size>[\d.]+) MiB")
_CACHE = re.compile(r"(?:kv_cache|memory_recurrent)\S*: size =\s*(?P<size>[\d.]+) MiB")


@dataclass(frozen=True, slots=True)
class Layout:
    """A model and the context it would get."""

    path: Path
    gpu_layers: int
    settings: ContextSettings


@dataclass(frozen=True, slots=True)
class Finding:
    """What one layout takes besides its weights."""

    cache_bytes: int
    compute_bytes: dict[str, int]
    """By device."""
    output_bytes: int
    bookkeeping_bytes: int
    """Vocabulary, graph and other small things, measured."""
    repacks: bool
    """Whether some weights would be copied into another order."""


def dry_run(layouts: Sequence[Layout]) -> tuple[Finding | None, ...]:
    """A finding for each layout, None where llama.cpp does not say. Takes about a second and little memory."""
    if any(layout.settings.context_tokens > _MOST_CONTEXT_TOKENS for layout in layouts):
        return (None,) * len(layouts)
    request = [
        {
            "path": str(layout.path),
            "gpu_layers": layout.gpu_layers,
            "settings": asdict(layout.settings) | {"kv_type": layout.settings.kv_type.name},
        }
        for layout in layouts
    ]
    root = str(Path(__file__).resolve().parent.parent)
    try:
        finished = subprocess.run(
            [sys.executable, "-m", "models.dry_run"],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            cwd=root,
            env=os.environ | {"GGML_NO_BACKTRACE": "1"},
            timeout=_PATIENCE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return (None,) * len(layouts)
    lines = finished.stdout.splitlines()
    findings = [Finding(**values) if (values := json.loads(line)) else None for line in lines]
    return (*findings, *[None] * (len(layouts) - len(findings)))


class _Sizes:
    """Keeps the sizes that llama.cpp logs."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._partial = ""

    def receive(self, _level: int, text: bytes, _user_data: Any) -> None:
        self._partial += text.decode("utf-8", "replace")
        *complete, self._partial = self._partial.split("\n")
        self.lines.extend(line for line in complete if " size =" in line)


class _UnallocatedModel(Model):
    """A model whose weights exist in name only."""

    def __init__(self, path: Path, gpu_layers: int) -> None:
        lib = native().lib
        parameters = lib.llama_model_default_params()
        parameters.no_alloc = True
        parameters.load_mode = lib.LLAMA_LOAD_MODE_NONE  # a mapped model cannot be laid out without its weights
        parameters.n_gpu_layers = 999 if gpu_layers < 0 else gpu_layers
        self.path = path
        self.dependants = []
        self.handle = lib.llama_model_load_from_file(str(path).encode("utf-8"), parameters)
        if not self.handle:
            raise QuorumError(f"{path} cannot be laid out")
        self.vocabulary = Vocabulary(lib.llama_model_get_vocab(self.handle))


def _find(path: Path, gpu_layers: int, settings: ContextSettings, sizes: _Sizes) -> Finding:
    """The model stays loaded until the process ends, so that the next one cannot use the memory it has freed."""
    sizes.lines.clear()
    process = psutil.Process()
    before_bytes = process.memory_info().rss
    model = _UnallocatedModel(path, gpu_layers)
    Context(model, settings)
    bookkeeping_bytes = max(0, process.memory_info().rss - before_bytes)
    compute: dict[str, int] = {}
    output_bytes = cache_bytes = 0
    repacks = False
    for line in sizes.lines:
        if match := _BUFFER.search(line):
            size_bytes = round(float(match["size"]) * _MEBIBYTE)
            if match["kind"] == "compute":
                compute[match["device"]] = compute.get(match["device"], 0) + size_bytes
            elif match["kind"] == "output":
                output_bytes += size_bytes
            else:
                repacks = repacks or "REPACK" in match["device"]
        elif match := _CACHE.search(line):
            cache_bytes += round(float(match["size"]) * _MEBIBYTE)
    return Finding(cache_bytes, compute, output_bytes, bookkeeping_bytes, repacks)


def main() -> None:
    sizes = _Sizes()
    lib = native().lib
    callback = lib.llama_log_callback(sizes.receive)  # named, because llama.cpp only points at it
    lib.llama_log_set(callback, ctypes.c_void_p(0))
    for request in json.load(sys.stdin):
        settings = request["settings"]
        settings["kv_type"] = KvType[settings["kv_type"]]
        try:
            finding = _find(Path(request["path"]), request["gpu_layers"], ContextSettings(**settings), sizes)
        except QuorumError:
            print("null", flush=True)
        else:
            print(json.dumps(asdict(finding)), flush=True)


if __name__ == "__main__":
    main()
