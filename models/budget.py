"""How much memory a target and its drafters will take, before any of them is loaded, and what to change if too much.

Weights are mapped from the file; those that llama.cpp copies into another order for this CPU count a second time, as
memory of their own. Caches and buffers come from a dry run of llama.cpp, and are estimated where it does not say.
What a load peaks at is what counts as used; what it cannot do without afterwards decides whether it fits, because the
system gives up the mapped originals of copied weights without harm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from engine.config import KvType, ModelPlacement, NumberFormat, SetConfig
from engine.drafters.model import SPARE_CELLS, drafter_settings
from engine.errors import MemoryShortage
from engine.loader import FREE_DRAFTERS, target_settings
from engine.runtime.api import native
from engine.runtime.context import ContextSettings
from engine.runtime.devices import has_gpu, list_devices
from models.dry_run import Finding, Layout, dry_run
from models.gguf_file import GgufFacts, TensorFacts, read_header, read_tensors, split_paths

RESERVE_BYTES = 300 * 2**20
"""Left free for the app itself, its measurements and other programs."""

_BYTES_PER_NUMBER = {NumberFormat.F16: 2.0, NumberFormat.BF16: 2.0, NumberFormat.Q8_0: 34 / 32}
_CELL_STEP = 256
_BOOKKEEPING_BYTES = 24 * 2**20
_COMPARED_ROWS = 96
"""Rows of logits that are held at once while a target is probed for exactness, which is when it takes the most."""
_FEW_CONTEXT_TOKENS = 1024
_ESTIMATES_ARE_WITHIN = 1.25
"""A set that finds room even if its estimate is so much too small needs no closer look."""
_PASSES_BESIDE_ONE_OF_THE_TARGET = 3
"""How often a drafter runs while its target runs once, about: what it is worth to have it on the faster processor."""
_GPU_SHARE_TO_FILL = 0.9
"""Of what is free on the GPU, as a forecast may be wrong by a tenth and a full GPU fails the load."""
_X86_REPACKED = {"Q4_0": 8, "Q4_K": 8, "IQ4_NL": 8, "MXFP4": 8}
_ARM_REPACKED = {"Q4_0": 4, "IQ4_NL": 4, "MXFP4": 4, "Q8_0": 4, "Q4_K": 8, "Q5_K": 8, "Q6_K": 8}
"""Formats that llama.cpp reorders, and what the number of rows must be a multiple of."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What one model takes, in bytes."""

    path: Path
    is_target: bool
    mapped: int
    """The file's pages, shared with whatever else reads it."""
    repacked: int
    cache: int
    """Keys and values of the whole context."""
    compute: int
    bookkeeping: int
    gpu: int
    """All that lies on a GPU; not part of the others."""
    is_estimate: bool
    """Caches and buffers were computed from the header, because a dry run was not to be had."""

    @property
    def peak(self) -> int:
        """Memory of its own and resident file pages, at their highest."""
        return self.mapped + self.repacked + self.cache + self.compute + self.bookkeeping

    @property
    def lasting(self) -> int:
        """What generation goes on using: mapped weights that were copied are not read again."""
        return self.peak - self.repacked


@dataclass(frozen=True, slots=True)
class Forecast:
    """The needs of a set against what is free."""

    needs: tuple[MemoryNeed, ...]
    context_tokens: int
    free_bytes: int
    free_gpu_bytes: int
    advice: tuple[str, ...] = ()
    """What would make it fit, best first; empty when it fits."""

    @property
    def peak_bytes(self) -> int:
        return sum(need.peak for need in self.needs)

    @property
    def lasting_bytes(self) -> int:
        return sum(need.lasting for need in self.needs)

    @property
    def gpu_bytes(self) -> int:
        return sum(need.gpu for need in self.needs)

    @property
    def gives_back_bytes(self) -> int:
        """What is free again in main memory once the set is unloaded; pages of a file count as free all along."""
        return sum(need.peak - need.mapped for need in self.needs)

    @property
    def fits(self) -> bool:
        return self.lasting_bytes + RESERVE_BYTES <= self.free_bytes and self.gpu_bytes <= self.free_gpu_bytes

    @property
    def summary(self) -> str:
        """One sentence."""
        verdict = "fits" if self.fits else "does not fit"
        text = f"{verdict}: needs {_size(self.lasting_bytes)} of memory, {_size(self.free_bytes)} are free"
        if self.gpu_bytes:
            text += f"; {_size(self.gpu_bytes)} on the GPU, {_size(self.free_gpu_bytes)} free there"
        return "; ".join((text, *self.advice))


def forecast(
    config: SetConfig,
    free_bytes: int | None = None,
    free_gpu_bytes: int | None = None,
    replaced: SetConfig | None = None,
) -> Forecast:
    """What loading `config` would take.

    Args:
        config: The set.
        free_bytes: None reads what is free now.
        free_gpu_bytes: The same.
        replaced: The set that is unloaded before this one is loaded, whose room is free then.

    Raises:
        ModelFileError: a file cannot be used.
    """
    before = _foreseen(replaced) if replaced else None
    if free_bytes is None:
        free_bytes = psutil.virtual_memory().available + (before.gives_back_bytes if before else 0)
    if free_gpu_bytes is None:
        free_gpu_bytes = _free_gpu_bytes() + (before.gpu_bytes if before else 0)
    result = replace(_foreseen(config), free_bytes=free_bytes, free_gpu_bytes=free_gpu_bytes)
    return result if result.fits else _with_advice(result, config)


def require_room(config: SetConfig, replaced: SetConfig | None = None) -> None:
    """Refuse a set that finds no room, before any of it is loaded.

    A set that is far from filling the memory is let through by its headers alone, within milliseconds.

    Raises:
        MemoryShortage: it does not fit; the message says what would.
        ModelFileError: a file cannot be used.
    """
    layouts = _layouts(config)
    estimated = sum(_need(layout, None, is_target=index == 0).lasting for index, layout in enumerate(layouts))
    uses_gpu = has_gpu() and any(layout.gpu_layers for layout in layouts)
    free_bytes = psutil.virtual_memory().available
    if not uses_gpu and _ESTIMATES_ARE_WITHIN * estimated + RESERVE_BYTES <= free_bytes:
        return
    result = forecast(config, replaced=replaced)
    if not result.fits:
        with_drafters = " with its drafters" if len(layouts) > 1 else ""
        raise MemoryShortage(f"{config.target.name}{with_drafters} {result.summary}")


def _foreseen(config: SetConfig) -> Forecast:
    """The needs alone."""
    layouts = _layouts(config)
    needs = tuple(
        _need(layout, finding, is_target=index == 0)
        for index, (layout, finding) in enumerate(zip(layouts, dry_run(layouts), strict=True))
    )
    return Forecast(needs, layouts[0].settings.context_tokens, free_bytes=0, free_gpu_bytes=0)


def _layouts(config: SetConfig) -> list[Layout]:
    """Of the target and of each drafter that is a file."""
    context_tokens = config.context_tokens or read_header(config.target).context_tokens
    drafters = (
        _drafter_layout(Path(name), config.placement_of(name), context_tokens) for name in _files(config.drafters)
    )
    return [_target_layout(config, context_tokens), *drafters]


@dataclass(frozen=True, slots=True)
class PlacedSet:
    """A set with layers on the GPU for each of its models, and why they are so many."""

    config: SetConfig
    reason: str
    """One sentence; empty when there was nothing to choose, as without a GPU."""


def place(config: SetConfig, replaced: SetConfig | None = None, free_gpu_bytes: int | None = None) -> PlacedSet:
    """Put on the GPU what finds room there: all of it, or what makes a step fastest.

    When not everything fits, drafters come whole and before the target's layers wherever that keeps more reading off
    the slower memory: they are small, and run several times for each of the target's passes.

    Args:
        config: Drafters with a placement of their own keep it; `placement.gpu_layers` is what is chosen.
        replaced: The set that is unloaded before this one is loaded, whose room on the GPU is free then.
        free_gpu_bytes: None reads what is free now.

    Raises:
        ModelFileError: a file cannot be used.
    """
    if not has_gpu():
        return PlacedSet(config, "")
    if free_gpu_bytes is None:
        free_gpu_bytes = _free_gpu_bytes() + (_foreseen(replaced).gpu_bytes if replaced else 0)
    whole = replace(config, placement=replace(config.placement, gpu_layers=-1))
    needs = _foreseen(whole).needs
    gpu_bytes = sum(need.gpu for need in needs)
    room_bytes = _GPU_SHARE_TO_FILL * free_gpu_bytes
    if gpu_bytes <= room_bytes:
        return PlacedSet(
            whole, f"All models run on the GPU: they need {_size(gpu_bytes)} of {_size(free_gpu_bytes)} free"
        )
    fixed = {name for name, _ in config.drafter_placements}
    drafters = dict(zip(_files(config.drafters), needs[1:], strict=True))
    room_bytes -= sum(drafters[name].gpu for name in fixed)
    movable = sorted((name for name in drafters if name not in fixed), key=lambda name: drafters[name].gpu)
    depth = max(1, read_header(config.target).layer_count)

    def layers_beside(count: int) -> int:
        """Of the target, with so many of the smallest drafters on the GPU; negative when these alone are too many."""
        left_bytes = room_bytes - sum(drafters[name].gpu for name in movable[:count])
        return min(depth, math.floor(depth * left_bytes / max(1, needs[0].gpu)))

    def read_bytes(count: int) -> float:
        """Weights read from the GPU's memory while the target runs once."""
        of_target = _weights_bytes(config.target) * layers_beside(count) / depth
        return of_target + _PASSES_BESIDE_ONE_OF_THE_TARGET * sum(
            _weights_bytes(Path(name)) for name in movable[:count]
        )

    possible = [count for count in range(len(movable) + 1) if count == 0 or layers_beside(count) >= 0]
    count = max(possible, key=lambda count: (read_bytes(count), count))
    layers = max(0, layers_beside(count))
    gpu_layers = -1 if layers == depth else layers
    placement = replace(config.placement, gpu_layers=gpu_layers)
    own = [
        (name, replace(placement, gpu_layers=-1 if name in movable[:count] else 0))
        for name in movable
        if (name in movable[:count]) != (gpu_layers == -1)
    ]
    placed = replace(config, placement=placement, drafter_placements=(*config.drafter_placements, *own))
    return PlacedSet(placed, _placement_reason(free_gpu_bytes, movable[:count], layers, depth))


def _placement_reason(free_gpu_bytes: int, first: Sequence[str], layers: int, depth: int) -> str:
    if not first and not layers:
        return f"The GPU has {_size(free_gpu_bytes)} free, too little for a layer: all runs on the CPU"
    of_target = "the whole target" if layers == depth else f"{layers} of the target's {depth} layers"
    if not first:
        return f"The GPU has {_size(free_gpu_bytes)} free: {of_target} there, the rest on the CPU"
    names = " and ".join(Path(name).stem for name in first)
    runs = "runs" if len(first) == 1 else "run"
    return f"The GPU has {_size(free_gpu_bytes)} free: {names} first, which {runs} most often, then {of_target}"


def _weights_bytes(path: Path) -> int:
    return read_header(path).size_bytes


def estimate(path: Path, context_tokens: int, is_target: bool) -> MemoryNeed:
    """The same from the header alone, in milliseconds, for choosing among many files; everything on the CPU."""
    placement = ModelPlacement(gpu_layers=0)
    if is_target:
        layout = _target_layout(SetConfig(path, (), context_tokens, placement), context_tokens)
    else:
        layout = _drafter_layout(path, placement, context_tokens)
    return _need(layout, None, is_target)


def _target_layout(config: SetConfig, context_tokens: int) -> Layout:
    return Layout(config.target, config.placement.gpu_layers, target_settings(config, context_tokens))


def _drafter_layout(path: Path, placement: ModelPlacement, context_tokens: int) -> Layout:
    return Layout(path, placement.gpu_layers, drafter_settings(placement, context_tokens))


def _files(drafters: Sequence[str]) -> list[str]:
    return [name for name in drafters if name not in FREE_DRAFTERS]


def _need(layout: Layout, finding: Finding | None, is_target: bool) -> MemoryNeed:
    facts = read_header(layout.path)
    tensors = read_tensors(layout.path)
    gpu_share = _gpu_share(layout, facts)
    weights_bytes = sum(tensor.size_bytes for tensor in tensors)
    repacked_bytes = _repacked_bytes(tensors) if finding is None or finding.repacks else 0
    cache_bytes = finding.cache_bytes if finding else _cache_bytes(facts, layout.settings)
    compute = finding.compute_bytes if finding else {"CPU": _compute_bytes(facts, layout.settings)}
    host_compute_bytes = sum(size for device, size in compute.items() if device.startswith("CPU") or "_Host" in device)
    gpu_compute_bytes = sum(compute.values()) - host_compute_bytes
    output_bytes = finding.output_bytes if finding else 4 * facts.vocabulary_size * layout.settings.max_outputs
    file_bytes = sum(part.stat().st_size for part in split_paths(layout.path))
    bookkeeping_bytes = finding.bookkeeping_bytes if finding else _BOOKKEEPING_BYTES
    compared_bytes = 4 * facts.vocabulary_size * _COMPARED_ROWS if is_target else 0
    return MemoryNeed(
        path=layout.path,
        is_target=is_target,
        mapped=round(file_bytes - gpu_share * weights_bytes),
        repacked=round(repacked_bytes * (1 - gpu_share)),
        cache=round(cache_bytes * (1 - gpu_share)),
        compute=host_compute_bytes + output_bytes,
        bookkeeping=bookkeeping_bytes + compared_bytes,
        gpu=round(gpu_share * (weights_bytes + cache_bytes)) + gpu_compute_bytes,
        is_estimate=finding is None,
    )


def _gpu_share(layout: Layout, facts: GgufFacts) -> float:
    """The share of the layers, and with them of weights and cache, that lies on a GPU."""
    if not has_gpu() or not facts.layer_count:
        return 0.0
    layers = facts.layer_count if layout.gpu_layers < 0 else layout.gpu_layers
    return min(1.0, layers / facts.layer_count)


def _repacked_bytes(tensors: Sequence[TensorFacts]) -> int:
    """Weights that llama.cpp copies into another order on this CPU.

    Those of the layers and the head; the embeddings only where they serve as head too.
    """
    info = native().system_info
    multiples = dict(_ARM_REPACKED if "NEON = 1" in info else _X86_REPACKED if "AVX2 = 1" in info else {})
    if "AVX512 = 1" in info:
        multiples["Q2_K"] = 8
    is_tied = all(tensor.name != "output.weight" for tensor in tensors)
    return sum(
        tensor.size_bytes
        for tensor in tensors
        if len(tensor.shape) > 1
        and tensor.type in multiples
        and tensor.shape[1] % multiples[tensor.type] == 0
        and (is_tied or not tensor.name.startswith("token_embd"))
    )


def _cache_bytes(facts: GgufFacts, settings: ContextSettings) -> int:
    numbers = facts.layer_count * facts.kv_width * _cells(settings.context_tokens)
    kv_type = settings.kv_type
    return round(numbers * (_BYTES_PER_NUMBER[kv_type.keys] + _BYTES_PER_NUMBER[kv_type.values]) / 2)


def _cells(context_tokens: int) -> int:
    """llama.cpp rounds a cache up to whole steps of cells."""
    return -(-context_tokens // _CELL_STEP) * _CELL_STEP


def _compute_bytes(facts: GgufFacts, settings: ContextSettings) -> int:
    """Activations of the widest moment of a pass, and its attention mask."""
    widest = max(2 * facts.feed_forward_width + facts.embedding_width, 3 * facts.embedding_width)
    rows_bytes = 4 * settings.batch_tokens * (widest + facts.embedding_width)
    outputs_bytes = 4 * settings.max_outputs * facts.vocabulary_size
    return max(rows_bytes, outputs_bytes) + 2 * settings.batch_tokens * settings.context_tokens


def _free_gpu_bytes() -> int:
    if not has_gpu():
        return 0
    return sum(device.free_bytes for device in list_devices() if not device.name.startswith("CPU"))


def _with_advice(result: Forecast, config: SetConfig) -> Forecast:
    advice = (
        *_smaller_cache(result, config),
        *_less_context(result),
        *_fewer_drafters(result),
        *_other_placement(result),
    )
    if not advice:
        advice = _target_alone(result)
    if not advice:
        target = next(need for need in result.needs if need.is_target)
        made_for = read_header(config.target).context_tokens
        if 0 < made_for < result.context_tokens:
            advice = (f"{target.path.name} was made for a context of {made_for} tokens (--ctx)",)
        else:
            advice = (f"choose a smaller model, or fewer bits, than {target.path.name}; or close other programs",)
    return replace(result, advice=advice)


def _smaller_cache(result: Forecast, config: SetConfig) -> tuple[str, ...]:
    """Eight bits for the target's cache, where it has more and its heads can be stored so."""
    if config.kv_type is KvType.Q8_0 or result.lasting_bytes + RESERVE_BYTES <= result.free_bytes:
        return ()
    (finding,) = dry_run(_layouts(replace(config, kv_type=KvType.Q8_0, drafters=(), drafter_placements=())))
    target = next(need for need in result.needs if need.is_target)
    freed_bytes = target.cache - finding.cache_bytes if finding and not target.gpu else 0
    if freed_bytes <= 0 or result.lasting_bytes + RESERVE_BYTES - freed_bytes > result.free_bytes:
        return ()
    return (f"a cache of 8 bits (--kv-type q8_0) would free {_size(freed_bytes)} and make it fit",)


def _less_context(result: Forecast) -> tuple[str, ...]:
    missing_bytes = result.lasting_bytes + RESERVE_BYTES - result.free_bytes
    bytes_per_token = sum(
        need.cache / _cells(result.context_tokens + (0 if need.is_target else SPARE_CELLS)) for need in result.needs
    )
    tokens = result.context_tokens
    while tokens >= 2 * _FEW_CONTEXT_TOKENS:
        tokens //= 2
        freed_bytes = bytes_per_token * (result.context_tokens - tokens)
        if 0 < missing_bytes <= freed_bytes:
            return (f"a context of {tokens} tokens (--ctx) would free {_size(freed_bytes)} and make it fit",)
    return ()


def _fewer_drafters(result: Forecast) -> tuple[str, ...]:
    """Leave out the largest drafters until the rest fits."""
    drafters = sorted((need for need in result.needs if not need.is_target), key=lambda need: -need.lasting)
    missing_bytes = result.lasting_bytes + RESERVE_BYTES - result.free_bytes
    missing_gpu_bytes = result.gpu_bytes - result.free_gpu_bytes
    dropped: list[str] = []
    for need in drafters:
        dropped.append(need.path.stem)
        missing_bytes -= need.lasting
        missing_gpu_bytes -= need.gpu
        if missing_bytes <= 0 and missing_gpu_bytes <= 0:
            return (f"leaving out {' and '.join(dropped)} would make it fit",)
    return ()


def _target_alone(result: Forecast) -> tuple[str, ...]:
    """No drafter and less context together, where neither is enough."""
    target = next(need for need in result.needs if need.is_target)
    alone = replace(result, needs=(target,))
    if len(result.needs) == 1 or alone.gpu_bytes > alone.free_gpu_bytes:
        return ()
    return tuple(f"leaving out all drafters that are files, and {advice}" for advice in _less_context(alone))


def _other_placement(result: Forecast) -> tuple[str, ...]:
    """Move layers between GPU and memory, where one has too little and the other enough."""
    target = next(need for need in result.needs if need.is_target)
    layer_count = read_header(target.path).layer_count
    missing_gpu_bytes = result.gpu_bytes - result.free_gpu_bytes
    if missing_gpu_bytes > 0 and target.gpu and layer_count:
        layers = int(layer_count * max(0.0, 1 - missing_gpu_bytes / target.gpu))
        return (f"{layers} layers on the GPU (--gpu-layers) would put the rest of the target in main memory",)
    missing_bytes = result.lasting_bytes + RESERVE_BYTES - result.free_bytes
    if missing_bytes > 0 and result.free_gpu_bytes - result.gpu_bytes >= missing_bytes:
        return ("more layers on the GPU (--gpu-layers) would free main memory",)
    return ()


def _size(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.1f} GB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.0f} MB"
