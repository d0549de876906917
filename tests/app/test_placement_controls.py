"""Where each model runs, as it is read from what stands in the page's boxes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gradio as gr
import pytest

from app import placement_controls, placements
from app.choices import SetChoice
from app.placement_controls import TARGET, PlacementControls, build_placement_controls
from app.placements import Placements
from engine.config import default_threads
from engine.errors import SettingError

BASE = SetChoice()
DRAFTERS = ("ngram", "/models/first.gguf", "/models/second.gguf")
FIRST, SECOND = DRAFTERS[1:]
MODEL = "/models/target.gguf"

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def has_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU in name only."""
    for module in (placement_controls, placements):
        monkeypatch.setattr(module, "has_gpu", lambda: True)


def built(base: SetChoice = BASE) -> PlacementControls:
    with gr.Blocks():
        return build_placement_controls(base)


class Boxes:
    """What a page holds, as somebody fills it in."""

    def __init__(self, controls: PlacementControls, base: SetChoice = BASE) -> None:
        self._controls = controls
        self._placements = Placements(base)
        self.values: dict[Any, Any] = {
            controls.model: TARGET,
            controls.gpu_layers: "",
            controls.threads: "",
        }

    def write(self, gpu_layers: str, threads: str) -> None:
        self.values |= {self._controls.gpu_layers: gpu_layers, self._controls.threads: threads}
        self._controls.write(self.values, MODEL, self._placements)

    def pick(self, model: str) -> list[str]:
        """Returns what stands in the boxes then."""
        self.values[self._controls.model] = model
        shown = [update["value"] for update in self._controls.show(self.values, MODEL, BASE, self._placements)]
        self.values |= dict(zip(self._controls.boxes(), shown, strict=True))
        return shown

    def choice(self, drafters: tuple[str, ...] = DRAFTERS, base: SetChoice = BASE) -> SetChoice:
        return self._controls.placed(self.values, replace(base, target=MODEL, drafters=drafters), self._placements)

    def offer(self, drafters: tuple[str, ...]) -> tuple[Any, Any, Any]:
        return self._controls.offer(self.values, MODEL, drafters, BASE, self._placements)


def test_each_model_has_numbers_of_its_own(has_gpu: None) -> None:
    boxes = Boxes(built())
    boxes.write("20", "4")
    assert boxes.pick(FIRST) == ["", ""]
    boxes.write("-1", "1")
    assert boxes.pick(SECOND) == ["", ""]
    boxes.write("0", "")
    assert boxes.pick(FIRST) == ["-1", "1"]
    choice = boxes.choice()
    assert (choice.gpu_layers, choice.threads) == (20, 4)
    assert dict(choice.drafter_gpu_layers) == {FIRST: -1, SECOND: 0}
    assert dict(choice.drafter_threads) == {FIRST: 1}


def test_what_is_written_counts_before_it_is_kept() -> None:
    """Whoever writes and loads at once is not ahead of the page."""
    controls = built()
    boxes = Boxes(controls)
    boxes.values[controls.threads] = "3"
    assert boxes.choice().threads == 3


def test_an_emptied_box_is_as_if_nothing_had_been_written() -> None:
    boxes = Boxes(built())
    boxes.write("", "3")
    boxes.write("", " ")
    assert boxes.choice().threads is None


def test_a_drafter_that_is_left_out_has_no_placement_and_gets_it_back() -> None:
    boxes = Boxes(built())
    boxes.pick(FIRST)
    boxes.write("", "1")
    assert boxes.choice(("ngram", SECOND)).drafter_threads == ()
    assert boxes.choice().drafter_threads == ((FIRST, 1),)


def test_the_command_line_speaks_where_nothing_is_written(has_gpu: None) -> None:
    base = SetChoice(
        threads=5, gpu_layers=7, drafter_gpu_layers=((FIRST, 3), (SECOND, 4)), drafter_threads=((FIRST, 2),)
    )
    boxes = Boxes(built(base), base)
    boxes.pick(SECOND)
    boxes.write("9", "")
    choice = boxes.choice(base=base)
    assert (choice.threads, choice.gpu_layers) == (5, 7)
    assert dict(choice.drafter_gpu_layers) == {FIRST: 3, SECOND: 9}
    assert dict(choice.drafter_threads) == {FIRST: 2}


def test_only_models_of_the_set_can_be_picked() -> None:
    boxes = Boxes(built())
    boxes.pick(FIRST)
    boxes.write("", "1")
    offered, *kept = boxes.offer(DRAFTERS)
    assert [name for _, name in offered["choices"]] == [TARGET, FIRST, SECOND]
    assert "value" not in offered
    assert all("value" not in update for update in kept)
    offered, _, threads = boxes.offer(("ngram", SECOND))
    assert offered["value"] == TARGET
    assert (threads["value"], threads["placeholder"]) == ("", str(default_threads()))


def test_without_a_gpu_the_box_is_closed_and_says_why() -> None:
    controls = built()
    assert controls.gpu_layers.interactive is False
    assert "sees no GPU" in placement_controls._note()
    boxes = Boxes(controls)
    boxes.write("12", "")
    assert boxes.choice().gpu_layers is None


def test_with_a_gpu_the_box_is_open(has_gpu: None) -> None:
    assert built().gpu_layers.interactive is True
    assert "-1 puts all layers there" in placement_controls._note()


def test_what_is_no_number_is_named() -> None:
    boxes = Boxes(built())
    boxes.write("", "many")
    with pytest.raises(SettingError, match="CPU threads must be a whole number, found 'many'"):
        boxes.choice()
