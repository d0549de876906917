"""The model files: what is installed, fetching, deriving, removing; beside the controls that choose a set."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import gradio as gr
from gguf.constants import LlamaFileType

from app.choices import SetChoice
from app.errands import Work
from app.set_controls import SetControls, build_set_controls
from engine.errors import SettingError
from models import hub
from models.catalogue import Offer, recommended, this_machine
from models.derive import default_format, derive, derive_default
from models.gguf_file import read_header
from models.identity import known_sha256s, sha256_of
from models.layer_search import search
from models.library import STARTER_NAME, list_models, removable, resolve
from models.progress import Report
from models.starter import fetch_starter

ASK_BEFORE_REMOVING = "(what) => what && confirm(`Remove ${what} from this machine?`) ? what : null"
"""Null where nothing is chosen or it was not meant. Folders that were added are forgotten, and their files stay."""


class Derivation(str, Enum):
    """How a drafter is made from a target."""

    QUICK = "quick"
    SEARCH = "search"
    BITS = "bits"


DERIVATIONS = (
    ("Leave out a layer from the middle: seconds", Derivation.QUICK.value),
    ("Try out which layer is missed least, and measure: about two minutes", Derivation.SEARCH.value),
    ("All layers with fewer bits (Q2_K)", Derivation.BITS.value),
)


@dataclass(frozen=True)
class ModelsTab:
    """Components, in the order in which they appear."""

    sets: SetControls
    memory: gr.HTML
    unload: gr.Button
    installed: gr.HTML
    errand: gr.HTML
    cancel: gr.Button
    what: gr.Dropdown
    fetch: gr.Button
    suits: gr.HTML
    derivation: gr.Dropdown
    derive: gr.Button
    removable: gr.Dropdown
    remove: gr.Button
    identify: gr.Button
    dropped: gr.Textbox
    """What the page's own script found out about files that were dropped; never seen."""

    def listed(self) -> list[Any]:
        """Those that show what there is, and change with it."""
        return [self.installed, self.suits, self.removable]


def build_models_tab(base: SetChoice) -> ModelsTab:
    """Lay the components out, in the Gradio context at hand."""
    offers = _offers()
    with gr.Row(elem_id="models"):
        with gr.Column(scale=2, min_width=320):
            sets = build_set_controls(base)
            memory = gr.HTML(elem_id="memory", apply_default_css=False)
            unload = gr.Button("Unload", size="sm", elem_id="unload-model", visible=False)
        with gr.Column(scale=3, min_width=320):
            installed = gr.HTML(elem_id="installed", apply_default_css=False)
            errand = gr.HTML(elem_id="errand", apply_default_css=False)
            cancel = gr.Button("Stop it", variant="stop", size="sm", visible=False, elem_id="cancel-errand")
            what = gr.Dropdown(
                offers,
                value=offers[0][1],
                label="Fetch: one of these, or OWNER/REPOSITORY:FORMAT of the Hugging Face hub",
                allow_custom_value=True,
                elem_id="fetch-what",
            )
            fetch = gr.Button("Fetch", size="sm", elem_id="fetch-model")
            suits = gr.HTML(elem_id="suits", apply_default_css=False)
            derivation = gr.Dropdown(
                DERIVATIONS,
                value=Derivation.QUICK.value,
                label="Make a drafter from the target chosen",
                filterable=False,
                elem_id="derivation",
            )
            make = gr.Button("Make it", size="sm", elem_id="derive-drafter")
            with gr.Accordion("Remove, and identify", open=False, elem_id="upkeep-section"):
                remove_what = gr.Dropdown(
                    [], label="Fetched and made models, and added folders", interactive=True, elem_id="removable"
                )
                remove = gr.Button("Remove", size="sm", elem_id="remove-model")
                identify = gr.Button("Compute the SHA-256 of every model", size="sm", elem_id="identify-models")
        dropped = gr.Textbox(visible="hidden", label="Dropped", elem_id="dropped")
    return ModelsTab(
        sets,
        memory,
        unload,
        installed,
        errand,
        cancel,
        what,
        fetch,
        suits,
        derivation,
        make,
        remove_what,
        remove,
        identify,
        dropped,
    )


def _offers() -> list[tuple[str, str]]:
    """What can be fetched: the starter, whole sets for this machine, and the models in them."""
    presets = recommended(this_machine())
    sets = [(preset.name, (preset.target, *preset.drafters)) for preset in presets]
    choices = [("The starter: SmolLM2-135M-Instruct, 98 MB", STARTER_NAME)]
    choices += [(f"{name}, the whole set: {_list_of(offers)}", _reference(offers)) for name, offers in sets]
    for _, offers in sets:
        singles = ((f"{offer.name}, {offer.size_gib:.1f} GB", offer.reference) for offer in offers)
        choices += [choice for choice in singles if choice not in choices]
    return choices


def _list_of(offers: Sequence[Offer]) -> str:
    size_gib = sum(offer.size_gib for offer in offers)
    return f"{' with '.join((offers[0].name, ', '.join(offer.name for offer in offers[1:])))}, {size_gib:.1f} GB"


def _reference(offers: Sequence[Offer]) -> str:
    return ",".join(offer.reference for offer in offers)


def fetching(what: str) -> Work:
    """An errand that fetches a model, or several with commas between.

    Raises:
        SettingError: nothing is named.
    """
    references = [reference.strip() for reference in (what or "").split(",") if reference.strip()]
    if not references:
        raise SettingError("nothing is named to fetch; choose one, or write OWNER/REPOSITORY:FORMAT")

    def work(report: Report, cancel: threading.Event) -> str:
        paths = [
            fetch_starter(report, cancel) if reference == STARTER_NAME else hub.fetch(reference, report, cancel)
            for reference in references
        ]
        is_or_are = "is" if len(paths) == 1 else "are"
        return (
            f"{' and '.join(path.stem for path in paths)} {is_or_are} on this machine; choose {paths[0].stem} as the "
            "target, or as a drafter, and load it"
        )

    return work


def deriving(target: str, how: str) -> Work:
    """An errand that makes a drafter."""

    def work(report: Report, cancel: threading.Event) -> str:
        path = fetch_starter(report, cancel) if target == STARTER_NAME else resolve(target)
        choose = f"can draft for {path.stem}; choose it among the drafters"
        if how == Derivation.SEARCH:
            found = search(path, default_format(read_header(path)), report=report, cancel=cancel)
            made = found.made
            before = "" if found.before == found.after else f" ({found.before.agreement:.0%} without the search)"
            return (
                f"{made.name} {choose}. Over {found.compared_tokens} tokens it {made.measured}{before}; alone it could "
                f"reach {found.after.best_speedup:.2f}× at most"
            )
        if how == Derivation.BITS:
            return f"{derive(path, (), LlamaFileType.MOSTLY_Q2_K, report, cancel).name} {choose}"
        return f"{derive_default(path, report, cancel).name} {choose}"

    return work


def identifying() -> Work:
    """An errand that hashes every model whose hash is not known yet."""

    def work(report: Report, cancel: threading.Event) -> str:
        paths = [model.path for model in list_models() if not model.fault]
        known = known_sha256s(paths)
        missing = [path for path in paths if path not in known]
        for path in missing:
            sha256_of(path, report, cancel)
        return f"all {len(paths)} models have their hash now; {len(missing)} were read for it"

    return work


def removable_update() -> Any:
    """What can be removed."""
    return gr.update(choices=list(removable()), value=None)


def dropped_file(name: str, size_bytes: int) -> Path | None:
    """The installed model that a dropped file is, going by what a browser tells of it; None when there is none."""
    for model in list_models():
        if model.path.name == name and model.path.stat().st_size == size_bytes:
            return model.path
    return None
