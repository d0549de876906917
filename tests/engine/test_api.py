"""The one door to llama-cpp-python names what it needs before anything needs it."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

import engine
from engine.errors import EnvironmentProblem
from engine.runtime.api import REQUIRED_NAMES, REQUIRED_VERSION, Native, NativeLog, native

_USE = re.compile(r"\blib\.(llama_\w+)")


def test_every_name_that_is_used_is_checked_at_the_start() -> None:
    root = Path(engine.__file__).parent
    used = {name for path in root.rglob("*.py") for name in _USE.findall(path.read_text(encoding="utf-8"))}
    assert len(used) > 40
    assert used <= set(REQUIRED_NAMES)
    assert all(hasattr(native().lib, name) for name in REQUIRED_NAMES)


def test_an_old_library_is_refused_with_both_versions_and_what_it_lacks() -> None:
    old = ModuleType("llama_cpp")
    old.__dict__.update({name: None for name in REQUIRED_NAMES if name != "llama_memory_seq_cp"}, __version__="0.2.9")
    with pytest.raises(EnvironmentProblem, match="llama_memory_seq_cp") as caught:
        Native(old)
    assert "0.2.9" in str(caught.value)
    assert REQUIRED_VERSION in str(caught.value)


def test_the_log_puts_pieces_together_and_names_the_first_error() -> None:
    log = NativeLog()
    for level, text in ((1, b"loading"), (5, b" ...\n"), (2, b"note\n"), (4, b"error: no such "), (5, b"tensor\n")):
        log.receive(level, text, None)
    assert log.problem() == "error: no such tensor"
    log.clear()
    assert log.problem() == "llama.cpp gave no reason"
