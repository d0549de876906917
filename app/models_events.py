"""The events of the Models tab, and what they ask of the service and of the model files.

Handlers translate. What a path means, what fits and what may be removed is decided where the model files are known.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from app import models_view, views
from app.choices import SetChoice
from app.layout import Layout
from app.models_tab import (
    ASK_BEFORE_REMOVING,
    deriving,
    dropped_file,
    fetching,
    identifying,
    removable_update,
)
from app.notices import attempt
from app.placements import Placements
from app.service import Service
from app.set_controls import drafter_updates, target_update
from engine.config import SetConfig
from engine.errors import ModelFileError, QuorumError, SettingError
from models.budget import forecast
from models.catalogue import recommended, this_machine
from models.gguf_file import read_header
from models.identity import known_sha256s
from models.library import STARTER_NAME, add_folder, list_models, path_of, remove_model, resolve

UNLOAD_PATIENCE_S = 5.0

Values = Mapping[Any, Any]


def connect_models(layout: Layout, events: ModelsEvents, command: Any, followed: Any) -> None:
    """Tie the events of the model files."""
    models, sets = layout.models, layout.models.sets
    placement = sets.placement
    listed = models.listed()
    offered = [sets.drafters, sets.unfit]
    picked = [placement.model, *placement.boxes()]
    command(layout.models_tab.select, events.list_installed, None, listed)
    gr.on(
        [
            layout.models_tab.select,
            sets.drafters.change,
            sets.context_tokens.blur,
            sets.kv_type.input,
            *(box.change for box in placement.boxes()),
        ],
        events.foresee,
        sets.inputs(),
        models.memory,
        queue=False,
        show_progress="hidden",
        trigger_mode="always_last",  # else a forecast of what stood there before may come in after the last one
        api_visibility="private",
    )

    chosen = command(sets.target.change, events.offer_drafters, sets.target, offered)
    placed = command(chosen.then, events.show_placement, sets.inputs(), placement.boxes())
    command(placed.then, events.foresee, sets.inputs(), models.memory)
    command(sets.target.input, lambda: "", None, sets.target_path)
    for event in (sets.drafters.change, sets.drafter_paths.blur):
        command(event, events.offer_placements, sets.inputs(), picked)
    command(placement.model.input, events.show_placement, sets.inputs(), placement.boxes())
    gr.on(
        [event for box in placement.boxes() for event in (box.input, box.blur)],  # Gradio calls no paste an input
        events.write_placement,
        sets.inputs(),
        layout.models_notice,
        queue=False,
        show_progress="hidden",
        trigger_mode="always_last",  # else what is typed while a letter before it is on its way is left out
        api_visibility="private",
    )

    def listed_again(asked: Any) -> None:
        done = command(asked.then, events.list_installed, None, listed)
        command(done.then, events.offer_targets, None, sets.target)
        command(done.then, events.offer_drafters, sets.target, offered)

    for asked in (
        command(models.fetch.click, events.fetch, models.what, layout.models_notice),
        command(models.derive.click, events.derive, [sets.target, models.derivation], layout.models_notice),
        command(models.identify.click, events.identify, None, layout.models_notice),
        command(models.unload.click, events.unload, None, layout.models_notice),
    ):
        listed_again(followed(asked))
    removed = command(
        models.remove.click, events.remove, models.removable, layout.models_notice, js=ASK_BEFORE_REMOVING
    )
    listed_again(removed)
    pasted = [sets.target_path, sets.target]
    taken = [sets.target, sets.target_path, layout.models_notice]
    for asked in (
        command(sets.use_path.click, events.use_path, pasted, taken),
        command(sets.target_path.submit, events.use_path, pasted, taken),
        command(models.dropped.change, events.take_dropped, [models.dropped, sets.target], [*taken, models.dropped]),
    ):
        done = command(asked.then, events.list_installed, None, listed)
        command(done.then, events.offer_drafters, sets.target, offered)
    command(models.cancel.click, events.cancel_errand, None, None)


class ModelsEvents:
    """From the tab's events to the service and back."""

    def __init__(self, service: Service, layout: Layout, base: SetChoice, placements: Placements) -> None:
        self._service = service
        self._placements = placements
        self._sets = layout.models.sets
        self._base = base

    def list_installed(self) -> tuple[str, str, Any]:
        """Returns what is installed, what suits this machine, and what can be removed."""
        machine = this_machine()
        models = list_models()
        hashes = known_sha256s(model.path for model in models)
        loaded = self._loaded_config()
        return (
            models_view.installed(models, str(loaded.target) if loaded else "", hashes),
            models_view.recommendation(machine, recommended(machine)),
            removable_update(),
        )

    def foresee(self, values: Values) -> str:
        """What the set that is chosen would take, and where its models would run."""
        loaded = self._loaded_config()
        if not self._sets.chosen_target(values):
            return ""
        try:
            choice = self._sets.choice(values, self._base, self._placements)
            placed = choice.config(resolve(choice.target), choice.drafters or (), loaded)
            return models_view.memory(forecast(placed.config, replaced=loaded), placed)
        except QuorumError as error:
            return models_view.no_forecast(str(error))

    def offer_targets(self) -> Any:
        return target_update(self._service.loaded)

    def offer_drafters(self, target: str) -> tuple[Any, str]:
        return drafter_updates(target, self._loaded_config())

    def offer_placements(self, values: Values) -> tuple[Any, Any, Any]:
        """Returns the models that can be placed, and the numbers of the one that is picked."""
        target, drafters = self._sets.chosen_target(values), self._sets.chosen_drafters(values)
        return self._sets.placement.offer(values, target, drafters, self._base, self._placements)

    def show_placement(self, values: Values) -> tuple[Any, Any]:
        """Returns the numbers of the model that is picked."""
        return self._sets.placement.show(values, self._sets.chosen_target(values), self._base, self._placements)

    def write_placement(self, values: Values) -> Any:
        """Returns what stood in the way of keeping the numbers; what is shown stays where nothing did."""
        target = self._sets.chosen_target(values)
        return attempt(lambda: self._sets.placement.write(values, target, self._placements)) or gr.skip()

    def fetch(self, what: str) -> str:
        return attempt(lambda: self._service.errands.begin(fetching(what)))

    def derive(self, target: str, how: str) -> str:
        return attempt(lambda: self._service.errands.begin(deriving(target, how)))

    def identify(self) -> str:
        return attempt(lambda: self._service.errands.begin(identifying()))

    def remove(self, what: str | None) -> str:
        """Remove a model or forget a folder; None where nothing was chosen or it was not meant."""
        if what is None:
            return _remark("Nothing was removed: choose a model or a folder beside the button, and agree")
        return attempt(lambda: self._remove(what))

    def unload(self) -> str:
        return attempt(lambda: self._service.unload().wait_until_over(UNLOAD_PATIENCE_S))

    def cancel_errand(self) -> None:
        if self._service.errands.last is not None:
            self._service.errands.last.cancel()

    def use_path(self, text: str | None, target: str | None) -> tuple[Any, Any, str]:
        """Choose a file as the target, or look into a folder.

        Returns the targets to choose from, what is to stand in the box, and a notice.
        """
        try:
            path = path_of(text or "")
            if not (text or "").strip():
                raise SettingError("no path is written; paste the path of a GGUF file, or of a folder with some")
            if os.path.isdir(path):
                return self._use_folder(path, target or STARTER_NAME)
            return self._use_file(resolve(str(path)))
        except QuorumError as error:
            return gr.skip(), gr.skip(), views.alert(str(error))

    def take_dropped(self, dropped: str, target: str | None) -> tuple[Any, Any, Any, Any]:
        """What the browser tells of something that was dropped: a path seldom, else name and size of a file.

        Returns what `use_path` returns, and an emptied place for the next one.
        """
        if not dropped:
            return gr.skip(), gr.skip(), gr.skip(), gr.skip()
        told = json.loads(dropped)
        lines = str(told.get("text", "")).splitlines()
        written = [line for line in lines if not line.startswith("#") and re.search(r"[/\\]", line)]
        if written:
            return *self.use_path(written[0], target), ""
        name, size_bytes = str(told.get("name", "")), int(told.get("size", 0))
        is_folder = bool(told.get("isFolder"))
        path = None if is_folder else dropped_file(name, size_bytes)
        if path is not None:
            return *self._use_file(path), ""
        return gr.skip(), gr.skip(), views.alert(_without_path(name, size_bytes, is_folder=is_folder)), ""

    def _use_folder(self, path: Path, target: str) -> tuple[Any, Any, str]:
        add_folder(path)
        targets = target_update(self._service.loaded, None if target == STARTER_NAME else Path(target))
        found = sum(model.path.is_relative_to(path.resolve()) for model in list_models())
        files = "1 model file" if found == 1 else f"{found or 'no'} model files"
        return targets, "", _remark(f"{path}: {files}. It is looked into from now on")

    def _use_file(self, path: Path) -> tuple[Any, Any, str]:
        facts = read_header(path)
        if facts.kind != "model" or not facts.is_complete:
            fault = f"holds {facts.kind!r}" if facts.is_complete else "lacks some of its parts"
            raise ModelFileError(f"{path} is no whole language model: it {fault}")
        chosen = target_update(self._service.loaded, path)
        return chosen, "", _remark(f"{path.stem} is chosen as the target; the file stays where it is")

    def _remove(self, what: str) -> None:
        loaded = self._loaded_config()
        used = {loaded.target.resolve(), *(Path(name).resolve() for name in loaded.drafters)} if loaded else set()
        if not os.path.isdir(path_of(what)) and resolve(what).resolve() in used:
            raise SettingError(f"{what} is loaded; unload it, then remove it")
        remove_model(what)

    def _loaded_config(self) -> SetConfig | None:
        return self._service.loaded.config if self._service.loaded else None


def _remark(text: str) -> str:
    return f'<p class="q-small" role="status">{escape(text)}.</p>'


def _without_path(name: str, size_bytes: int, *, is_folder: bool) -> str:
    if is_folder:
        return (
            f"the browser does not tell where the folder {name} lies; copy its path in your file manager and paste it "
            "into the box"
        )
    return (
        f"the browser does not tell where {name} lies, only its name and size ({size_bytes / 1e6:,.0f} MB), and no "
        "model of that name and size is known here; copy its path in your file manager and paste it into the box, or "
        "the path of the folder it lies in"
    )
