"""Drafters made from the target itself: a copy with fewer layers, fewer bits, or both.

They need no download and fit by construction: vocabulary, template and special tokens are the target's. A copy lies in
the cache folder under `derived/<target's hash>/`, with a JSON file beside it that says what it was made from and how.
A copy is listed for a target as long as the target's bytes are the ones it was made from, wherever that file lies.
"""

from __future__ import annotations

import json
import re
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from gguf.constants import LlamaFileType

from engine.errors import ModelFileError, SettingError
from models.atomic import clear_leftovers, remove, replacing, require_free_bytes, scratch_beside, write_json
from models.folders import derived_folder
from models.gguf_file import GgufFacts, read_header
from models.identity import sha256_of
from models.progress import Progress, Report, no_report, stop_if_asked
from models.quantising import quantized_copy
from models.rewrite import Change, PlannedTensor, Source, SourceTensor, write_model

LAYERED_ARCHITECTURES = ("llama", "qwen2", "qwen3", "granite", "mistral3")
"""Llama's family: every layer does the same whatever its number, so that any of them can be left out."""

_BLOCK = re.compile(r"^blk\.(\d+)\.(.+)$")
_MIDDLE_LAYERS = (14 / 30, 22 / 30)
"""Where a layer is missed least, as a share of the depth."""
_ONE_LAYER_UP_TO = 32
"""Deeper targets can spare two layers."""
_MAX_NAMED_LAYERS = 8


@dataclass(frozen=True, slots=True)
class DerivedModel:
    """A derived copy and its origin, as the JSON file beside it holds them."""

    name: str
    file_name: str
    size_bytes: int
    sha256: str
    target_name: str
    target_sha256: str
    target_size_bytes: int
    dropped_layers: tuple[int, ...]
    quantisation: str
    agreement: float | None = None
    """Share of the target's choices that the copy foresees, where that was measured."""
    cost_ratio: float | None = None
    """Time of one pass of the copy, as a share of one of the target's, where that was measured."""

    @property
    def measured(self) -> str:
        """How it did, in a few words; empty where it was not measured."""
        if self.agreement is None or self.cost_ratio is None:
            return ""
        return f"foresees {self.agreement:.0%} of the target's choices, a pass costs {self.cost_ratio:.0%} of its"

    @property
    def path(self) -> Path:
        return derived_folder() / self.target_sha256 / self.file_name


def derive(
    target: Path,
    dropped_layers: Sequence[int] = (),
    file_type: LlamaFileType | None = None,
    report: Report = no_report,
    cancel: threading.Event | None = None,
) -> DerivedModel:
    """A copy of `target` without `dropped_layers`, in format `file_type` (None keeps the weights as they are).

    The copy is made unless it is there already. Stopping takes effect within a moment.
    """
    layers = tuple(sorted(set(dropped_layers)))
    if not layers and file_type is None:
        raise SettingError("a derived drafter needs layers to leave out, or a smaller format; neither was given")
    facts = read_header(target)
    target_sha256 = sha256_of(target, report, cancel)
    quantisation = facts.quantisation if file_type is None else file_type.name.removeprefix("MOSTLY_")
    for known in all_derived():
        if (known.target_sha256, known.dropped_layers, known.quantisation) == (target_sha256, layers, quantisation):
            return known
    name = "-".join([facts.stem, *_without(layers), quantisation])
    path = derived_folder() / target_sha256 / f"{name}.gguf"
    write_copy(target, path, layers, file_type, report, cancel)
    made = DerivedModel(
        name=name,
        file_name=path.name,
        size_bytes=path.stat().st_size,
        sha256=sha256_of(path, report),
        target_name=target.stem,
        target_sha256=target_sha256,
        target_size_bytes=facts.size_bytes,
        dropped_layers=layers,
        quantisation=quantisation,
    )
    write_json(_sidecar(path), asdict(made))
    return made


def derive_default(target: Path, report: Report = no_report, cancel: threading.Event | None = None) -> DerivedModel:
    """A drafter that suits most targets: a middle layer or two left out, and four bits where the target has more."""
    facts = read_header(target)
    return derive(target, default_layers(facts.layer_count), default_format(facts), report, cancel)


def note_measurement(model: DerivedModel, agreement: float, cost_ratio: float) -> DerivedModel:
    """Keep what was measured about a copy beside it."""
    noted = replace(model, agreement=agreement, cost_ratio=cost_ratio)
    write_json(_sidecar(model.path), asdict(noted))
    return noted


def default_layers(layer_count: int) -> tuple[int, ...]:
    """The layers that are missed least in most models: one in the middle, or two of a deep one."""
    shares = _MIDDLE_LAYERS[:1] if layer_count <= _ONE_LAYER_UP_TO else _MIDDLE_LAYERS
    return tuple(round(share * layer_count) for share in shares)


def default_format(facts: GgufFacts) -> LlamaFileType | None:
    """Four bits where the target has more; None to keep its weights."""
    bits_per_weight = 8 * facts.size_bytes / max(1, facts.parameter_count)
    return LlamaFileType.MOSTLY_Q4_0 if bits_per_weight > 5 else None


def list_derived(target: Path) -> tuple[DerivedModel, ...]:
    """The copies made from these very bytes. The target is hashed only when a copy of a target of its size exists."""
    size_bytes = read_header(target).size_bytes
    candidates = [model for model in all_derived() if model.target_size_bytes == size_bytes]
    if not candidates:
        return ()
    target_sha256 = sha256_of(target)
    return tuple(model for model in candidates if model.target_sha256 == target_sha256)


def all_derived() -> tuple[DerivedModel, ...]:
    """Every derived copy in the cache folder, whatever became of its target."""
    found = (_read_sidecar(path) for path in sorted(derived_folder().glob("*/*.gguf.json")))
    return tuple(model for model in found if model is not None)


def remove_derived(model: DerivedModel) -> None:
    """Delete a copy, what is beside it, and its folder when nothing else is in it."""
    remove(_sidecar(model.path))
    remove(model.path)
    if model.path.parent.is_dir() and not any(model.path.parent.iterdir()):
        model.path.parent.rmdir()


def write_copy(
    source: Path,
    destination: Path,
    dropped_layers: tuple[int, ...],
    file_type: LlamaFileType | None,
    report: Report = no_report,
    cancel: threading.Event | None = None,
) -> None:
    """Write a copy of any model file under any name, whole or not at all; layers first, then bits."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    clear_leftovers(destination)
    require_free_bytes(destination.parent, 2 * source.stat().st_size, f"a copy of {source.name}")
    if file_type is None:
        with replacing(destination) as temporary:
            _write_shortened(source, temporary, dropped_layers, report, cancel)
        return
    with scratch_beside(destination) as shortened:
        if dropped_layers:
            _write_shortened(source, shortened, dropped_layers, report, cancel)
        stop_if_asked(cancel, f"deriving from {source.name}")
        quantized_copy(shortened if dropped_layers else source, destination, file_type, report, cancel)


def _write_shortened(
    source: Path, destination: Path, dropped_layers: tuple[int, ...], report: Report, cancel: threading.Event | None
) -> None:
    model = Source(source)
    facts = model.facts
    if facts.architecture not in LAYERED_ARCHITECTURES:
        raise ModelFileError(
            f"{source} has the architecture {facts.architecture!r}, whose layers cannot be left out one by one; "
            f"this works for {', '.join(LAYERED_ARCHITECTURES)}. Fewer bits work for any model"
        )
    kept = [layer for layer in range(facts.layer_count) if layer not in dropped_layers]
    if not kept or not set(dropped_layers) <= set(range(facts.layer_count)):
        raise SettingError(
            f"{source.name} has layers 0 to {facts.layer_count - 1}, of which one must stay; "
            f"asked to leave out {', '.join(map(str, dropped_layers))}"
        )
    planned = list(_renamed(model.tensors, kept))
    changes = _cut_metadata(model, f"{facts.architecture}.", facts.layer_count, kept)
    changes["general.name"] = f"{facts.name} without layer {', '.join(map(str, dropped_layers))}"
    total_bytes = sum(tensor.size_bytes for tensor in planned)
    done_bytes = 0

    def wrote(size_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += size_bytes
        stop_if_asked(cancel, f"deriving from {source.name}")
        report(Progress(f"copying {source.name}", done_bytes, total_bytes))

    write_model(model, destination, planned, changes, wrote)


def _renamed(tensors: Sequence[SourceTensor], kept: list[int]) -> Iterator[PlannedTensor]:
    """Kept layers close ranks; tensors outside the layers (embeddings, head if untied, norm) stay as they are."""
    new_number = {old: new for new, old in enumerate(kept)}
    for tensor in tensors:
        match = _BLOCK.match(tensor.name)
        if match is None:
            yield tensor.carried_over(tensor.name)
        elif int(match[1]) in new_number:
            yield tensor.carried_over(f"blk.{new_number[int(match[1])]}.{match[2]}")


def _cut_metadata(model: Source, prefix: str, layer_count: int, kept: list[int]) -> dict[str, Change]:
    """The layer count, and every list of the architecture that has one value for each layer."""
    changes: dict[str, Change] = {f"{prefix}block_count": len(kept)}
    for key in model.keys:
        values = model.numbers(key) if key.startswith(prefix) else None
        if values is not None and len(values) == layer_count:
            changes[key] = [values[layer] for layer in kept]
    return changes


def _without(layers: tuple[int, ...]) -> list[str]:
    """What a name says about left-out layers; a long list is told by its length and a checksum."""
    if not layers:
        return []
    numbers = "-".join(map(str, layers))
    if len(layers) > _MAX_NAMED_LAYERS:
        return [f"without-{len(layers)}-layers-{zlib.crc32(numbers.encode()):08x}"]
    return [f"without-{numbers}"]


def _sidecar(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _read_sidecar(path: Path) -> DerivedModel | None:
    """None where the copy or its description is missing or cannot be read: then it is made again."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        model = DerivedModel(**values | {"dropped_layers": tuple(values["dropped_layers"])})
        return model if model.path.stat().st_size == model.size_bytes else None
    except (OSError, ValueError, TypeError, KeyError):
        return None
