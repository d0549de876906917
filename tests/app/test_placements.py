"""Where each model runs, as it is kept from one start to the next."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from app.choices import SetChoice, preparation
from app.placements import NOTHING, Placements, Written
from engine.errors import EnvironmentProblem
from tests.conftest import with_model

BASE = SetChoice()
TARGET, OTHER, DRAFTER = "/models/target.gguf", "/models/other.gguf", "/models/drafter.gguf"


def settings_file(home: Path) -> Path:
    (file,) = (home / "data").glob("placements.json")
    return file


def test_what_is_written_is_there_after_a_restart(home: Path) -> None:
    before = Placements(BASE)
    before.write_target(TARGET, Written("20", "4"))
    before.write_drafter(DRAFTER, Written("", "1"))
    after = Placements(BASE)
    assert after.of_target(TARGET) == Written("20", "4")
    assert after.of_drafter(DRAFTER) == Written("", "1")
    assert after.of_target(OTHER) == after.of_drafter(TARGET) == after.of_target(DRAFTER) == NOTHING
    choice = after.placed(replace(BASE, target=TARGET, drafters=("ngram", DRAFTER)))
    assert (choice.threads, choice.drafter_threads) == (4, ((DRAFTER, 1),))
    assert after.placed(replace(BASE, target=OTHER, drafters=())).threads is None


def test_an_emptied_box_is_forgotten(home: Path) -> None:
    placements = Placements(BASE)
    placements.write_target(TARGET, Written("", "4"))
    placements.write_target(TARGET, NOTHING)
    assert TARGET not in settings_file(home).read_text()
    assert Placements(BASE).of_target(TARGET) == NOTHING


@pytest.mark.parametrize("written", [Written("", "many"), Written("", "0"), Written("-2", "4")])
def test_a_number_that_no_model_loads_with_is_not_kept(home: Path, written: Written) -> None:
    """It would stand in the way of every start."""
    placements = Placements(BASE)
    placements.write_target(TARGET, written)
    assert placements.of_target(TARGET) == written
    assert Placements(BASE).of_target(TARGET) == NOTHING


def test_the_command_line_stands_until_something_else_is_written(home: Path) -> None:
    kept = Placements(BASE)
    kept.write_target(TARGET, Written("20", "4"))
    kept.write_drafter(DRAFTER, Written("", "1"))
    said = replace(BASE, threads=2, drafter_threads=((DRAFTER, 3),))
    now = Placements(said)
    assert now.of_target(TARGET) == Written("20", "")
    assert now.of_drafter(DRAFTER) == NOTHING
    now.write_target(TARGET, Written("20", "6"))
    assert now.placed(replace(said, target=TARGET, drafters=())).threads == 6
    assert Placements(BASE).of_drafter(DRAFTER) == Written("", "1")


@pytest.mark.parametrize("text", ["{", "[]", '{"target": {"a": {}}}', '{"target": 3}'])
def test_a_broken_file_is_named_and_left_alone(home: Path, text: str) -> None:
    Placements(BASE).write_target(TARGET, Written("", "4"))
    file = settings_file(home)
    file.write_text(text)
    placements = Placements(BASE)
    assert placements.of_target(TARGET) == NOTHING
    with pytest.raises(EnvironmentProblem, match=r"placements\.json"):
        placements.write_target(TARGET, Written("", "2"))
    assert file.read_text() == text
    assert placements.of_target(TARGET) == Written("", "2")


def test_a_load_places_the_drafters_that_it_chose_itself(home: Path, starter: Path) -> None:
    """The first load of a start names no drafters, and none of the starter's file."""
    models = with_model(home, starter) / "cache" / "models"
    Placements(BASE).write_target(str(models / starter.name), Written("", "2"))
    prepare = preparation(BASE, placing=Placements(BASE).placed)
    assert prepare(lambda _phase, _share: None, threading.Event()).placement.threads == 2
