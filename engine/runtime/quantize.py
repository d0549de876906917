"""Copies of a model with fewer bits, made by llama.cpp. A copy is whole or absent."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from engine.errors import ModelFileError
from engine.runtime.api import native


def quantize(source: Path, destination: Path, ftype: int, threads: int) -> None:
    """Write `source` to `destination` in the format that llama.cpp numbers `ftype` (`llama_cpp.LLAMA_FTYPE_*`).

    A source that is quantised already is quantised again. The call cannot be interrupted, and other Python threads
    run meanwhile.
    """
    if threads < 1:
        raise ValueError(f"threads must be 1 or more, found {threads}")
    if not source.is_file():
        raise ModelFileError(f"no such model file: {source}")
    lib = native().lib
    parameters = lib.llama_model_quantize_default_params()
    parameters.ftype = ftype
    parameters.nthread = threads
    parameters.allow_requantize = True
    temporary = destination.with_name(f".{destination.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.part")
    try:
        native().log.clear()
        code = lib.llama_model_quantize(os.fsencode(source), os.fsencode(temporary), parameters)
        if code != 0:
            raise ModelFileError(
                f"llama.cpp could not quantise {source} to format {ftype} (code {code}): "
                f"the file is damaged, the format needs more than the file has, or the disk is full "
                f"(llama.cpp: {native().log.problem()})"
            )
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, destination)
    finally:
        temporary.unlink(missing_ok=True)
