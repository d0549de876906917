from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

import pytest

from engine.errors import ModelFileError
from models.identity import known_sha256s, remember, sha256_of
from models.progress import Cancelled, Progress


def test_a_file_is_read_once_until_it_changes(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"one")
    readings: list[Progress] = []
    assert sha256_of(path, readings.append) == hashlib.sha256(b"one").hexdigest()
    assert sha256_of(path, readings.append) == hashlib.sha256(b"one").hexdigest()
    assert len(readings) == 1
    path.write_bytes(b"two")
    os.utime(path, ns=(1, 1))
    assert sha256_of(path, readings.append) == hashlib.sha256(b"two").hexdigest()
    assert len(readings) == 2


def test_a_broken_index_only_costs_time(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"one")
    sha256_of(path)
    (home / "cache" / "hashes.json").write_text("{")
    assert sha256_of(path) == hashlib.sha256(b"one").hexdigest()


def test_a_missing_file_and_a_stopped_reading(home: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="No such file"):
        sha256_of(tmp_path / "missing.gguf")
    (tmp_path / "model.gguf").write_bytes(b"one")
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(Cancelled):
        sha256_of(tmp_path / "model.gguf", cancel=cancel)


def test_known_hashes_are_told_without_reading(home: Path, tmp_path: Path) -> None:
    known, unknown, changed, gone = (tmp_path / name for name in ("known", "unknown", "changed", "gone"))
    for path in (known, unknown, changed, gone):
        path.write_bytes(b"one")
    hashes = {path: sha256_of(path) for path in (known, changed, gone)}
    changed.write_bytes(b"longer")
    gone.unlink()
    assert known_sha256s([known, unknown, changed, gone]) == {known: hashes[known]}
    remember(unknown, "noted")
    assert sha256_of(unknown) == "noted"
