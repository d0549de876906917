"""The controls that fill the sampling controls from a preset, and keep what these say as one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gradio as gr

from app.presets import OURS, name_of, own_presets, presets
from engine.config import Sampling
from engine.errors import QuorumError

NO_PRESET = " none"
"""Chosen while the controls say something of their own; no preset can be called so."""
FIRST_CHOICE = ("As set below", NO_PRESET)


@dataclass(frozen=True)
class PresetControls:
    """Components, in the order in which they appear."""

    preset: gr.Dropdown
    name: gr.Textbox
    keep: gr.Button
    forget: gr.Button


def build_preset_choice(sampling: Sampling) -> gr.Dropdown:
    """The choice of a preset, in the Gradio context at hand; the one that draws so is chosen."""
    choices = [FIRST_CHOICE, *((name, name) for name in OURS)]
    value = name_of(sampling) or NO_PRESET
    return gr.Dropdown(choices, value=value, label="Sampling preset", elem_id="preset", filterable=False)


def build_preset_controls(preset: gr.Dropdown) -> PresetControls:
    """Lay out what keeps and forgets presets, in the Gradio context at hand."""
    with gr.Row(elem_id="preset-row", equal_height=True):
        name = gr.Textbox(
            label="Keep these values as a preset",
            placeholder="Its name",
            max_lines=1,
            min_width=120,
            scale=3,
            elem_id="preset-name",
        )
        keep = gr.Button("Keep", size="sm", elem_id="keep-preset", scale=1, min_width=64)
        forget = gr.Button("Forget preset", size="sm", elem_id="forget-preset", scale=1, min_width=64, visible=False)
    return PresetControls(preset, name, keep, forget)


def known_presets() -> Mapping[str, Sampling]:
    """All presets; ours alone where the user's own cannot be read, which keeping one says."""
    try:
        return presets()
    except QuorumError:
        return OURS


def preset_update(chosen: str | None = None) -> Any:
    """The presets to choose from, and which is chosen; None leaves what is."""
    choices = [FIRST_CHOICE, *((name, name) for name in known_presets())]
    return gr.update(choices=choices) if chosen is None else gr.update(choices=choices, value=chosen)


def forget_update(chosen: str) -> Any:
    """Whether what is chosen can be forgotten."""
    try:
        return gr.update(visible=chosen in own_presets())
    except QuorumError:
        return gr.update(visible=False)
