"""Model files that other programs keep on this machine, under the names their users know.

Nothing is copied, written or locked. A tool that is not installed has no folder and yields nothing; a folder that
cannot be read is passed over.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from models.gguf_file import is_later_part

_MAX_DEPTH = 4
"""Folders below a model folder that are searched: publisher/model/file and one to spare."""
_MAX_MANIFEST_BYTES = 1 << 16
_OLLAMA_MODEL_LAYER = "application/vnd.ollama.image.model"
_DIGEST = re.compile(r"^sha256:[0-9a-f]{64}$")
_YAML_TEXT = re.compile(r"""^(?P<key>\w+):\s*(?P<quote>['"]?)(?P<value>.+?)(?P=quote)\s*$""", re.MULTILINE)


class Origin(str, Enum):
    """Where an installed model comes from."""

    STARTER = "starter"
    DERIVED = "derived"
    FETCHED = "fetched"
    FOLDER = "folder"
    HUB_CACHE = "hugging face"
    LLAMA_CPP = "llama.cpp"
    LM_STUDIO = "lm studio"
    OLLAMA = "ollama"
    JAN = "jan"
    GPT4ALL = "gpt4all"
    ELSEWHERE = "elsewhere"
    """In no place that is looked into; named by its path."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A file that should be a model, and what to call it."""

    origin: Origin
    name: str
    path: Path
    derived_from: str = ""


def other_tools() -> Iterator[Candidate]:
    """What all the other programs have."""
    for folder in _hub_caches():
        yield from _hub_cache(folder)
    for origin, folders in (
        (Origin.LLAMA_CPP, _llama_cpp_folders()),
        (Origin.LM_STUDIO, (Path.home() / ".lmstudio" / "models", Path.home() / ".cache" / "lm-studio" / "models")),
        (Origin.GPT4ALL, (_application_folder("nomic.ai", "nomic.ai") / "GPT4All",)),
    ):
        for folder in folders:
            yield from files_below(folder, origin)
    for folder in _ollama_folders():
        yield from _ollama(folder)
    yield from _jan(_application_folder("Jan", "Jan") / "data")


def files_below(folder: Path, origin: Origin) -> Iterator[Candidate]:
    """GGUF files in a folder and below, in order; hidden ones and later parts of split models left out.

    Links to folders are followed, as many keep their models on another disk, but not in circles and not upwards.
    """
    passed = set(Path(os.path.realpath(folder)).parents)
    for parent, folders, files in os.walk(folder, followlinks=True):
        place = Path(os.path.realpath(parent))
        if place in passed:
            folders.clear()
            continue
        passed.add(place)
        depth = len(Path(parent).relative_to(folder).parts)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and depth < _MAX_DEPTH)
        for name in sorted(files):
            path = Path(parent, name)
            if path.suffix.lower() == ".gguf" and not name.startswith(".") and not is_later_part(path):
                yield Candidate(origin, path.stem, path)


def _hub_caches() -> tuple[Path, ...]:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    home = Path(os.path.expanduser(os.environ.get("HF_HOME") or home))
    folder = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or home / "hub"
    return _distinct(Path(os.path.expanduser(folder)), Path(os.environ.get("LLAMA_CACHE") or folder))


def _hub_cache(folder: Path) -> Iterator[Candidate]:
    """Each file of a repository once: as the branch `main` has it, else as the newest snapshot does."""
    for repository in _folders_in(folder, "models--*"):
        current = repository / "snapshots" / _text_of(repository / "refs" / "main").strip()
        snapshots = sorted(_folders_in(repository / "snapshots", "*"), key=_changed_at, reverse=True)
        seen: set[Path] = set()
        for snapshot in sorted(snapshots, key=lambda each: each != current):
            for candidate in files_below(snapshot, Origin.HUB_CACHE):
                inside = candidate.path.relative_to(snapshot)
                if inside not in seen:
                    seen.add(inside)
                    yield candidate


def _llama_cpp_folders() -> tuple[Path, ...]:
    override = os.environ.get("LLAMA_CACHE")
    if override:
        return (Path(override),)
    if sys.platform == "darwin":
        return (Path.home() / "Library" / "Caches" / "llama.cpp",)
    if sys.platform == "win32":
        return (Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "llama.cpp",)
    return (Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llama.cpp",)


def _ollama_folders() -> tuple[Path, ...]:
    override = os.environ.get("OLLAMA_MODELS")
    if override:
        return (Path(override),)
    own = Path.home() / ".ollama" / "models"
    return (own, Path("/usr/share/ollama/.ollama/models")) if sys.platform.startswith("linux") else (own,)


def _ollama(folder: Path) -> Iterator[Candidate]:
    """A manifest's path is the model's name; its model layer is the file, kept under its hash."""
    manifests = folder / "manifests"
    for parent, folders, files in os.walk(manifests):
        folders.sort()
        for tag in sorted(files):
            parts = (*Path(parent).relative_to(manifests).parts, tag)
            digest = _ollama_digest(Path(parent, tag))
            if len(parts) >= 3 and digest:
                yield Candidate(Origin.OLLAMA, _ollama_name(parts), folder / "blobs" / digest.replace(":", "-"))


def _ollama_name(parts: tuple[str, ...]) -> str:
    """As `ollama list` shows it: the usual registry and namespace go without saying."""
    *place, model, tag = parts
    if place == ["registry.ollama.ai", "library"]:
        place = []
    elif place[0] == "registry.ollama.ai":
        place = place[1:]
    return "/".join([*place, f"{model}:{tag}"])


def _ollama_digest(manifest: Path) -> str:
    try:
        layers = json.loads(_text_of(manifest))["layers"]
        digests = [str(layer["digest"]) for layer in layers if layer["mediaType"] == _OLLAMA_MODEL_LAYER]
    except (ValueError, KeyError, TypeError):
        return ""
    return digests[0] if digests and _DIGEST.match(digests[0]) else ""


def _jan(data: Path) -> Iterator[Candidate]:
    """Jan describes each model in a `model.yml`, whose file is often called just `model.gguf`."""
    models = data / "llamacpp" / "models"
    for parent, folders, files in os.walk(models):
        folders.sort()
        if "model.yml" in files:
            values = {
                match["key"]: match["value"] for match in _YAML_TEXT.finditer(_text_of(Path(parent, "model.yml")))
            }
            if values.get("model_path"):
                name = values.get("name") or "/".join(Path(parent).relative_to(models).parts)
                yield Candidate(Origin.JAN, name, data / values["model_path"])


def _application_folder(name: str, macos_name: str) -> Path:
    """Where an application keeps its data on this system."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / macos_name
    if sys.platform == "win32":
        variable = "APPDATA" if name == "Jan" else "LOCALAPPDATA"
        return Path(os.environ.get(variable) or Path.home() / "AppData" / "Local") / name
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / name


def _folders_in(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(path for path in folder.glob(pattern) if path.is_dir())
    except OSError:
        return []


def _distinct(*folders: Path) -> tuple[Path, ...]:
    return tuple(dict.fromkeys(folders))


def _changed_at(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0


def _text_of(path: Path) -> str:
    """A small text file's content; empty where it is missing, unreadable or not small."""
    try:
        with open(path, "rb") as file:
            content = file.read(_MAX_MANIFEST_BYTES + 1)
    except OSError:
        return ""
    return content.decode("utf-8", "replace") if len(content) <= _MAX_MANIFEST_BYTES else ""
