"""The folders Quorum writes to: one for what can be fetched or made again, one for what cannot.

With `QUORUM_HOME` set both lie under it, as `cache` and `data`; otherwise the operating system's own places are used.
Every function creates its folder. Nothing is remembered between calls, so a changed variable takes effect at once.
"""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from engine.errors import EnvironmentProblem


def cache_folder() -> Path:
    """Models, measured costs: can be deleted, will be fetched or made again."""
    home = _home()
    return _made(home / "cache" if home else platformdirs.user_cache_path("quorum", appauthor=False))


def data_folder() -> Path:
    """Settings and conversations: the user's own, never deleted by us."""
    home = _home()
    return _made(home / "data" if home else platformdirs.user_data_path("quorum", appauthor=False))


def models_folder() -> Path:
    """Target and drafter files that Quorum has fetched, and any the user puts beside them."""
    return _made(cache_folder() / "models")


def derived_folder() -> Path:
    """Drafters made from targets, one folder for each target."""
    return _made(cache_folder() / "derived")


def _home() -> Path | None:
    value = os.environ.get("QUORUM_HOME", "")
    return Path(value).expanduser().absolute() if value else None


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot create the folder {folder} ({error.strerror}); set QUORUM_HOME to a folder you can write to"
        ) from error
    return folder
