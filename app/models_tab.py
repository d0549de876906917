"""The model files: what is installed, fetching, deriving, adding; beside the controls that choose a set."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import gradio as gr

from app.errands import Work
from app.set_controls import SetControls, build_set_controls
from engine.errors import SettingError
from models import hub
from models.catalogue import recommended, this_machine
from models.derive import derive_default
from models.library import STARTER_NAME, add_folder, resolve
from models.progress import Report
from models.starter import fetch_starter


@dataclass(frozen=True)
class ModelsTab:
    """Components, in the order in which they appear."""

    sets: SetControls
    memory: gr.HTML
    unload: gr.Button
    installed: gr.HTML
    what: gr.Dropdown
    fetch: gr.Button
    suits: gr.HTML
    derive: gr.Button
    folder: gr.Textbox
    add: gr.Button
    cancel: gr.Button
    errand: gr.HTML


def build_models_tab(context_tokens: int) -> ModelsTab:
    """Lay the components out, in the Gradio context at hand."""
    offers = [("The starter: SmolLM2-135M-Instruct, 98 MB", STARTER_NAME)]
    for preset in recommended(this_machine()):
        for offer in (preset.target, *preset.drafters):
            choice = (f"{offer.name}, {offer.size_gib:.1f} GB", offer.reference)
            if choice not in offers:
                offers.append(choice)
    with gr.Row(elem_id="models"):
        with gr.Column(scale=2, min_width=320):
            sets = build_set_controls(context_tokens)
            memory = gr.HTML(elem_id="memory", apply_default_css=False)
            unload = gr.Button("Unload", size="sm", elem_id="unload-model")
        with gr.Column(scale=3, min_width=320):
            installed = gr.HTML(elem_id="installed", apply_default_css=False)
            errand = gr.HTML(elem_id="errand", apply_default_css=False)
            cancel = gr.Button("Stop it", variant="stop", size="sm", visible=False, elem_id="cancel-errand")
            what = gr.Dropdown(
                offers,
                value=STARTER_NAME,
                label="Fetch: one of these, or OWNER/REPOSITORY:FORMAT of the Hugging Face hub",
                allow_custom_value=True,
                elem_id="fetch-what",
            )
            suits = gr.HTML(elem_id="suits", apply_default_css=False)
            fetch = gr.Button("Fetch", size="sm", elem_id="fetch-model")
            derive = gr.Button("Make a drafter from the target chosen", size="sm", elem_id="derive-drafter")
            folder = gr.Textbox(
                label="Look for models in this folder too", placeholder="/path/to/models", max_lines=1, elem_id="folder"
            )
            add = gr.Button("Add folder", size="sm", elem_id="add-folder")
    return ModelsTab(sets, memory, unload, installed, what, fetch, suits, derive, folder, add, cancel, errand)


def fetching(what: str) -> Work:
    """An errand that fetches a model.

    Raises:
        SettingError: nothing is named.
    """
    if not (what or "").strip():
        raise SettingError("nothing is named to fetch; choose one, or write OWNER/REPOSITORY:FORMAT")

    def work(report: Report, cancel: threading.Event) -> str:
        path = fetch_starter(report, cancel) if what == STARTER_NAME else hub.fetch(what.strip(), report, cancel)
        return f"{path.stem} is on this machine"

    return work


def deriving(target: str) -> Work:
    """An errand that makes a drafter."""

    def work(report: Report, cancel: threading.Event) -> str:
        path = fetch_starter(report, cancel) if target == STARTER_NAME else resolve(target)
        return f"{derive_default(path, report, cancel).name} can draft for {path.stem}; choose it among the drafters"

    return work


def adding(folder: str) -> None:
    """Look for models in a folder from now on.

    Raises:
        SettingError: there is no such folder.
    """
    if not folder.strip():
        raise SettingError("no folder is named; write the path of one")
    add_folder(Path(folder.strip()))
