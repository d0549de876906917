from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import EnvironmentProblem
from models.folders import cache_folder, data_folder, derived_folder, models_folder


def test_all_folders_lie_under_quorum_home_and_exist(home: Path) -> None:
    assert cache_folder() == home / "cache"
    assert data_folder() == home / "data"
    assert all(folder.is_dir() for folder in (cache_folder(), data_folder(), models_folder(), derived_folder()))


def test_a_changed_quorum_home_takes_effect(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache_folder()
    monkeypatch.setenv("QUORUM_HOME", str(tmp_path / "elsewhere"))
    assert cache_folder() == tmp_path / "elsewhere" / "cache" != before


def test_without_quorum_home_the_systems_own_folders_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUORUM_HOME", raising=False)
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name, **_: tmp_path / "system-cache" / name)
    assert cache_folder() == tmp_path / "system-cache" / "quorum"


def test_a_folder_that_cannot_be_made_names_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("QUORUM_HOME", str(tmp_path / "file"))
    with pytest.raises(EnvironmentProblem, match="QUORUM_HOME"):
        cache_folder()
