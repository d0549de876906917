"""Writing a changed copy of a GGUF model, one tensor at a time.

Metadata is carried over as it stands except for the keys that the caller changes. Tensors are produced when they are
written, so that memory holds one of them, however large the model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, GGUFWriter
from gguf.constants import GGMLQuantizationType, GGUFValueType

from engine.errors import ModelFileError
from models.gguf_file import GgufFacts, read_header

Array = npt.NDArray[Any]
Change = int | str | list[Any]
"""A changed value; it keeps the type that its key has in the source, and a new key takes a text."""


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor of the copy: what it will look like, and how its data is had when its turn comes."""

    name: str
    shape: tuple[int, ...]
    """As numpy sees the stored data: rows first, and bytes in a row for quantised types."""
    dtype: np.dtype[Any]
    type: GGMLQuantizationType
    data: Callable[[], Array]

    @property
    def size_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def carried_over(tensor: Any, name: str) -> PlannedTensor:
    """A tensor of the source under another name, its bytes as they are."""
    return PlannedTensor(name, tensor.data.shape, tensor.data.dtype, tensor.tensor_type, lambda: tensor.data)


def open_model(path: Path) -> tuple[GgufFacts, Any]:
    """The facts of a model and a `gguf.GGUFReader` over it; a model that cannot be rewritten is refused."""
    facts = read_header(path)
    if facts.split_count > 1:
        raise ModelFileError(
            f"{path} is one of {facts.split_count} parts; join them first with `llama-gguf-split --merge`"
        )
    if facts.kind != "model" or facts.layer_count == 0:
        raise ModelFileError(f"{path} is no language model with layers: it holds {facts.kind!r}")
    try:
        return facts, GGUFReader(path)
    except (ValueError, KeyError, IndexError) as error:
        raise ModelFileError(f"{path} cannot be read as a GGUF model: {error}") from error


def value_of(field: Any) -> Any:
    """A metadata value of the reader; texts stay bytes, because vocabularies hold some that are not UTF-8."""
    is_text = field.types[-1] is GGUFValueType.STRING
    values = [field.parts[index].tobytes() if is_text else field.parts[index].tolist()[0] for index in field.data]
    return values if field.types[0] is GGUFValueType.ARRAY else values[0]


def write_model(
    source: Any,
    destination: Path,
    tensors: Sequence[PlannedTensor],
    changes: Mapping[str, Change],
    wrote: Callable[[int], None],
) -> None:
    """Write `tensors` under the metadata of `source` with `changes`; `wrote` hears the size of each tensor."""
    assert sys.byteorder == "little", "big-endian files are refused when they are opened"
    architecture = value_of(source.fields["general.architecture"]).decode()
    writer = GGUFWriter(destination, architecture)
    try:
        _add_metadata(writer, source, changes)
        for tensor in tensors:
            writer.add_tensor_info(tensor.name, tensor.shape, tensor.dtype, tensor.size_bytes, tensor.type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            writer.write_tensor_data(np.ascontiguousarray(tensor.data()))
            wrote(tensor.size_bytes)
    finally:
        writer.close()


def _add_metadata(writer: Any, source: Any, changes: Mapping[str, Change]) -> None:
    for key, field in source.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = changes.get(key, value_of(field))
        if field.types[0] is not GGUFValueType.ARRAY:
            writer.add_key_value(key, value, field.types[0])
        elif value:  # an empty array has no item type in the reader, and says nothing
            writer.add_key_value(key, value, GGUFValueType.ARRAY, sub_type=field.types[-1])
    if "general.alignment" in source.fields:
        writer.data_alignment = value_of(source.fields["general.alignment"])
    for key, change in changes.items():
        if key not in source.fields:
            writer.add_string(key, change)
