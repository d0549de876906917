"""The controls that say where each model runs, and their reading as part of a choice.

A model is picked, and its two numbers are written beside it. What was written for the others is kept in a hidden text,
so that the numbers of a drafter that is left out for a while come back with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gradio as gr

from app.choices import SetChoice, whole_number
from engine.config import default_threads
from engine.loader import FREE_DRAFTERS
from engine.runtime.devices import has_gpu, list_devices

TARGET = "target"
"""Stands for the target where a model is picked."""
_ALL_MODELS = ("The target, and drafters without numbers of their own", TARGET)

Written = tuple[str, str]
"""Layers on the GPU and threads of one model, as they stand in the boxes."""


@dataclass(frozen=True)
class PlacementControls:
    """Components, in the order in which they appear."""

    model: gr.Dropdown
    gpu_layers: gr.Textbox
    threads: gr.Textbox
    kept: gr.Textbox
    """What was written for each model; never seen."""

    def inputs(self) -> set[Any]:
        return {self.model, self.gpu_layers, self.threads, self.kept}

    def boxes(self) -> list[Any]:
        return [self.gpu_layers, self.threads]

    def written(self, values: Mapping[Any, Any]) -> dict[str, Written]:
        """What stands in the boxes, and what was written for other models before."""
        in_boxes = (values[self.gpu_layers] or "", values[self.threads] or "")
        return _read(values[self.kept]) | {values[self.model] or TARGET: in_boxes}

    def placed(self, values: Mapping[Any, Any], choice: SetChoice) -> SetChoice:
        """The choice with these numbers; where none is written, it stays as it is.

        Raises:
            SettingError: what is written is no whole number.
        """
        written = self.written(values)

        def numbers(box: int, component: Any) -> dict[str, int]:
            found = {name: whole_number(texts[box], component.label) for name, texts in written.items()}
            return {name: number for name, number in found.items() if number is not None}

        gpu_layers = numbers(0, self.gpu_layers) if has_gpu() else {}
        threads = numbers(1, self.threads)
        drafters = choice.drafters or ()
        return replace(
            choice,
            gpu_layers=gpu_layers.get(TARGET, choice.gpu_layers),
            threads=threads.get(TARGET, choice.threads),
            drafter_gpu_layers=_own(choice.drafter_gpu_layers, gpu_layers, drafters),
            drafter_threads=_own(choice.drafter_threads, threads, drafters),
        )

    def remember(self, values: Mapping[Any, Any]) -> str:
        """What is to be kept now."""
        return json.dumps(self.written(values))

    def show(self, values: Mapping[Any, Any], base: SetChoice) -> tuple[Any, Any]:
        """The boxes, for the model that is picked now."""
        model = values[self.model] or TARGET
        gpu_layers, threads = _read(values[self.kept]).get(model, ("", ""))
        return (
            gr.update(value=gpu_layers, placeholder=_unsaid_layers(model, base)),
            gr.update(value=threads, placeholder=_unsaid_threads(model, base)),
        )

    def offer(self, values: Mapping[Any, Any], drafters: Sequence[str], base: SetChoice) -> tuple[Any, Any, Any]:
        """The models to pick from, and the boxes; back to the target where the picked one is not among them."""
        files = [name for name in drafters if name not in FREE_DRAFTERS]
        choices = [_ALL_MODELS, *((Path(name).stem, name) for name in files)]
        if values[self.model] in (TARGET, *files):
            return gr.update(choices=choices), gr.skip(), gr.skip()
        shown = self.show({**values, self.model: TARGET}, base)
        return gr.update(choices=choices, value=TARGET), *shown


def build_placement_controls(base: SetChoice) -> PlacementControls:
    """Lay the controls out, in the Gradio context at hand."""
    with gr.Accordion("Where the models run", open=False, elem_id="placement-section"):
        model = gr.Dropdown(
            [_ALL_MODELS], value=TARGET, label="Model", elem_id="placed-model", filterable=False, interactive=True
        )
        with gr.Row():
            gpu_layers = gr.Textbox(
                label="Layers on the GPU",
                placeholder=_unsaid_layers(TARGET, base),
                interactive=has_gpu(),
                max_lines=1,
                elem_id="gpu-layers",
                min_width=120,
            )
            threads = gr.Textbox(
                label="CPU threads",
                placeholder=_unsaid_threads(TARGET, base),
                max_lines=1,
                elem_id="threads",
                min_width=120,
            )
        gr.HTML(f'<p class="q-small" id="placement-note">{_note()}</p>', apply_default_css=False)
        kept = gr.Textbox("{}", visible="hidden", label="Placements", elem_id="placements")
    return PlacementControls(model, gpu_layers, threads, kept)


def _read(kept: str | None) -> dict[str, Written]:
    return {name: (texts[0], texts[1]) for name, texts in json.loads(kept or "{}").items()}


def _own(
    before: tuple[tuple[str, int], ...], written: Mapping[str, int], drafters: Sequence[str]
) -> tuple[tuple[str, int], ...]:
    """The numbers of single drafters, as far as these are chosen."""
    numbers = {**dict(before), **written}
    return tuple((name, number) for name, number in numbers.items() if name in drafters)


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
