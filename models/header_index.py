"""Headers that were read before and whose files have not changed since: path, size and time of change tell.

A split model has changed when one of its parts has.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.errors import ModelFileError
from models.atomic import write_json
from models.folders import cache_folder
from models.gguf_file import GgufFacts, read_header, split_paths

_FORMAT = 3
"""Raised whenever what is kept changes its meaning."""
_MOST_ENTRIES = 5000


class HeaderIndex(contextlib.AbstractContextManager["HeaderIndex"]):
    """Facts or faults of many files; what was read is kept when the block ends."""

    def __init__(self) -> None:
        self._entries = _kept()
        self._is_changed = False

    def __exit__(self, *_: object) -> None:
        if self._is_changed:
            entries = dict(list(self._entries.items())[-_MOST_ENTRIES:])
            write_json(_file(), {"format": _FORMAT, "entries": entries})

    def facts(self, path: Path) -> GgufFacts:
        """What `read_header` says, without reading where nothing has changed.

        Raises:
            ModelFileError: the file's fault.
        """
        try:
            state = _state(path)
        except OSError as error:
            raise ModelFileError(f"cannot read {path}: {error.strerror}") from error
        key = str(path)
        entry = self._entries.get(key)
        if entry is None or entry[:2] != state:
            entry = self._entries[key] = [*state, *_read(path)]
            self._is_changed = True
        fault, values = entry[2:]
        if fault:
            raise ModelFileError(fault)
        return GgufFacts(**values | {"path": path})


def _state(path: Path) -> list[int]:
    """Sizes and times of change of all parts, in one number each; a missing later part adds nothing."""
    first, *later = split_paths(path)
    states = [first.stat()]
    for part in later:
        with contextlib.suppress(OSError):
            states.append(part.stat())
    return [sum(state.st_size for state in states), sum(state.st_mtime_ns for state in states)]


def _read(path: Path) -> tuple[str, dict[str, Any] | None]:
    try:
        return "", asdict(read_header(path)) | {"path": str(path)}
    except ModelFileError as error:
        return str(error), None


def _file() -> Path:
    return cache_folder() / "headers.json"


def _kept() -> dict[str, list[Any]]:
    """Empty where the file is missing, damaged or of another version: it only saves time."""
    fields = set(GgufFacts.__dataclass_fields__)
    try:
        document = json.loads(_file().read_text(encoding="utf-8"))
        if document["format"] != _FORMAT:
            return {}
        return {
            key: entry
            for key, entry in document["entries"].items()
            if len(entry) == 4 and (entry[2] or set(entry[3]) == fields)
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
