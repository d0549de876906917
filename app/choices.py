"""From what a user picks in the page to the settings the engine takes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from app.jobs import PhaseReport, Preparation, in_phases
from engine.config import Exactness, KvType, ModelPlacement, SetConfig, default_threads
from engine.errors import SettingError
from engine.loader import FREE_DRAFTERS
from models.budget import PlacedSet, place, require_room
from models.folders import cache_folder
from models.library import STARTER_NAME, resolve
from models.pairing import choose_drafters, order_reason
from models.starter import fetch_starter


@dataclass(frozen=True, slots=True)
class SetChoice:
    """A target and its drafters, as named by a user."""

    target: str = STARTER_NAME
    """Name or path; the starter is fetched when it is not there."""
    drafters: tuple[str, ...] | None = None
    """Names or paths; None leaves the choice to what fits the target and the memory."""
    context_tokens: int = 4096
    threads: int | None = None
    """Of the processor; None for one on each physical core."""
    gpu_layers: int | None = None
    """Layers on the GPU, of every model without a number of its own; -1 is all, None chooses what finds room."""
    drafter_gpu_layers: tuple[tuple[str, int], ...] = ()
    """Drafters by name or path that have their own number of layers on the GPU, not the target's."""
    drafter_threads: tuple[tuple[str, int], ...] = ()
    """Drafters by name or path that have their own number of threads, not the target's."""
    exactness: Exactness = Exactness.EXACT
    translates: bool = False
    """Whether drafters of other vocabularies are allowed."""
    kv_type: KvType | None = None
    """Number format of the target's cache; None: what `exactness` asks for."""

    def config(self, target: Path, drafters: Sequence[str], replaced: SetConfig | None = None) -> PlacedSet:
        """The set of these files, with everything in its place.

        Args:
            target: The target's file.
            drafters: Names or paths.
            replaced: The set that is unloaded first.

        Raises:
            QuorumError: a name or a value is wrong.
        """
        placement = ModelPlacement(threads=default_threads() if self.threads is None else self.threads)
        if self.gpu_layers is not None:
            placement = replace(placement, gpu_layers=self.gpu_layers)
        config = SetConfig(
            target=target,
            drafters=tuple(name if name in FREE_DRAFTERS else str(resolve(name)) for name in drafters),
            context_tokens=self.context_tokens,
            placement=placement,
            exactness=self.exactness,
            cost_file=cache_folder() / "costs.json",
            kv_type=self.kv_type,
            translates=self.translates,
            drafter_placements=tuple(
                (str(resolve(name)), replace(placement, gpu_layers=layers)) for name, layers in self.drafter_gpu_layers
            ),
        )
        placed = PlacedSet(config, "") if self.gpu_layers is not None else place(config, replaced)
        return replace(placed, config=self._with_threads(placed.config))

    def _with_threads(self, config: SetConfig) -> SetConfig:
        """The set with the drafters' own numbers of threads; where they lie stays as it is."""
        placements = dict(config.drafter_placements)
        for name, threads in self.drafter_threads:
            drafter = str(resolve(name))
            placements[drafter] = replace(config.placement_of(drafter), threads=threads)
        return replace(config, drafter_placements=tuple(placements.items()))


def whole_number(text: str | None, label: str) -> int | None:
    """What was written into a box; None when it was left empty.

    Raises:
        SettingError: it is no whole number.
    """
    written = (text or "").strip()
    if not written:
        return None
    try:
        return int(written)
    except ValueError:
        raise SettingError(f"{label} must be a whole number, found {written!r}") from None


def as_it_is(choice: SetChoice) -> SetChoice:
    """The choice itself."""
    return choice


def preparation(
    choice: SetChoice, replaced: SetConfig | None = None, placing: Callable[[SetChoice], SetChoice] = as_it_is
) -> Preparation:
    """What comes before a load: find files, fetch the starter, choose and place drafters, ask for room.

    Args:
        choice: What the user picked.
        replaced: The set that is loaded now and unloaded first.
        placing: Says where models run that the choice does not place, once its drafters are known.
    """

    def prepare(report: PhaseReport, cancel: threading.Event) -> SetConfig:
        target = _find_target(choice.target, report, cancel)
        drafters = choice.drafters
        if drafters is None:
            report("Looking for drafters", 0.0)
            drafters = choose_drafters(target, choice.context_tokens)
            reason = order_reason(drafters)
            if reason:
                report(f"Drafters: {reason}", 0.0)
        placed = placing(replace(choice, drafters=tuple(drafters))).config(target, drafters, replaced)
        if placed.reason:
            report(placed.reason, 0.0)
        require_room(placed.config, replaced)
        return placed.config

    return prepare


def _find_target(name: str, report: PhaseReport, cancel: threading.Event) -> Path:
    return fetch_starter(in_phases(report), cancel) if name == STARTER_NAME else resolve(name)
