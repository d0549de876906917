"""Writing a changed copy of a GGUF model, one tensor at a time.

Metadata is carried over byte for byte except for the keys that the caller changes: a vocabulary of some hundred
thousand texts is never taken apart. Tensors are produced when they are written, so that memory holds one of them,
however large the model.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType, GGUFValueType
from gguf.quants import quant_shape_from_byte_shape, quant_shape_to_byte_shape

from engine.errors import ModelFileError
from models.gguf_file import Layout, TensorFacts, read_layout

Array = npt.NDArray[Any]
Change = int | float | str | list[Any]
"""A changed value; it keeps the type that its key has in the source, and a new key takes a text."""

_VERSION = 3
_MOST_COPIED_BYTES = 1 << 26
_PLAIN_TYPES: dict[GGMLQuantizationType, np.dtype[Any]] = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.F64: np.dtype(np.float64),
    GGMLQuantizationType.I8: np.dtype(np.int8),
    GGMLQuantizationType.I16: np.dtype(np.int16),
    GGMLQuantizationType.I32: np.dtype(np.int32),
    GGMLQuantizationType.I64: np.dtype(np.int64),
}
_NUMBERS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


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

    @property
    def dimensions(self) -> tuple[int, ...]:
        """As the file states them: values in a row first."""
        shape = self.shape
        if self.dtype == np.uint8 and self.type not in _PLAIN_TYPES:
            shape = quant_shape_from_byte_shape(shape, self.type)
        return tuple(reversed(shape))


class SourceTensor:
    """A tensor of the model that is copied; its data is read from the file when it is used."""

    def __init__(self, file: Array, data_start: int, facts: TensorFacts) -> None:
        self.name = facts.name
        self.type = GGMLQuantizationType[facts.type]
        self.values_shape = tuple(reversed(facts.shape))
        """Rows first, and values in a row."""
        self.dtype: np.dtype[Any] = _PLAIN_TYPES.get(self.type, np.dtype(np.uint8))
        is_plain = self.type in _PLAIN_TYPES
        self.shape = self.values_shape if is_plain else quant_shape_to_byte_shape(self.values_shape, self.type)
        self._file = file
        self._start = data_start + facts.offset
        self._size_bytes = facts.size_bytes

    def data(self) -> Array:
        stored = self._file[self._start : self._start + self._size_bytes]
        values: Array = stored.view(self.dtype).reshape(self.shape)
        return values

    def values(self) -> Array:
        """As single-precision numbers."""
        return np.asarray(gguf.dequantize(self.data(), self.type), np.float32)

    def carried_over(self, name: str) -> PlannedTensor:
        """This tensor under another name, its bytes as they are."""
        return PlannedTensor(name, self.shape, self.dtype, self.type, self.data)


class Source:
    """A model that is copied with changes."""

    def __init__(self, path: Path) -> None:
        """Open it.

        Raises:
            ModelFileError: it is no whole model with layers in one file, or has a tensor of an unknown type.
        """
        self._layout: Layout = read_layout(path)
        facts = self.facts = self._layout.facts
        if facts.split_count > 1:
            raise ModelFileError(
                f"{path} is one of {facts.split_count} parts; join them first with `llama-gguf-split --merge`"
            )
        if facts.kind != "model" or facts.layer_count == 0:
            raise ModelFileError(f"{path} is no language model with layers: it holds {facts.kind!r}")
        unknown = [tensor.name for tensor in self._layout.tensors if not tensor.type]
        if unknown:
            raise ModelFileError(f"{path} stores {unknown[0]!r} in a format that this version cannot copy")
        self._file: Array = np.memmap(path, mode="r")
        try:
            self.tensors = [
                SourceTensor(self._file, self._layout.data_start, tensor) for tensor in self._layout.tensors
            ]
        except ValueError as error:
            raise ModelFileError(f"{path} is damaged: {error}") from error

    @property
    def alignment(self) -> int:
        return self._layout.alignment

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self._layout.pairs)

    def pair(self, key: str) -> bytes:
        """A metadata pair as it stands in the file."""
        start, _, end = self._layout.pairs[key]
        return bytes(self._file[start:end])

    def number(self, key: str) -> int:
        """A metadata value that is a number."""
        kind, value = self._value(key)
        return int(struct.unpack(f"<{_NUMBERS[kind]}", value)[0])

    def real(self, key: str) -> float:
        """A metadata value that is a real number."""
        kind, value = self._value(key)
        return float(struct.unpack(f"<{_NUMBERS[kind]}", value)[0])

    def numbers(self, key: str) -> list[int | float | bool] | None:
        """A metadata value that is a list of numbers; None when it is anything else."""
        kind, value = self._value(key)
        if kind is not GGUFValueType.ARRAY:
            return None
        item_kind, count = struct.unpack_from("<IQ", value)
        letter = _NUMBERS.get(GGUFValueType(item_kind))
        return list(struct.unpack_from(f"<{count}{letter}", value, 12)) if letter else None

    def changed(self, key: str, change: Change) -> bytes:
        """The pair with another value of the same type."""
        kind, value = self._value(key)
        head = _text(key) + struct.pack("<I", kind)
        if kind is GGUFValueType.STRING:
            return head + _text(str(change))
        if kind is GGUFValueType.ARRAY:
            assert isinstance(change, list), "a list stays a list"
            item_kind = GGUFValueType(struct.unpack_from("<I", value)[0])
            values = struct.pack(f"<{len(change)}{_NUMBERS[item_kind]}", *change)
            return head + struct.pack("<IQ", item_kind, len(change)) + values
        return head + struct.pack(f"<{_NUMBERS[kind]}", change)

    def _value(self, key: str) -> tuple[GGUFValueType, bytes]:
        _, start, end = self._layout.pairs[key]
        content = bytes(self._file[start:end])
        return GGUFValueType(struct.unpack_from("<I", content)[0]), content[4:]


def write_model(
    source: Source,
    destination: Path,
    tensors: Sequence[PlannedTensor],
    changes: Mapping[str, Change],
    wrote: Callable[[int], None],
) -> None:
    """Write `tensors` under the metadata of `source` with `changes`; `wrote` hears the size of what was written."""
    assert sys.byteorder == "little", "big-endian files are refused when they are opened"
    pairs = [source.changed(key, changes[key]) if key in changes else source.pair(key) for key in source.keys]
    for key, change in changes.items():
        if key not in source.keys:
            pairs.append(_text(key) + struct.pack("<I", GGUFValueType.STRING) + _text(str(change)))
    with open(destination, "wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", _VERSION, len(tensors), len(pairs)))
        file.writelines(pairs)
        offset = 0
        for tensor in tensors:
            dimensions = tensor.dimensions
            file.write(_text(tensor.name) + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions))
            file.write(struct.pack("<IQ", tensor.type, offset))
            offset += _padded(tensor.size_bytes, source.alignment)
        _pad(file, source.alignment)
        for tensor in tensors:
            data = np.ascontiguousarray(tensor.data()).reshape(-1).view(np.uint8).data
            assert len(data) == tensor.size_bytes, f"{tensor.name} has another size than planned"
            for start in range(0, len(data), _MOST_COPIED_BYTES):
                wrote(file.write(data[start : start + _MOST_COPIED_BYTES]))
            _pad(file, source.alignment)


def _text(value: str) -> bytes:
    content = value.encode()
    return struct.pack("<Q", len(content)) + content


def _padded(size_bytes: int, alignment: int) -> int:
    return -(-size_bytes // alignment) * alignment


def _pad(file: BinaryIO, alignment: int) -> None:
    file.write(bytes(_padded(file.tell(), alignment) - file.tell()))
