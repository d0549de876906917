"""What is installed: every model file in the places Quorum knows, by name, with its facts or its fault.

Nothing is copied and nothing is loaded. A place is a kind of origin and the files found there; another tool's folder
becomes known by one more entry in `_places`. A model is named after its file; where two files share a name, the
later one is named with its folder.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from engine.errors import ModelFileError, SettingError
from models.atomic import write_json
from models.derive import all_derived, remove_derived
from models.folders import data_folder, models_folder
from models.gguf_file import GgufFacts, is_later_part, read_header, split_paths
from models.starter import MODEL_NAME, starter_path

STARTER_NAME = "starter"
"""Names the starter target wherever a model can be named, besides its file name."""

_MAX_DEPTH = 4
"""Folders below a model folder that are searched: publisher/model/file and one to spare."""


class Origin(str, Enum):
    """Where an installed model comes from."""

    STARTER = "starter"
    DERIVED = "derived"
    FETCHED = "fetched"
    FOLDER = "folder"


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """A model file: usable when `fault` is empty, and then `facts` are known."""

    name: str
    path: Path
    origin: Origin
    facts: GgufFacts | None
    fault: str = ""
    derived_from: str = ""
    """For a derived copy: the SHA-256 of the target it drafts for."""


def list_models() -> tuple[InstalledModel, ...]:
    """Every model file found, starter first; a broken one is listed with its fault."""
    return tuple(_described(name, path, origin, derived_from) for name, path, origin, derived_from in _named_places())


def resolve(name_or_path: str) -> Path:
    """The file that a user means by a path, or by the name of an installed model."""
    text = name_or_path.strip()
    path = Path(text).expanduser()
    if text and path.is_file():
        return path
    if text.lower() == STARTER_NAME:
        return _present_starter()
    paths = {name: path for name, path, _, _ in _named_places()}
    by_lower_case = {name.lower(): path for name, path in paths.items()}
    wanted = text.lower().removesuffix(".gguf")
    if wanted in by_lower_case:
        return by_lower_case[wanted]
    if text and path.is_dir():
        raise ModelFileError(f"{path} is a folder; name a GGUF file in it")
    near = difflib.get_close_matches(wanted, by_lower_case, n=3, cutoff=0.4)
    near_names = [name for name in paths if name.lower() in near]
    hint = f"did you mean {' or '.join(near_names)}?" if near_names else "`python launch.py models` lists what there is"
    raise ModelFileError(f"no model file and no installed model is called {name_or_path!r}; {hint}")


def remove_model(name: str) -> str:
    """Delete a derived or fetched model, or forget an added folder; returns what was removed.

    Other files belong to other programs or to the user, and are refused.
    """
    folder = Path(name).expanduser()
    if folder.is_dir() or folder.resolve() in added_folders():
        remove_folder(folder)
        return f"the folder {folder} from the places to look in; its files stay"
    path = resolve(name)
    for derived in all_derived():
        if path.resolve() == derived.path.resolve():
            remove_derived(derived)
            return derived.name
    if not path.resolve().is_relative_to(models_folder().resolve()):
        raise SettingError(f"{path} was not fetched or made by Quorum, so it is not Quorum's to delete")
    for part in split_paths(path):
        part.unlink(missing_ok=True)
    return path.name


def added_folders() -> tuple[Path, ...]:
    """The folders the user added, in that order."""
    try:
        settings = json.loads(_settings_file().read_text(encoding="utf-8"))
        return tuple(Path(folder) for folder in settings["folders"])
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingError(
            f"{_settings_file()} cannot be read ({error}); mend it, or delete it and add your folders again"
        ) from error


def add_folder(folder: Path) -> None:
    """Look for models in this folder too, from now on."""
    resolved = folder.expanduser().resolve()
    if not resolved.is_dir():
        raise SettingError(f"no such folder: {folder}")
    if resolved not in added_folders():
        _save_folders((*added_folders(), resolved))


def remove_folder(folder: Path) -> None:
    """Stop looking in this folder; nothing in it is touched."""
    resolved = folder.expanduser().resolve()
    if resolved not in added_folders():
        known = ", ".join(map(str, added_folders())) or "none"
        raise SettingError(f"{folder} is not among the added folders: {known}")
    _save_folders(tuple(known for known in added_folders() if known != resolved))


def _places() -> Iterator[tuple[Origin, Path, str]]:
    """Every candidate file with its origin and, for a derived copy, its target's hash."""
    yield Origin.STARTER, starter_path(), ""
    for path in _model_files(models_folder()):
        yield Origin.FETCHED, path, ""
    for model in all_derived():
        yield Origin.DERIVED, model.path, model.target_sha256
    for folder in added_folders():
        for path in _model_files(folder):
            yield Origin.FOLDER, path, ""


def _named_places() -> Iterator[tuple[str, Path, Origin, str]]:
    """Each file once, under a name of its own."""
    seen: set[Path] = set()
    names: set[str] = set()
    for origin, path, derived_from in _places():
        resolved = path.resolve()
        if resolved in seen or not path.is_file():
            continue
        seen.add(resolved)
        name = path.stem
        for parent in path.parents:
            if name.lower() not in names:
                break
            name = f"{parent.name}/{name}"
        names.add(name.lower())
        yield name, path, origin, derived_from


def _model_files(folder: Path) -> Iterator[Path]:
    """GGUF files in a folder and below, in order; hidden ones and later parts of split models left out."""
    for parent, folders, files in os.walk(folder):
        depth = len(Path(parent).relative_to(folder).parts)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and depth < _MAX_DEPTH)
        for name in sorted(files):
            path = Path(parent, name)
            if path.suffix.lower() == ".gguf" and not name.startswith(".") and not is_later_part(path):
                yield path


def _described(name: str, path: Path, origin: Origin, derived_from: str) -> InstalledModel:
    try:
        facts = read_header(path)
    except ModelFileError as error:
        return InstalledModel(name, path, origin, None, str(error), derived_from)
    fault = ""
    if facts.kind != "model":
        fault = f"{path} holds no language model but {facts.kind!r}"
    elif not facts.is_complete:
        fault = f"{path} is the first of {facts.split_count} parts, and some of the others are missing"
    return InstalledModel(name, path, origin, facts, fault, derived_from)


def _present_starter() -> Path:
    if not starter_path().is_file():
        raise ModelFileError(
            f"the starter ({MODEL_NAME}) is not on this machine; `python launch.py models fetch` gets it"
        )
    return starter_path()


def _settings_file() -> Path:
    return data_folder() / "models.json"


def _save_folders(folders: tuple[Path, ...]) -> None:
    write_json(_settings_file(), {"folders": [str(folder) for folder in folders]})
