"""Where each model runs, as users wrote it: layers on the GPU and threads, kept in a settings file.

A file has numbers of its own as a target and others as a drafter. What the command line says stands in place of what
was kept, until somebody writes something else in the page.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from app.choices import SetChoice, whole_number
from engine.config import ModelPlacement
from engine.errors import EnvironmentProblem, QuorumError
from engine.loader import FREE_DRAFTERS
from engine.runtime.devices import has_gpu
from models.atomic import write_json
from models.folders import data_folder
from models.library import STARTER_NAME, resolve
from models.starter import starter_path

LAYERS, THREADS = "Layers on the GPU", "CPU threads"
"""What the numbers are called, in the page and where one of them is wrong."""


@dataclass(frozen=True, slots=True)
class Written:
    """What stands in the boxes of one model; an empty text leaves the number to be chosen."""

    gpu_layers: str = ""
    threads: str = ""


NOTHING = Written()


class Placements:
    """What was written for each model, shared by all pages and kept in a file.

    A file that cannot be read is left alone: nothing is written for any model then, and keeping something says why.
    """

    def __init__(self, base: SetChoice) -> None:
        """Args:
        base: What the command line says.
        """
        self._lock = threading.Lock()
        try:
            kept = _read()
        except EnvironmentProblem:
            kept = {}
        self._written = {role: _without_said(role, files, base) for role, files in kept.items()}

    def of_target(self, target: str) -> Written:
        """What was written for a target, by name or path."""
        return self._of("target", target)

    def of_drafter(self, drafter: str) -> Written:
        """What was written for a drafter, by name or path."""
        return self._of("drafter", drafter)

    def write_target(self, target: str, written: Written) -> None:
        """Take over what was written for a target, and keep it.

        Raises:
            EnvironmentProblem: the file cannot be read or written.
        """
        self._write("target", target, written)

    def write_drafter(self, drafter: str, written: Written) -> None:
        """Take over what was written for a drafter, and keep it.

        Raises:
            EnvironmentProblem: the file cannot be read or written.
        """
        self._write("drafter", drafter, written)

    def placed(self, choice: SetChoice) -> SetChoice:
        """The choice with what was written for its models; where nothing was, it stays as it is.

        Raises:
            SettingError: what was written is no whole number.
        """
        return placed(choice, self.of_target(choice.target), self.of_drafters(choice.drafters or ()))

    def of_drafters(self, drafters: Sequence[str]) -> dict[str, Written]:
        """What was written for each of these that is a file, by their names."""
        return {drafter: self.of_drafter(drafter) for drafter in drafters if drafter not in FREE_DRAFTERS}

    def _of(self, role: str, name: str) -> Written:
        with self._lock:
            return self._written.get(role, {}).get(_file_of(name), NOTHING)

    def _write(self, role: str, name: str, written: Written) -> None:
        file = _file_of(name)
        with self._lock:
            self._written.setdefault(role, {})[file] = written
            kept = _read()
            files = {**kept.get(role, {}), file: written}
            _save({**kept, role: {name: texts for name, texts in files.items() if _is_worth_keeping(texts)}})


def placed(choice: SetChoice, target: Written, drafters: Mapping[str, Written]) -> SetChoice:
    """The choice with these numbers; where none is written, it stays as it is.

    Args:
        choice: Its drafters are those that can be placed.
        target: What is written for the target.
        drafters: What is written for each drafter, by its name in `choice`.

    Raises:
        SettingError: what is written is no whole number.
    """
    threads = whole_number(target.threads, THREADS)
    own_threads = _numbers({name: texts.threads for name, texts in drafters.items()}, THREADS)
    choice = replace(
        choice,
        threads=choice.threads if threads is None else threads,
        drafter_threads=_own(choice.drafter_threads, own_threads, choice.drafters or ()),
    )
    if not has_gpu():
        return choice
    layers = whole_number(target.gpu_layers, LAYERS)
    own_layers = _numbers({name: texts.gpu_layers for name, texts in drafters.items()}, LAYERS)
    return replace(
        choice,
        gpu_layers=choice.gpu_layers if layers is None else layers,
        drafter_gpu_layers=_own(choice.drafter_gpu_layers, own_layers, choice.drafters or ()),
    )


def _numbers(texts: Mapping[str, str], label: str) -> dict[str, int]:
    found = {name: whole_number(text, label) for name, text in texts.items()}
    return {name: number for name, number in found.items() if number is not None}


def _own(
    before: tuple[tuple[str, int], ...], written: Mapping[str, int], drafters: Sequence[str]
) -> tuple[tuple[str, int], ...]:
    """The numbers of single drafters, as far as these are chosen."""
    numbers = {**dict(before), **written}
    return tuple((name, number) for name, number in numbers.items() if name in drafters)


def _is_worth_keeping(written: Written) -> bool:
    """Whether it says something, and something that a model can be loaded with."""
    try:
        layers, threads = whole_number(written.gpu_layers, LAYERS), whole_number(written.threads, THREADS)
        ModelPlacement(1 if threads is None else threads, 0 if layers is None else layers)
    except QuorumError:
        return False
    return written != NOTHING


def _without_said(role: str, files: Mapping[str, Written], base: SetChoice) -> dict[str, Written]:
    """What was kept, less the numbers that the command line gives."""
    if role == "target":
        said_layers = set() if base.gpu_layers is None else set(files)
        said_threads = set() if base.threads is None else set(files)
    else:
        said_layers = {_file_of(name) for name, _ in base.drafter_gpu_layers}
        said_threads = {_file_of(name) for name, _ in base.drafter_threads}
    return {
        file: Written(
            "" if file in said_layers else texts.gpu_layers,
            "" if file in said_threads else texts.threads,
        )
        for file, texts in files.items()
    }


def _file_of(name: str) -> str:
    """The file that a name stands for; the name itself where there is none."""
    try:
        return str((starter_path() if name == STARTER_NAME else resolve(name)).resolve())
    except QuorumError:
        return name


def _read() -> dict[str, dict[str, Written]]:
    """What is kept: by role, then by file.

    Raises:
        EnvironmentProblem: the file cannot be read.
    """
    try:
        document: dict[str, dict[str, Any]] = json.loads(_file().read_text(encoding="utf-8"))
        return {
            role: {file: Written(str(texts["gpu_layers"]), str(texts["threads"])) for file, texts in files.items()}
            for role, files in document.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EnvironmentProblem(
            f"{_file()} cannot be read ({error}); mend it, or delete it and write the numbers again"
        ) from error


def _save(kept: Mapping[str, Mapping[str, Written]]) -> None:
    write_json(
        _file(),
        {
            role: {file: {"gpu_layers": texts.gpu_layers, "threads": texts.threads} for file, texts in files.items()}
            for role, files in kept.items()
        },
    )


def _file() -> Path:
    return data_folder() / "placements.json"
