"""Models that cost more than the starter and say the same, and drafters that are worse than it in known ways.

They exist so that anyone can measure speed without a large download. A *function-preserving expansion* has extra
feed-forward neurons whose output weights are zero and extra layers that add zero: every pass costs what a larger
model's would, and its answers are the starter's. A report that uses one says so, which it can tell by the header
(`quorum.expansion`). A drafter derived from an expansion by leaving layers out is perfect by construction and means
nothing; the drafters here are all derived from the starter.

The same versions of numpy and llama.cpp build the same files, byte for byte.
"""

from __future__ import annotations

import math
import re
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from gguf.constants import GGMLQuantizationType, LlamaFileType

from engine.errors import ModelFileError
from models.atomic import clear_leftovers, require_free_bytes, scratch_beside
from models.derive import write_copy
from models.gguf_file import read_header
from models.progress import Progress, Report, no_report, stop_if_asked
from models.quantising import quantized_copy
from models.rewrite import Array, Change, PlannedTensor, Source, SourceTensor, write_model

SEED = 576
_RECIPE_VERSION = 1
_BLOCK = re.compile(r"^blk\.(\d+)\.(.+)$")
_LAYER_TENSORS = {
    *("attn_norm.weight", "attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight"),
    *("ffn_norm.weight", "ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"),
}


@dataclass(frozen=True, slots=True)
class Expansion:
    """How much larger the expansion is than the model it is made from."""

    file_name: str
    label: str
    """What it costs, for its name: `1 B cost`."""
    extra_layers: int
    feed_forward: int
    """Neurons in every layer, new ones included."""
    file_type: LlamaFileType = LlamaFileType.MOSTLY_Q4_0
    width: int = 0
    """Of the embedding, with new attention heads of the old size that say nothing; 0 leaves it."""

    @property
    def recipe(self) -> str:
        """What the header says, by which an existing file is recognised."""
        width = f"width {self.width}, " if self.width else ""
        return (
            f"{self.label}: {self.extra_layers} extra layers, {width}feed-forward {self.feed_forward}, "
            f"{self.file_type.name.removeprefix('MOSTLY_')}, seed {SEED}, recipe {_RECIPE_VERSION}"
        )


ONE_BILLION = Expansion("target-1b.gguf", "1 B cost", extra_layers=10, feed_forward=15360)
THREE_BILLION = Expansion("target-3b.gguf", "3 B cost", extra_layers=24, feed_forward=24576)
K_QUANTS = Expansion("target-kquants.gguf", "K-quants", 0, 1536, LlamaFileType.MOSTLY_Q4_K_M, width=768)
"""K-quants store 256 weights together, which divide no row of the starter."""

DRAFTERS = {
    "drafter-q2k.gguf": ((), LlamaFileType.MOSTLY_Q2_K),
    "drafter-q8.gguf": ((), LlamaFileType.MOSTLY_Q8_0),
    "drafter-drop10.gguf": ((10,), LlamaFileType.MOSTLY_Q4_0),
    "drafter-drop14.gguf": ((14,), LlamaFileType.MOSTLY_Q4_0),
    "drafter-drop20.gguf": ((20,), LlamaFileType.MOSTLY_Q4_0),
    "drafter-drop24.gguf": ((24,), LlamaFileType.MOSTLY_Q4_0),
    "drafter-drop4.gguf": ((6, 12, 18, 24), LlamaFileType.MOSTLY_Q4_0),
    "drafter-drop8.gguf": ((4, 7, 10, 13, 16, 19, 22, 25), LlamaFileType.MOSTLY_Q4_0),
    "drafter-tq2.gguf": ((), LlamaFileType.MOSTLY_TQ2_0),
}
"""The layers each degraded copy of the starter lacks, and its format. The last three are hostile on purpose."""


@dataclass(frozen=True, slots=True)
class Fixtures:
    """Where the built files are, by the stem of their names: `target-3b`, `drafter-drop14`, ..."""

    targets: Mapping[str, Path]
    drafters: Mapping[str, Path]


def build_fixtures(
    directory: Path,
    starter: Path,
    report: Report = no_report,
    expansions: Sequence[Expansion] = (ONE_BILLION, THREE_BILLION, K_QUANTS),
    cancel: threading.Event | None = None,
) -> Fixtures:
    """Build what is missing of the expansions and degraded drafters in `directory`; what is there and fits stays.

    Raises:
        Cancelled: `cancel` was set; files that were finished stay.
    """
    targets: dict[str, Path] = {}
    drafters: dict[str, Path] = {}
    for file_name, (layers, file_type) in DRAFTERS.items():
        path = drafters[Path(file_name).stem] = directory / file_name
        if not _is_usable(path, recipe=""):
            write_copy(starter, path, layers, file_type, _under(file_name, report), cancel)
    for expansion in expansions:
        path = targets[Path(expansion.file_name).stem] = directory / expansion.file_name
        if not _is_usable(path, expansion.recipe):
            expand(starter, path, expansion, _under(expansion.file_name, report), cancel)
    return Fixtures(targets, drafters)


def expand(
    source: Path,
    destination: Path,
    expansion: Expansion,
    report: Report = no_report,
    cancel: threading.Event | None = None,
) -> None:
    """Write the expansion of `source` to `destination`, by way of a half-precision file beside it.

    Raises:
        ModelFileError: the source is no plain llama model.
        Cancelled: `cancel` was set; nothing is left behind.
    """
    model = Source(source)
    facts = model.facts
    layer_names = {match[2] for tensor in model.tensors if (match := _BLOCK.match(tensor.name))}
    if facts.architecture != "llama" or layer_names != _LAYER_TENSORS:
        raise ModelFileError(f"{source} cannot be expanded: this works for plain llama models such as the starter")
    old_feed_forward = model.number("llama.feed_forward_length")
    if expansion.extra_layers < 0 or expansion.feed_forward < old_feed_forward:
        raise ValueError(f"an expansion of {old_feed_forward} neurons cannot have {expansion.feed_forward}")
    wider = _Wider(model, expansion)
    planned = _plan(model, expansion, wider)
    total_bytes = sum(tensor.size_bytes for tensor in planned)
    done_bytes = 0

    def wrote(size_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += size_bytes
        stop_if_asked(cancel, f"building {destination.name}")
        report(Progress("writing half precision", done_bytes, total_bytes))

    changes: dict[str, Change] = {
        "general.name": f"{facts.stem} expansion ({expansion.label})",
        "general.file_type": int(LlamaFileType.MOSTLY_F16),
        "llama.block_count": facts.layer_count + expansion.extra_layers,
        "llama.feed_forward_length": expansion.feed_forward,
        "quorum.expansion": expansion.recipe,
        **wider.changes,
    }
    destination.parent.mkdir(parents=True, exist_ok=True)
    clear_leftovers(destination)
    require_free_bytes(destination.parent, total_bytes * 3 // 2, f"building {destination.name}")
    with scratch_beside(destination) as half_precision:
        write_model(model, half_precision, planned, changes, wrote)
        quantized_copy(half_precision, destination, expansion.file_type, report, cancel)


class _Wider:
    """Shapes and numbers of the larger model. What it has more in width is zero, so that all sums stay."""

    def __init__(self, model: Source, expansion: Expansion) -> None:
        """Raises:
        ValueError: the width is less than the old one, or does not hold whole groups of heads.
        """
        self.old_width = model.number("llama.embedding_length")
        self.width = expansion.width or self.old_width
        heads = model.number("llama.attention.head_count")
        kv_key = "llama.attention.head_count_kv"
        kv_heads = model.number(kv_key) if kv_key in model.keys else heads
        head_width = self.old_width // heads
        new_heads = self.width // head_width
        new_kv_heads = new_heads * kv_heads // heads
        if self.width < self.old_width or new_heads * head_width != self.width or new_heads * kv_heads % heads:
            raise ValueError(f"an expansion of width {self.old_width} cannot have {expansion.width}")
        self._kv_width = new_kv_heads * head_width
        self._feed_forward = expansion.feed_forward
        self.changes: dict[str, Change] = {}
        if self.width > self.old_width:
            share = self.old_width / self.width
            epsilon = "llama.attention.layer_norm_rms_epsilon"
            self.changes = {
                "llama.embedding_length": self.width,
                "llama.attention.head_count": new_heads,
                kv_key: new_kv_heads,
                # The mean square is taken over more numbers, of which the new ones are zero.
                epsilon: share * model.real(epsilon),
            }
        self._norm_scale = np.float32(math.sqrt(self.old_width / self.width))

    def shape(self, suffix: str, old: tuple[int, ...]) -> tuple[int, ...]:
        """Args:
        suffix: A tensor's name, without that of its layer.
        old: Its shape.
        """
        if len(old) == 1:
            return (self.width,)
        if suffix in ("ffn_gate.weight", "ffn_up.weight"):
            return self._feed_forward, self.width
        if suffix == "ffn_down.weight":
            return self.width, self._feed_forward
        if suffix in ("attn_k.weight", "attn_v.weight"):
            return self._kv_width, self.width
        if suffix in ("attn_q.weight", "attn_output.weight"):
            return self.width, self.width
        return old[0], self.width

    def padded(self, suffix: str, values: Array, shape: tuple[int, ...]) -> Array:
        """Old values with zeros in width."""
        if values.ndim == 1:
            scaled: Array = np.pad(values * self._norm_scale, (0, shape[0] - len(values)))
            return scaled
        rows = values.shape[0] if suffix in ("ffn_gate.weight", "ffn_up.weight") else shape[0]
        columns = values.shape[1] if suffix == "ffn_down.weight" else shape[1]
        if (rows, columns) == values.shape:
            return values
        return np.pad(values, ((0, rows - values.shape[0]), (0, columns - values.shape[1])))


def _plan(model: Source, expansion: Expansion, wider: _Wider) -> list[PlannedTensor]:
    scale = 0.5 / math.sqrt(wider.old_width)
    by_layer: dict[int, dict[str, SourceTensor]] = {}
    planned = []
    for tensor in model.tensors:
        match = _BLOCK.match(tensor.name)
        if match is None:
            shape = wider.shape(tensor.name, tensor.values_shape)
            planned.append(_half(tensor.name, shape, partial(_wider_values, wider, tensor, tensor.name, shape, scale)))
        else:
            by_layer.setdefault(int(match[1]), {})[match[2]] = tensor
    for number, origin in enumerate(_layer_origins(model.facts.layer_count, expansion.extra_layers)):
        for suffix, tensor in by_layer[origin or 0].items():
            name = f"blk.{number}.{suffix}"
            shape = wider.shape(suffix, tensor.values_shape)
            make = (
                partial(_new_values, name, suffix, shape, scale)
                if origin is None
                else partial(_wider_values, wider, tensor, name, shape, scale)
            )
            planned.append(_half(name, shape, make))
    return planned


def _layer_origins(count: int, extra: int) -> list[int | None]:
    """The source's layers in order, and None for each new one; the new ones are spread evenly among them."""
    followers = Counter((2 * number + 1) * count // (2 * extra) for number in range(extra))
    origins: list[int | None] = []
    for layer in range(count):
        origins += [layer, *[None] * followers[layer]]
    return origins


def _wider_values(wider: _Wider, tensor: SourceTensor, name: str, shape: tuple[int, ...], scale: float) -> Array:
    """The old neurons' weights, then random ones in and zero ones out: what the new neurons say is not heard."""
    match = _BLOCK.match(name)
    old = wider.padded(match[2] if match else name, tensor.values(), shape)
    if old.shape == shape:
        return old
    if old.shape[0] < shape[0]:
        return np.concatenate([old, _random(name, (shape[0] - old.shape[0], shape[1]), scale)])
    return np.pad(old, ((0, 0), (0, shape[1] - old.shape[1])))


def _new_values(name: str, suffix: str, shape: tuple[int, ...], scale: float) -> Array:
    """A layer that computes as much as any other and adds nothing."""
    if suffix.endswith("norm.weight"):
        return np.ones(shape, np.float32)
    if suffix in ("attn_output.weight", "ffn_down.weight"):
        return np.zeros(shape, np.float32)
    return _random(name, shape, scale)


def _random(name: str, shape: tuple[int, ...], scale: float) -> Array:
    """The same numbers for the same tensor in every build."""
    generator = np.random.default_rng([SEED, zlib.crc32(name.encode())])
    values: Array = generator.standard_normal(shape, np.float32)
    values *= np.float32(scale)
    return values


def _half(name: str, shape: tuple[int, ...], make: Callable[[], Array]) -> PlannedTensor:
    """Matrices in half precision; vectors (norms) in single, as llama.cpp wants them."""
    if len(shape) == 1:
        return PlannedTensor(name, shape, np.dtype(np.float32), GGMLQuantizationType.F32, make)
    return PlannedTensor(name, shape, np.dtype(np.float16), GGMLQuantizationType.F16, lambda: make().astype(np.float16))


def _under(file_name: str, report: Report) -> Report:
    return lambda progress: report(replace(progress, phase=f"{file_name}: {progress.phase}"))


def _is_usable(path: Path, recipe: str) -> bool:
    try:
        return read_header(path).expansion == recipe
    except ModelFileError:
        return False
