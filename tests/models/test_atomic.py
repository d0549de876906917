from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import EnvironmentProblem
from models.atomic import replacing, require_free_bytes, temporary_beside, write_json


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    destination = tmp_path / "settings.json"
    destination.write_text("old")
    with replacing(destination) as temporary:
        temporary.write_text("new")
        assert destination.read_text() == "old"
    assert destination.read_text() == "new"
    assert os.listdir(tmp_path) == ["settings.json"]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    destination = tmp_path / "settings.json"
    destination.write_text("old")

    def fail_half_way() -> None:
        with replacing(destination) as temporary:
            temporary.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail_half_way()
    assert destination.read_text() == "old"
    assert os.listdir(tmp_path) == ["settings.json"]


def test_a_full_disk_is_an_environment_problem(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="No space left"), replacing(tmp_path / "model.gguf"):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_leftovers_of_dead_processes_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    dead = tmp_path / f".model.gguf.{process.pid}-0123abcd.part"
    alive = tmp_path / f".model.gguf.{os.getpid()}-0123abcd.part"
    other = tmp_path / f".another.gguf.{process.pid}-0123abcd.part"
    for leftover in (dead, alive, other):
        leftover.write_text("half")
    temporary_beside(tmp_path / "model.gguf")
    assert not dead.exists()
    assert alive.exists()
    assert other.exists()


def test_json_is_written_whole(tmp_path: Path) -> None:
    write_json(tmp_path / "value.json", {"folders": ["größe"]})
    assert json.loads((tmp_path / "value.json").read_text(encoding="utf-8")) == {"folders": ["größe"]}


def test_too_little_disk_says_both_figures(tmp_path: Path) -> None:
    require_free_bytes(tmp_path, 1, "a test")
    with pytest.raises(EnvironmentProblem, match=r"1,000,000,000,000 MB .* MB free"):
        require_free_bytes(tmp_path, 10**18, "a test")
