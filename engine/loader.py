"""A target and its drafters, loaded together and closed together; a failed load leaves nothing behind."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from engine.acceptance import HeardStore
from engine.config import MAX_DRAFT_TOKENS, SetConfig
from engine.cost import CostModel, CostStore, calibrate
from engine.drafters.base import Drafter
from engine.drafters.model import ModelDrafter
from engine.drafters.ngram import NgramDrafter
from engine.drafters.suffix import SuffixDrafter
from engine.drafters.translated import TranslatedDrafter
from engine.drafting import Panel
from engine.errors import IncompatibleDrafter, ModelFileError
from engine.learning import Learning
from engine.memory import cache_in_memory, check_memory, weights_in_memory
from engine.prefill import PromptReader
from engine.runtime.context import Context, ContextSettings
from engine.runtime.devices import choose_kv_type, has_gpu
from engine.runtime.model import LoadCancelled, Model, check_gguf
from engine.runtime.template import ChatTemplate
from engine.setting import Setting, choose_setting
from engine.stored import target_key

FREE_DRAFTERS: dict[str, Callable[[], Drafter]] = {"ngram": NgramDrafter, "suffix": SuffixDrafter}
TARGET_SEQUENCES = 16
"""Conversations, and side branches of the one that computes."""
CPU_BATCH_TOKENS = 128
"""Small enough for progress and a prompt stop; larger gains nothing on a CPU."""
GPU_BATCH_TOKENS = 512
HEARD_FILE = "heard.json"
"""Beside the file of costs."""

SetProgress = Callable[[str, float], None]
"""Called with what is being done and its share from 0 to 1."""


class _Store:
    """Where a set's learners are kept."""

    def __init__(self, cost_file: Path | None, key: str) -> None:
        self.costs = CostStore(cost_file)
        self.heard = HeardStore(cost_file.with_name(HEARD_FILE) if cost_file else None, key)
        self.key = key


class LoadedSet:
    """Owns everything native of one set. Used and closed by the thread that loaded it."""

    def __init__(
        self,
        config: SetConfig,
        model: Model,
        context: Context,
        panel: Panel,
        learning: Learning,
        template: ChatTemplate,
        setting: Setting,
        reader: PromptReader,
        store: _Store,
        resources: ExitStack,
    ) -> None:
        """Use `load` instead."""
        self.config = config
        self.model = model
        self.context = context
        self.panel = panel
        self.learning = learning
        self.template = template
        self.setting = setting
        """Why the target's cache has its format, and which passes may carry drafts."""
        self.reader = reader
        self._store = store
        self._resources = resources

    @classmethod
    def load(
        cls, config: SetConfig, progress: SetProgress | None = None, cancel: threading.Event | None = None
    ) -> LoadedSet:
        """Load and calibrate.

        Raises:
            QuorumError: a file, a pairing or the memory does not do; nothing is left loaded.
            LoadCancelled: `cancel` was set.
        """
        report: SetProgress = progress or (lambda _phase, _share: None)
        with ExitStack() as resources:
            model = _load_target(config, report, cancel)
            resources.callback(model.close)
            template = ChatTemplate(model)
            context_tokens = _context_tokens(config, model)
            setting = choose_setting(
                model,
                config,
                target_settings(config, context_tokens),
                lambda share: report("Comparing cache formats", share),
                cancel,
            )
            context = Context(model, replace(target_settings(config, context_tokens), kv_type=setting.kv_type))
            drafters: list[Drafter] = []
            for spec in config.drafters:
                taken = {*FREE_DRAFTERS, *(drafter.name for drafter in drafters)}
                drafter = _load_drafter(spec, taken, config, model, context, report, cancel)
                resources.callback(drafter.close)
                drafters.append(drafter)
            store = _Store(config.cost_file, _cost_key(config, context))
            cost = store.costs.load(store.key) or CostModel()
            if not cost.is_calibrated:
                calibrate(cost, context, lambda done, total: report("Measuring this machine", done / total), cancel)
            panel = Panel(drafters)
            panel.measure(cost, cancel or threading.Event())
            store.costs.save(store.key, cost)
            learning = _learning(config, cost, panel, setting)
            store.heard.recall(learning.acceptance)
            reader = PromptReader(context)
            return cls(config, model, context, panel, learning, template, setting, reader, store, resources.pop_all())
        raise AssertionError("unreachable")

    def with_drafters(self, names: Collection[str]) -> LoadedSet:
        """The same models and measured costs with some of the drafters, and nothing else learnt than at the last start.

        What is returned lives no longer than this set, and closing it closes nothing.
        """
        panel = self.panel.only(names)
        learning = _learning(self.config, self.learning.cost, panel, self.setting)
        self._store.heard.recall(learning.acceptance)
        return LoadedSet(
            self.config,
            self.model,
            self.context,
            panel,
            learning,
            self.template,
            self.setting,
            self.reader,
            self._store,
            ExitStack(),
        )

    def save_learnt(self) -> None:
        """Keep what was learnt about this machine and these drafters for the next start."""
        self._store.costs.save(self._store.key, self.learning.cost)
        self._store.heard.save(self.learning.acceptance)

    def close(self) -> None:
        """Free drafters, context and weights, in that order."""
        self._resources.close()


def _learning(config: SetConfig, cost: CostModel, panel: Panel, setting: Setting) -> Learning:
    return Learning(
        cost,
        [drafter.name for drafter in panel.free],
        [drafter.name for drafter in panel.models],
        runs_apart=has_gpu() and config.placement.gpu_layers != 0,
        setting=setting,
    )


def _load_target(config: SetConfig, report: SetProgress, cancel: threading.Event | None) -> Model:
    check_gguf(config.target)
    check_memory(config.target, weights_in_memory(config.target, config.placement), "loading it")
    phase = f"Loading {config.target.name}"
    return Model(
        config.target,
        gpu_layers=config.placement.gpu_layers,
        progress=lambda share: report(phase, share),
        cancel=cancel,
    )


def _context_tokens(config: SetConfig, model: Model) -> int:
    """How many tokens the target's context holds.

    Raises:
        MemoryShortage: it finds no room.
    """
    context_tokens = config.context_tokens or model.trained_context_tokens
    check_memory(
        config.target,
        cache_in_memory(model, config.placement, context_tokens),
        f"a context of {context_tokens} tokens",
    )
    return context_tokens


def target_settings(config: SetConfig, context_tokens: int) -> ContextSettings:
    """How the target's context is made, as far as it can be told before anything is measured."""
    return ContextSettings(
        context_tokens=context_tokens,
        kv_type=config.kv_type or choose_kv_type(config.exactness),
        threads=config.placement.threads,
        max_outputs=MAX_DRAFT_TOKENS + 1,
        max_sequences=TARGET_SEQUENCES,
        batch_tokens=GPU_BATCH_TOKENS if has_gpu() else CPU_BATCH_TOKENS,
    )


def _load_drafter(
    spec: str,
    taken_names: Collection[str],
    config: SetConfig,
    target: Model,
    context: Context,
    report: SetProgress,
    cancel: threading.Event | None,
) -> Drafter:
    make_free = FREE_DRAFTERS.get(spec)
    if make_free is not None:
        return make_free()
    path = Path(spec)
    if path.suffix != ".gguf" and not path.exists():
        raise ModelFileError(
            f"no drafter is called {spec!r}; use {', '.join(FREE_DRAFTERS)} or the path of a GGUF file"
        )
    if cancel is not None and cancel.is_set():
        raise LoadCancelled(f"loading {path.name} was cancelled")
    check_gguf(path)
    check_memory(path, weights_in_memory(path, config.placement_of(spec)), "loading it as a drafter")
    phase = f"Loading drafter {path.stem}"

    def load(*, is_translated: bool) -> ModelDrafter:
        return ModelDrafter.load(
            path,
            _drafter_name(path, taken_names),
            target.vocabulary,
            placement=config.placement_of(spec),
            context_tokens=context.context_tokens,
            is_translated=is_translated,
            progress=lambda share: report(phase, share),
            cancel=cancel,
        )

    try:
        return load(is_translated=False)
    except IncompatibleDrafter:
        if not config.translates:
            raise
    return TranslatedDrafter(load(is_translated=True), target.vocabulary)


def _drafter_name(path: Path, taken_names: Collection[str]) -> str:
    """The file's name; with its folder, or numbered, where another drafter has that name."""
    numbered = (f"{path.stem}-{number}" for number in itertools.count(2))
    names = itertools.chain((path.stem, f"{path.parent.name}/{path.stem}"), numbered)
    return next(name for name in names if name not in taken_names)


def _cost_key(config: SetConfig, context: Context) -> str:
    """Identity of the target and of everything its speed depends on."""
    placements = (f"{Path(name).name}: {own.threads}, {own.gpu_layers}" for name, own in config.drafter_placements)
    return target_key(config, context.settings.threads, context.settings.kv_type.name, *placements)
