"""What is installed: every model file in the places Quorum knows, by name, with its facts or its fault.

Nothing is copied and nothing is loaded, and a header is read again only when its file has changed. A model is named
after its file, or as the program that keeps it names it; where two share a name, the later one is named with its
folder.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

from engine.errors import ModelFileError, SettingError
from models.atomic import write_json
from models.derive import all_derived, remove_derived
from models.folders import data_folder, models_folder
from models.gguf_file import GgufFacts, is_later_part, split_paths
from models.header_index import HeaderIndex
from models.other_tools import Candidate, Origin, files_below, other_tools
from models.starter import MODEL_NAME, starter_path

STARTER_NAME = "starter"
"""Names the starter target wherever a model can be named, besides its file name."""
_NO_LANGUAGE_MODELS = ("clip",)
"""Architectures of the image projectors that lie beside models."""

__all__ = (
    "STARTER_NAME",
    "InstalledModel",
    "Origin",
    "add_folder",
    "added_folders",
    "list_models",
    "path_of",
    "removable",
    "remove_folder",
    "remove_model",
    "resolve",
)


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
    with HeaderIndex() as index:
        return tuple(_described(candidate, index) for candidate in _named())


def resolve(name_or_path: str) -> Path:
    """The file that a user means by a path, or by the name of an installed model."""
    text = name_or_path.strip()
    if not text:
        raise ModelFileError(
            "no model is named; give a name from `python launch.py models`, or the path of a GGUF file"
        )
    path = path_of(text)
    if os.path.isfile(path):
        return split_paths(path)[0] if is_later_part(path) else path
    if text.lower() == STARTER_NAME:
        return _present_starter()
    paths = {candidate.name: candidate.path for candidate in _named()}
    by_lower_case = {name.lower(): path for name, path in paths.items()}
    wanted = text.lower().removesuffix(".gguf")
    if wanted in by_lower_case:
        return by_lower_case[wanted]
    if os.path.isdir(path):
        raise ModelFileError(f"{path} is a folder; name a GGUF file in it")
    near = difflib.get_close_matches(wanted, by_lower_case, n=3, cutoff=0.4)
    near_names = [name for name in paths if name.lower() in near]
    hint = f"did you mean {' or '.join(near_names)}?" if near_names else "`python launch.py models` lists what there is"
    raise ModelFileError(f"no model file and no installed model is called {name_or_path!r}; {hint}")


def path_of(text: str) -> Path:
    """The path in a text as people paste it: in quotes, as a `file:` address, from the home folder on."""
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1].strip()
    if text.lower().startswith("file:"):
        text = url2pathname(urlsplit(text).path) if os.name == "nt" else unquote(urlsplit(text).path)
    return Path(os.path.expanduser(text))


def removable() -> tuple[str, ...]:
    """What `remove_model` takes: models that Quorum fetched or made, and the folders the user added."""
    ours = (Origin.STARTER, Origin.FETCHED, Origin.DERIVED)
    names = (candidate.name for candidate in _named() if candidate.origin in ours)
    return (*names, *map(str, added_folders()))


def remove_model(name: str) -> str:
    """Delete a derived or fetched model, or forget an added folder; returns what was removed.

    Other files belong to other programs or to the user, and are refused.
    """
    folder = path_of(name)
    if name.strip() and (os.path.isdir(folder) or Path(os.path.abspath(folder)) in added_folders()):
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
    resolved = Path(os.path.abspath(os.path.expanduser(folder)))
    if os.path.isfile(resolved):
        raise SettingError(f"{folder} is a file; add the folder it lies in")
    if not os.path.isdir(resolved):
        raise SettingError(f"no such folder: {folder}")
    resolved = resolved.resolve()
    if resolved not in added_folders():
        _save_folders((*added_folders(), resolved))


def remove_folder(folder: Path) -> None:
    """Stop looking in this folder; nothing in it is touched."""
    resolved = folder.expanduser().resolve()
    if resolved not in added_folders():
        known = ", ".join(map(str, added_folders())) or "none"
        raise SettingError(f"{folder} is not among the added folders: {known}")
    _save_folders(tuple(known for known in added_folders() if known != resolved))


def _candidates() -> Iterator[Candidate]:
    """Every file that should be a model: ours, then those of the user's folders, then other programs'."""
    yield Candidate(Origin.STARTER, starter_path().stem, starter_path())
    yield from files_below(models_folder(), Origin.FETCHED)
    for model in all_derived():
        yield Candidate(Origin.DERIVED, model.path.stem, model.path, model.target_sha256)
    for folder in added_folders():
        yield from files_below(folder, Origin.FOLDER)
    yield from other_tools()


def _named() -> Iterator[Candidate]:
    """Each file once, under a name of its own."""
    seen: set[Path] = set()
    names: set[str] = set()
    for candidate in _candidates():
        if not candidate.path.is_file():
            continue
        resolved = candidate.path.resolve()  # after the look: a link that leads to itself leads nowhere
        if resolved in seen:
            continue
        seen.add(resolved)
        name = candidate.name
        for parent in candidate.path.parents:
            if name.lower() not in names:
                break
            name = f"{parent.name}/{name}"
        names.add(name.lower())
        yield replace(candidate, name=name)


def _described(candidate: Candidate, index: HeaderIndex) -> InstalledModel:
    path = candidate.path
    facts = None
    try:
        facts = index.facts(path)
        fault = ""
    except ModelFileError as error:
        fault = str(error)
    if facts is not None and (facts.kind != "model" or facts.architecture in _NO_LANGUAGE_MODELS):
        fault = f"{path} holds no language model but {facts.kind if facts.kind != 'model' else facts.architecture!r}"
    elif facts is not None and not facts.is_complete:
        fault = f"{path} is the first of {facts.split_count} parts, and some of the others are missing"
    return InstalledModel(candidate.name, path, candidate.origin, facts, fault, candidate.derived_from)


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
