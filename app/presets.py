"""Sampling presets: named ways to draw the next token. Some are ours; those that the user keeps are in a settings file.

A user's preset may have the name of one of ours, and stands in its place until it is forgotten.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from engine.config import Sampling
from engine.errors import EnvironmentProblem, SettingError
from models.atomic import write_json
from models.folders import data_folder

OURS: Mapping[str, Sampling] = MappingProxyType(
    {
        "Exact": Sampling(temperature=0, top_k=0, top_p=1, min_p=0),
        "Balanced": Sampling(),
        "Creative": Sampling(temperature=1.1, top_k=0, top_p=0.98, min_p=0.03, repeat_penalty=1.05),
    }
)
KEPT = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed")
"""What of a sampling makes up a preset."""
LONGEST_NAME = 40


def presets() -> dict[str, Sampling]:
    """All presets by name, ours first.

    Raises:
        EnvironmentProblem: the file of the user's own cannot be read.
    """
    return {**OURS, **own_presets()}


def own_presets() -> dict[str, Sampling]:
    """Those that the user keeps.

    Raises:
        EnvironmentProblem: their file cannot be read.
    """
    try:
        document = json.loads(_file().read_text(encoding="utf-8"))
        return {str(name): Sampling(**{part: values[part] for part in KEPT}) for name, values in document.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SettingError) as error:
        raise EnvironmentProblem(
            f"{_file()} cannot be read ({error}); mend it, or delete it and keep your presets again"
        ) from error


def keep(name: str, sampling: Sampling) -> str:
    """Keep a preset under a name, in place of one of that name; returns the name as it is kept.

    Raises:
        SettingError: the name is empty or too long.
        EnvironmentProblem: the file cannot be read or written.
    """
    name = " ".join(name.split())
    if not 0 < len(name) <= LONGEST_NAME:
        found = f"{len(name)} characters" if name else "none"
        raise SettingError(f"a preset needs a name of 1 to {LONGEST_NAME} characters, found {found}")
    _save({**own_presets(), name: sampling})
    return name


def forget(name: str) -> None:
    """Forget a preset of the user's own; ours stay.

    Raises:
        EnvironmentProblem: the file cannot be read or written.
    """
    _save({known: sampling for known, sampling in own_presets().items() if known != name})


def name_of(sampling: Sampling, known: Mapping[str, Sampling] = OURS, first: str = "") -> str:
    """The preset that draws so, this one if it is one that does; empty for none."""
    names = [first, *known] if first in known else [*known]
    return next((name for name in names if _values(known[name]) == _values(sampling)), "")


def _values(sampling: Sampling) -> dict[str, float | int | None]:
    return {part: getattr(sampling, part) for part in KEPT}


def _file() -> Path:
    return data_folder() / "presets.json"


def _save(own: Mapping[str, Sampling]) -> None:
    write_json(_file(), {name: _values(sampling) for name, sampling in own.items()})
