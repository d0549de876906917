"""The controls that choose a target and its drafters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gradio as gr

from app import models_view, views
from app.choices import SetChoice, whole_number
from app.placement_controls import PlacementControls, build_placement_controls
from app.placements import Placements
from app.worker import LoadedFacts
from engine.config import KvType, SetConfig
from engine.errors import QuorumError, SettingError
from engine.loader import FREE_DRAFTERS
from models.catalogue import drafters_for
from models.gguf_file import read_header
from models.library import STARTER_NAME, list_models
from models.pairing import choose_drafters, pairings
from models.starter import is_present, starter_path

KV_TYPES = (
    ("Automatic", ""),
    ("F16", KvType.F16.name),
    ("BF16 keys, F16 values", KvType.BF16_F16.name),
    ("BF16", KvType.BF16.name),
    ("8 bits, half the memory", KvType.Q8_0.name),
)


@dataclass(frozen=True)
class SetControls:
    """Components, in the order in which they appear."""

    target: gr.Dropdown
    target_path: gr.Textbox
    use_path: gr.Button
    drafters: gr.CheckboxGroup
    drafter_paths: gr.Textbox
    unfit: gr.HTML
    context_tokens: gr.Textbox
    kv_type: gr.Dropdown
    placement: PlacementControls
    load: gr.Button
    cancel: gr.Button

    def inputs(self) -> set[Any]:
        named = {self.target, self.target_path, self.drafters, self.drafter_paths}
        return named | {self.context_tokens, self.kv_type} | self.placement.inputs()

    def chosen_drafters(self, values: Mapping[Any, Any]) -> tuple[str, ...]:
        """Those that are ticked, and those whose path is written."""
        paths = (path.strip() for path in (values[self.drafter_paths] or "").split(","))
        return (*(values[self.drafters] or ()), *filter(None, paths))

    def chosen_target(self, values: Mapping[Any, Any]) -> str:
        """The one whose path is written, or the one that is picked; empty for none."""
        return (values[self.target_path] or "").strip() or values[self.target] or ""

    def choice(self, values: Mapping[Any, Any], base: SetChoice, placements: Placements) -> SetChoice:
        """What the controls say; what they do not say is as in `base`.

        Raises:
            SettingError: no target is named, or a number is none.
        """
        target = self.chosen_target(values)
        if not target:
            raise SettingError("no target is chosen; pick one, or give the path of a GGUF file")
        choice = replace(
            base,
            target=target,
            drafters=self.chosen_drafters(values),
            context_tokens=whole_number(values[self.context_tokens], self.context_tokens.label) or 0,
            kv_type=KvType[values[self.kv_type]] if values[self.kv_type] else None,
        )
        return self.placement.placed(values, choice, placements)


def build_set_controls(base: SetChoice) -> SetControls:
    """Lay the controls out, in the Gradio context at hand."""
    with gr.Column(elem_id="model-section"):
        target = gr.Dropdown([], label="Target: the model that answers", elem_id="target", interactive=True)
        with gr.Row(elem_id="path-row"):
            target_path = gr.Textbox(
                label="Or a path: a GGUF file, or a folder with some",
                placeholder="Paste it, or drop a file here",
                elem_id="target-path",
                max_lines=1,
                scale=1,
            )
            use_path = gr.Button("Use it", size="sm", elem_id="use-path", scale=0, min_width=72)
        drafters = gr.CheckboxGroup(
            list(FREE_DRAFTERS), value=list(FREE_DRAFTERS), label="Drafters: they guess ahead", elem_id="drafter-set"
        )
        drafter_paths = gr.Textbox(
            label="More drafters by path, with commas between",
            placeholder="/path/to/drafter.gguf",
            elem_id="drafter-paths",
            max_lines=1,
        )
        unfit = gr.HTML(elem_id="unfit-drafters", apply_default_css=False)
        with gr.Row():
            context = gr.Textbox(
                str(base.context_tokens),
                label="Context in tokens",
                placeholder="As large as the model was made for",
                max_lines=1,
                elem_id="context-tokens",
                min_width=140,
            )
            kv_type = gr.Dropdown(
                KV_TYPES,
                value=base.kv_type.name if base.kv_type else "",
                label="Cache",
                filterable=False,
                elem_id="kv-type",
                min_width=140,
            )
        placement = build_placement_controls(base)
        with gr.Row():
            load = gr.Button("Load model", variant="primary", elem_id="load-model", min_width=120)
            cancel = gr.Button("Stop loading", variant="stop", visible=False, elem_id="cancel-load", min_width=120)
    return SetControls(
        target, target_path, use_path, drafters, drafter_paths, unfit, context, kv_type, placement, load, cancel
    )


def target_update(facts: LoadedFacts | None, chosen: Path | None = None) -> Any:
    """The targets to choose from; the chosen one is chosen, else the loaded one."""
    choices = [(model.name, str(model.path)) for model in list_models() if not model.fault]
    if not is_present():
        choices.insert(0, ("starter: SmolLM2-135M-Instruct, 98 MB, will be fetched", STARTER_NAME))
    wanted = chosen or (facts.config.target if facts else None)
    value = str(wanted) if wanted else choices[0][1]
    if value not in [path for _, path in choices]:
        choices.append((Path(value).stem, value))
    return gr.update(choices=choices, value=value)


def drafter_updates(target: str, loaded: SetConfig | None) -> tuple[Any, str]:
    """The drafters to choose from for a target, those of the loaded set chosen; and why others are not offered."""
    path = starter_path() if target == STARTER_NAME else Path(target)
    chosen = tuple(FREE_DRAFTERS)
    choices = [("n-gram: repeats of this conversation", "ngram"), ("suffix: what came up before", "suffix")]
    notes = ""
    if path.is_file():
        try:
            verdicts = [verdict for verdict in pairings(path) if verdict.path.resolve() != path.resolve()]
            choices += [
                (f"{verdict.name}{f' ({verdict.measured})' if verdict.measured else ''}", str(verdict.path))
                for verdict in verdicts
                if verdict.is_worth_choosing
            ]
            notes = views.pairing_notes(verdicts)
            if not any(verdict.is_worth_choosing for verdict in verdicts):
                notes = models_view.no_drafter(drafters_for(read_header(path))) + notes
            chosen = choose_drafters(path)
        except QuorumError as error:
            notes = views.alert(str(error))
    if loaded is not None and loaded.target.resolve() == path.resolve():
        chosen = loaded.drafters
        known = [value for _, value in choices]
        choices += [(Path(drafter).stem, drafter) for drafter in chosen if drafter not in known]
    return gr.update(choices=choices, value=list(chosen)), notes
