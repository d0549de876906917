"""The controls that say where each model runs, and their reading as part of a choice.

A model is picked, and its two numbers are written beside it; what is written is taken over at once, so that it comes
back with the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from app.choices import SetChoice
from app.placements import LAYERS, THREADS, Placements, Written, placed
from engine.config import default_threads
from engine.loader import FREE_DRAFTERS
from engine.runtime.devices import has_gpu, list_devices

TARGET = "target"
"""Stands for the target where a model is picked."""
_ALL_MODELS = ("The target, and drafters without numbers of their own", TARGET)


@dataclass(frozen=True)
class PlacementControls:
    """Components, in the order in which they appear."""

    model: gr.Dropdown
    gpu_layers: gr.Textbox
    threads: gr.Textbox

    def inputs(self) -> set[Any]:
        return {self.model, self.gpu_layers, self.threads}

    def boxes(self) -> list[Any]:
        return [self.gpu_layers, self.threads]

    def placed(self, values: Mapping[Any, Any], choice: SetChoice, placements: Placements) -> SetChoice:
        """The choice with what stands in the boxes, and what was written for other models before.

        Raises:
            SettingError: what is written is no whole number.
        """
        picked, in_boxes = self._picked(values), self._in_boxes(values)
        target = in_boxes if picked == TARGET else placements.of_target(choice.target)
        drafters = placements.of_drafters(choice.drafters or ())
        if picked in drafters:
            drafters[picked] = in_boxes
        return placed(choice, target, drafters)

    def write(self, values: Mapping[Any, Any], target: str, placements: Placements) -> None:
        """Take over what stands in the boxes.

        Raises:
            EnvironmentProblem: it cannot be kept.
        """
        picked, in_boxes = self._picked(values), self._in_boxes(values)
        if picked == TARGET:
            placements.write_target(target, in_boxes)
        else:
            placements.write_drafter(picked, in_boxes)

    def show(self, values: Mapping[Any, Any], target: str, base: SetChoice, placements: Placements) -> tuple[Any, Any]:
        """The boxes, for the model that is picked now."""
        picked = self._picked(values)
        written = placements.of_target(target) if picked == TARGET else placements.of_drafter(picked)
        return (
            gr.update(value=written.gpu_layers, placeholder=_unsaid_layers(picked, base)),
            gr.update(value=written.threads, placeholder=_unsaid_threads(picked, base)),
        )

    def offer(
        self,
        values: Mapping[Any, Any],
        target: str,
        drafters: Sequence[str],
        base: SetChoice,
        placements: Placements,
    ) -> tuple[Any, Any, Any]:
        """The models to pick from, and the boxes; back to the target where the picked one is not among them."""
        files = [name for name in drafters if name not in FREE_DRAFTERS]
        choices = [_ALL_MODELS, *((Path(name).stem, name) for name in files)]
        if values[self.model] in (TARGET, *files):
            return gr.update(choices=choices), gr.skip(), gr.skip()
        shown = self.show({**values, self.model: TARGET}, target, base, placements)
        return gr.update(choices=choices, value=TARGET), *shown

    def _picked(self, values: Mapping[Any, Any]) -> str:
        return values[self.model] or TARGET

    def _in_boxes(self, values: Mapping[Any, Any]) -> Written:
        return Written((values[self.gpu_layers] or "").strip(), (values[self.threads] or "").strip())


def build_placement_controls(base: SetChoice) -> PlacementControls:
    """Lay the controls out, in the Gradio context at hand."""
    with gr.Accordion("Where the models run", open=False, elem_id="placement-section"):
        model = gr.Dropdown(
            [_ALL_MODELS], value=TARGET, label="Model", elem_id="placed-model", filterable=False, interactive=True
        )
        with gr.Row():
            gpu_layers = gr.Textbox(
                label=LAYERS,
                placeholder=_unsaid_layers(TARGET, base),
                interactive=has_gpu(),
                max_lines=1,
                elem_id="gpu-layers",
                min_width=120,
            )
            threads = gr.Textbox(
                label=THREADS,
                placeholder=_unsaid_threads(TARGET, base),
                max_lines=1,
                elem_id="threads",
                min_width=120,
            )
        gr.HTML(f'<p class="q-small" id="placement-note">{_note()}</p>', apply_default_css=False)
    return PlacementControls(model, gpu_layers, threads)


def _unsaid_layers(model: str, base: SetChoice) -> str:
    if not has_gpu():
        return "none: no GPU"
    if model != TARGET:
        return "as chosen, or as the target"
    return "what finds room" if base.gpu_layers is None else str(base.gpu_layers)


def _unsaid_threads(model: str, base: SetChoice) -> str:
    return "as the target" if model != TARGET else str(base.threads or default_threads())


def _note() -> str:
    cores = default_threads()
    threads = (
        f"More threads than physical cores ({cores}) slow a model down. A drafter that works while the target checks "
        "may do better with fewer than all."
    )
    if not has_gpu():
        return (
            "No layers can be placed: this build of llama.cpp sees no GPU, so every model runs on the CPU. The README "
            f"tells how to get a build for Metal or CUDA. {threads}"
        )
    devices = [device for device in list_devices() if not device.name.startswith("CPU")]
    free = ", ".join(f"{device.description} with {device.free_bytes / 2**30:.1f} GB free" for device in devices)
    return f"GPU: {free}. -1 puts all layers there, 0 none; left empty, small drafters go there first. {threads}"
