"""A file's identity: the SHA-256 of its bytes, computed once and remembered until the file changes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterable
from pathlib import Path

from engine.errors import ModelFileError
from models.atomic import write_json
from models.folders import cache_folder
from models.progress import Progress, Report, no_report, stop_if_asked

_CHUNK_BYTES = 1 << 22


def sha256_of(path: Path, report: Report = no_report, cancel: threading.Event | None = None) -> str:
    """The hash of the file as it is now. A file of the same path, size and time of change is not read again."""
    try:
        state = path.stat()
        key = str(path.resolve())
        known = _remembered().get(key)
        if known is not None and known[:2] == [state.st_size, state.st_mtime_ns]:
            return str(known[2])
        digest = hash_file(path, report, cancel)
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror}") from error
    write_json(_index(), _remembered() | {key: [state.st_size, state.st_mtime_ns, digest]})
    return digest


def known_sha256s(paths: Iterable[Path]) -> dict[Path, str]:
    """The hashes that are known already and still true; nothing is read."""
    remembered = _remembered()
    known = {}
    for path in paths:
        entry = remembered.get(str(path.resolve()))
        with contextlib.suppress(OSError):
            state = path.stat()
            if entry is not None and entry[:2] == [state.st_size, state.st_mtime_ns]:
                known[path] = str(entry[2])
    return known


def remember(path: Path, sha256: str) -> None:
    """Note the hash of a file that was hashed while it was written."""
    state = path.stat()
    write_json(_index(), _remembered() | {str(path.resolve()): [state.st_size, state.st_mtime_ns, sha256]})


def hash_file(path: Path, report: Report = no_report, cancel: threading.Event | None = None) -> str:
    """The SHA-256 of the file, read now."""
    total_bytes = path.stat().st_size
    done_bytes = 0
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            stop_if_asked(cancel, f"reading {path.name}")
            digest.update(chunk)
            done_bytes += len(chunk)
            report(Progress(f"checking {path.name}", done_bytes, total_bytes))
    return digest.hexdigest()


def _index() -> Path:
    return cache_folder() / "hashes.json"


def _remembered() -> dict[str, list[int | str]]:
    """Empty where the index is missing or unreadable: it only saves time."""
    try:
        known = json.loads(_index().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
