"""Sampling presets, ours and the user's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.presets import KEPT, LONGEST_NAME, OURS, forget, keep, name_of, own_presets, presets
from engine.config import Sampling
from engine.errors import EnvironmentProblem, SettingError

MINE = Sampling(temperature=0.35, top_k=7, top_p=0.5, min_p=0.1, repeat_penalty=1.2, seed=11)


def test_what_is_kept_is_found_again_until_it_is_forgotten(home: Path) -> None:
    assert list(presets()) == list(OURS)
    assert keep("  for   letters ", MINE) == "for letters"
    assert presets()["for letters"] == MINE
    assert list(presets()) == [*OURS, "for letters"]
    keep("for letters", Sampling(temperature=1))
    assert own_presets() == {"for letters": Sampling(temperature=1)}
    forget("for letters")
    assert list(presets()) == list(OURS)


def test_one_of_ours_can_be_replaced_and_comes_back(home: Path) -> None:
    keep("Exact", MINE)
    assert presets()["Exact"] == MINE
    forget("Exact")
    assert presets()["Exact"].is_argmax


@pytest.mark.parametrize("name", ["", "   ", "n" * (LONGEST_NAME + 1)])
def test_a_name_that_says_nothing_or_too_much_is_refused(home: Path, name: str) -> None:
    with pytest.raises(SettingError, match="name"):
        keep(name, MINE)
    assert own_presets() == {}


@pytest.mark.parametrize("text", ["{", "[]", '{"a": {}}', '{"a": {"temperature": -1}}'])
def test_a_broken_file_is_named_and_left_alone(home: Path, text: str) -> None:
    keep("a", MINE)
    (file,) = (home / "data").glob("presets.json")
    file.write_text(text)
    for act in (presets, lambda: keep("b", MINE), lambda: forget("a")):
        with pytest.raises(EnvironmentProblem, match=r"presets\.json"):
            act()
    assert file.read_text() == text


def test_the_standing_values_have_a_name() -> None:
    assert name_of(Sampling()) == "Balanced"
    assert name_of(MINE) == ""
    twins = {**OURS, "mine": MINE, "mine too": MINE}
    assert name_of(MINE, twins) == "mine"
    assert name_of(MINE, twins, "mine too") == "mine too"
    assert name_of(MINE, twins, "Exact") == "mine"
    assert set(KEPT) <= set(Sampling.__dataclass_fields__)
