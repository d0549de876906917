"""The backend setting of a set: the fastest cache format that measures exact here, and which passes may carry drafts.

Candidates are probed from the fastest on, and the first that is bit-equal in all that drafting and prompts do is
taken. Where none is, the one is taken in which most batch sizes are, and drafts are kept to these sizes: a pass of
another size leaves other bits in the cache, which scoring a doubtful token again, alone, would not mend. On the way it
is measured whether requests that share passes are bit-equal too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from engine.config import Exactness, KvType, SetConfig
from engine.exactness import ExactnessReport, Way, probe
from engine.memory import give_back_freed
from engine.runtime.api import native
from engine.runtime.context import Context, ContextSettings
from engine.runtime.devices import choose_kv_type, has_gpu
from engine.runtime.model import LoadCancelled, Model
from engine.stored import StoredEntries, target_key

CPU_CANDIDATES = (KvType.F16, KvType.BF16_F16, KvType.BF16, KvType.Q8_0)
"""From the fastest on, prompts included: those of a cache with BF16 can be read in an F16 one and carried over."""
GPU_CANDIDATES = (KvType.F16,)
PROBED_CONTEXT_TOKENS = 768
STORE_VERSION = 3

SAME_DISTRIBUTION = "same distribution, not the same tokens"
"""What residual acceptance promises."""

SettingProgress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Setting:
    """How a target is run."""

    kv_type: KvType
    is_exact: bool | None
    """Whether all that was compared is bit-equal; None where nothing was."""
    pass_sizes: tuple[int, ...] | None
    """The sizes, from 2 tokens on, of the passes that may carry a draft; None where all may."""
    allows_branches: bool
    """Whether side branches of token trees may be sent."""
    price: float | None = None
    """Time of a one-token pass against that with an F16 cache; None where it was not measured."""
    are_requests_exact: bool | None = None
    """Whether several requests in a pass are bit-equal to each alone; None where they were not compared."""

    def fitting(self, tokens: int) -> int:
        """The largest pass of at most so many tokens that may be sent."""
        if self.pass_sizes is None:
            return tokens
        return max((size for size in self.pass_sizes if size <= tokens), default=1)

    def document(self) -> dict[str, Any]:
        """As plain data."""
        return {
            **asdict(self),
            "kv_type": self.kv_type.name,
            "badge": self.badge,
            "requests_badge": self.requests_badge,
        }

    @property
    def badge(self) -> str:
        """One clause for the user."""
        cache = f"{self.kv_type.name} cache{self._price_text}"
        if self.is_exact is None:
            return f"not compared: {cache}"
        if self.is_exact:
            return f"exact: {cache}"
        if not self.pass_sizes:
            return f"no batch is exact here, so nothing is drafted: {cache}; --exactness fast drafts all the same"
        return f"exact by drafting in passes of {', '.join(map(str, self.pass_sizes))} tokens only: {cache}"

    @property
    def _price_text(self) -> str:
        if self.price is None:
            return ""
        percent = round(100 * (self.price - 1))
        # What is measured as faster is so by chance, or because other programs slowed F16 down.
        return f", {percent} % dearer a token than F16" if percent > 0 else ", no dearer than F16"

    @property
    def requests_badge(self) -> str:
        """One clause for the user on several requests at once."""
        if self.is_exact is False:
            return "not exact: with this model, passes of several tokens differ from single ones in the last bits"
        if self.are_requests_exact is None:
            return "not compared: requests in one pass may differ from each alone in the last bits"
        if not self.are_requests_exact:
            return "not exact: requests in one pass differ from each alone in the last bits"
        return "exact: every request says what it says alone"


def choose_setting(
    model: Model, config: SetConfig, settings: ContextSettings, report: SettingProgress, cancel: threading.Event | None
) -> Setting:
    """Probe what is not known yet of this model on this machine.

    Args:
        model: The target.
        config: What is asked for.
        settings: Of the context that will be made, in any cache format.
        report: Called with the share done.
        cancel: Set to stop.

    Raises:
        DecodeError: llama.cpp refused a pass.
        LoadCancelled: `cancel` was set.
    """
    expected = config.kv_type or choose_kv_type(config.exactness)
    if not model.can_roll_back:
        return Setting(expected, None, (), allows_branches=False)
    if config.exactness is Exactness.FAST:
        return Setting(expected, None, None, allows_branches=True)
    store = StoredEntries(config.cost_file and config.cost_file.with_name("settings.json"), STORE_VERSION)
    key = _key(config, settings)
    known = _restored(store.get(key))
    if known is not None:
        return known
    setting = _measured(model, config, settings, report, cancel)
    give_back_freed()
    store.put(key, setting.document())
    return setting


def _measured(
    model: Model, config: SetConfig, settings: ContextSettings, report: SettingProgress, cancel: threading.Event | None
) -> Setting:
    candidates = GPU_CANDIDATES if has_gpu() else CPU_CANDIDATES
    if config.kv_type is not None:
        candidates = (config.kv_type,)
    found: dict[KvType, ExactnessReport] = {}
    for number, kv_type in enumerate(candidates):

        def told(share: float, number: int = number) -> None:
            if cancel is not None and cancel.is_set():
                raise LoadCancelled("comparing cache formats was cancelled")
            report((number + share) / len(candidates))

        own = ContextSettings(
            context_tokens=PROBED_CONTEXT_TOKENS,
            kv_type=kv_type,
            threads=settings.threads,
            max_outputs=settings.max_outputs,
            max_sequences=settings.max_sequences,
            batch_tokens=settings.batch_tokens,
        )
        with contextlib.closing(Context(model, own)) as context:
            found[kv_type] = probe(context, is_thorough=False, progress=told)
        if _is_exact(found[kv_type]):
            break
    best = max(found, key=lambda kv_type: (_is_exact(found[kv_type]), len(found[kv_type].equal_batches)))
    fastest_ms = found[KvType.F16].one_token_ms if KvType.F16 in found else 0.0
    return Setting(
        kv_type=best,
        is_exact=_is_exact(found[best]),
        pass_sizes=None if _is_exact(found[best]) else found[best].equal_batches,
        allows_branches=found[best].is_equal(Way.TREE),
        price=found[best].one_token_ms / fastest_ms if fastest_ms else None,
        are_requests_exact=found[best].is_equal(Way.REQUESTS) if found[best].of(Way.REQUESTS) else None,
    )


def _is_exact(report: ExactnessReport) -> bool:
    return report.is_equal(Way.BATCH, Way.PREFILL)


def _key(config: SetConfig, settings: ContextSettings) -> str:
    """Identity of the target and of everything its arithmetic depends on."""
    asked = config.kv_type.name if config.kv_type else ""
    return target_key(config, settings.threads, native().system_info, f"batch={settings.batch_tokens}", asked)


def _restored(entry: Any) -> Setting | None:
    """A stored setting; None where it is missing or damaged."""
    try:
        sizes = entry["pass_sizes"]
        return Setting(
            kv_type=KvType[entry["kv_type"]],
            is_exact=bool(entry["is_exact"]),
            pass_sizes=None if sizes is None else tuple(map(int, sizes)),
            allows_branches=bool(entry["allows_branches"]),
            price=None if entry["price"] is None else float(entry["price"]),
            are_requests_exact=None if entry["are_requests_exact"] is None else bool(entry["are_requests_exact"]),
        )
    except (KeyError, TypeError, ValueError):
        return None
