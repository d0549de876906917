"""The controls that choose a target and its drafters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gradio as gr

from app import views
from app.choices import SetChoice, whole_number
from app.worker import LoadedFacts
from engine.config import SetConfig
from engine.errors import QuorumError, SettingError
from engine.loader import FREE_DRAFTERS
from models.library import STARTER_NAME, list_models
from models.pairing import DEFAULT_CONTEXT_TOKENS, choose_drafters, pairings
from models.starter import is_present, starter_path


@dataclass(frozen=True)
class SetControls:
    """Components, in the order in which they appear."""

    target: gr.Dropdown
    target_path: gr.Textbox
    drafters: gr.CheckboxGroup
    drafter_paths: gr.Textbox
    unfit: gr.HTML
    context_tokens: gr.Textbox
    load: gr.Button
    cancel: gr.Button

    def inputs(self) -> set[Any]:
        return {self.target, self.target_path, self.drafters, self.drafter_paths, self.context_tokens}

    def choice(self, values: Mapping[Any, Any], base: SetChoice) -> SetChoice:
        """What the controls say; what they do not say is as in `base`.

        Raises:
            SettingError: no target is named, or the context is no number.
        """
        target = (values[self.target_path] or "").strip() or values[self.target]
        if not target:
            raise SettingError("no target is chosen; pick one, or give the path of a GGUF file")
        paths = (path.strip() for path in (values[self.drafter_paths] or "").split(","))
        return replace(
            base,
            target=target,
            drafters=(*values[self.drafters], *filter(None, paths)),
            context_tokens=whole_number(values[self.context_tokens], self.context_tokens.label) or 0,
        )


def build_set_controls(context_tokens: int = DEFAULT_CONTEXT_TOKENS) -> SetControls:
    """Lay the controls out, in the Gradio context at hand."""
    with gr.Column(elem_id="model-section"):
        target = gr.Dropdown([], label="Target: the model that answers", elem_id="target", interactive=True)
        target_path = gr.Textbox(
            label="Or a GGUF file", placeholder="/path/to/model.gguf", elem_id="target-path", max_lines=1
        )
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
        context = gr.Textbox(
            str(context_tokens),
            label="Context in tokens",
            placeholder="As large as the model was made for",
            max_lines=1,
            elem_id="context-tokens",
        )
        with gr.Row():
            load = gr.Button("Load model", variant="primary", elem_id="load-model", min_width=120)
            cancel = gr.Button("Stop loading", variant="stop", visible=False, elem_id="cancel-load", min_width=120)
    return SetControls(target, target_path, drafters, drafter_paths, unfit, context, load, cancel)


def target_update(facts: LoadedFacts | None) -> Any:
    """The targets to choose from; the loaded one is chosen."""
    choices = [(model.name, str(model.path)) for model in list_models() if not model.fault]
    if not is_present():
        choices.insert(0, ("starter: SmolLM2-135M-Instruct, 98 MB, will be fetched", STARTER_NAME))
    value = str(facts.config.target) if facts else choices[0][1]
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
            choices += [(verdict.name, str(verdict.path)) for verdict in verdicts if verdict.is_worth_choosing]
            notes = views.pairing_notes(verdicts)
            chosen = choose_drafters(path)
        except QuorumError as error:
            notes = views.alert(str(error))
    if loaded is not None and loaded.target.resolve() == path.resolve():
        chosen = loaded.drafters
        known = [value for _, value in choices]
        choices += [(Path(drafter).stem, drafter) for drafter in chosen if drafter not in known]
    return gr.update(choices=choices, value=list(chosen)), notes
