"""What a GGUF file says about itself, read from its header in a few milliseconds and without loading weights.

The parser is our own. The `gguf` package's reader makes Python objects for every token and merge of the vocabulary
(seconds for large ones), believes every count in the header, and maps the file, so that a file cut short while it is
read ends the process. This one reads forward through a small window, keeps only the few values that are facts, skips
the rest, and refuses a count or length that the file cannot hold. Memory is bounded by the window, time by
`_MAX_STRINGS`.
"""

from __future__ import annotations

import math
import re
import stat
import struct
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

from engine.errors import ModelFileError
from engine.runtime.parts import is_later_part, part_number, split_paths

__all__ = (
    "GgufFacts",
    "Layout",
    "TensorFacts",
    "is_later_part",
    "read_header",
    "read_layout",
    "read_tensors",
    "split_paths",
)

_WINDOW_BYTES = 1 << 20
_MAX_KEYS = 1 << 12
_MAX_TENSORS = 1 << 16
_MAX_STRINGS = 1 << 22
"""Strings in all arrays of a header together; the largest vocabularies with their merges have a million."""
_MAX_NAME_BYTES = 1 << 10
_MAX_KEPT_BYTES = 1 << 12
"""Longer texts (chat templates) are only noted as present."""
_MAX_DIMENSIONS = 4
_MAX_PARTS = 1 << 12

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GgufFacts:
    """What a model's header says. Texts are empty and numbers zero where the file does not say."""

    path: Path
    """Its file, or the first one of a split model."""
    size_bytes: int
    """Of all parts together, as far as they are there."""
    architecture: str
    name: str
    kind: str
    """`model`, or what the file holds instead: `adapter`, `mmproj`, `imatrix`, ..."""
    quantisation: str
    """`Q4_0`, `Q4_K_M`, ...: as the file says, else the type that most of its weights have."""
    layer_count: int
    context_tokens: int
    vocabulary_size: int
    parameter_count: int
    """Of all parts together, as far as they are there."""
    embedding_width: int
    feed_forward_width: int
    kv_width: int
    """Numbers that one token's keys and values take in one layer, together; an upper bound where layers differ."""
    has_chat_template: bool
    licence: str
    split_count: int
    """Parts the model consists of: 1 unless it is split."""
    is_complete: bool
    """All parts of the model lie in this folder. A file that is cut short has no facts, it raises."""
    expansion: str
    """Recipe of the function-preserving expansion that made this file; empty for every ordinary model."""

    @property
    def stem(self) -> str:
        """The file name without its ending and without the format that many names carry.

        Some programs name files after their hash; then it is the model's name, as far as it can be a file name.
        """
        is_named = self.path.suffix.lower() == ".gguf"
        name = self.path.stem if is_named else re.sub(r"[^\w.-]+", "-", self.name).strip("-.") or "model"
        return re.sub(rf"[.-]{re.escape(self.quantisation)}$", "", name, flags=re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One tensor of a file, as its header describes it."""

    name: str
    type: str
    shape: tuple[int, ...]
    """As ggml counts: the length of a row first."""
    offset: int
    """From the start of the tensor data."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parts of one file lie, in bytes from its start."""

    facts: GgufFacts
    pairs: dict[str, tuple[int, int, int]]
    """Where each metadata pair begins, where its value begins (with its type), and where it ends."""
    tensors: tuple[TensorFacts, ...]
    data_start: int
    alignment: int


def read_header(path: Path) -> GgufFacts:
    """Facts about the model, or a `ModelFileError` that says what is wrong with its file, or with one of its parts."""
    facts = _read(path).facts()
    return facts if facts.split_count == 1 else _with_parts(facts)


def read_tensors(path: Path) -> tuple[TensorFacts, ...]:
    """Every tensor of the model, whatever parts it is split into."""
    return tuple(tensor for part in split_paths(path) for tensor in _read(part).tensors)


def read_layout(path: Path) -> Layout:
    """Facts about the file and where its parts lie, for those who copy them."""
    header = _read(path)
    return Layout(header.facts(), header.pairs, tuple(header.tensors), header.data_start, header.alignment)


def _read(path: Path) -> _Header:
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise ModelFileError(f"{path} is a folder; name a GGUF file in it")
        if not stat.S_ISREG(mode):
            raise ModelFileError(f"{path} is no regular file; name a GGUF file")
        with open(path, "rb") as file:
            return _Header(file, path)
    except FileNotFoundError:
        raise ModelFileError(f"no such model file: {path}") from None
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror}") from error


def _with_parts(facts: GgufFacts) -> GgufFacts:
    """Facts about a split model with what its later parts hold; they are not complete where one is missing.

    Raises:
        ModelFileError: a part is damaged, or is another one than its name says.
    """
    later = [part for part in split_paths(facts.path)[1:] if part.is_file()]
    size_bytes, parameter_count = facts.size_bytes, facts.parameter_count
    for part in later:
        header = _read(part)
        header.require_part_of(facts.split_count)
        size_bytes += header.size_bytes
        parameter_count += header.parameter_count
    is_complete = len(later) + 1 == facts.split_count == len(split_paths(facts.path))
    return replace(facts, size_bytes=size_bytes, parameter_count=parameter_count, is_complete=is_complete)


class _Header:
    """One pass over a header. Reading happens in the constructor, in file order."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.path = path
        self.size_bytes = file.seek(0, 2)
        file.seek(0)
        self._file = file
        self._window = b""
        self._at = 0
        self._window_start = 0
        self._strings_left = _MAX_STRINGS
        self.values: dict[str, int | float | bool | str] = {}
        self.lengths: dict[str, int] = {}
        self.pairs: dict[str, tuple[int, int, int]] = {}
        self.parameter_count = 0
        self.weights_by_type: Counter[str] = Counter()
        self.tensors: list[TensorFacts] = []

        tensor_count, key_count = self._read_preamble()
        for _ in range(key_count):
            self._read_pair()
        data_bytes = self._read_tensors(tensor_count)
        self.alignment = self._number("general.alignment", 32)
        if self.alignment < 1 or self.alignment & (self.alignment - 1):
            raise self._damaged(f"its alignment is {self.alignment}")
        self.data_start = -(-self._position // self.alignment) * self.alignment
        data_end = self.data_start + data_bytes
        if data_bytes and data_end > self.size_bytes:
            raise ModelFileError(
                f"{path} is cut short: its weights need {data_end:,} bytes and the file has {self.size_bytes:,}; "
                "fetch it again"
            )

    def facts(self) -> GgufFacts:
        architecture = self._text("general.architecture")
        if not architecture:
            raise self._damaged("it does not name its architecture")
        split_count = max(1, self._number("split.count"))
        if split_count > _MAX_PARTS:
            raise self._damaged(f"it claims to be one of {split_count:,} parts")
        return GgufFacts(
            path=self.path,
            size_bytes=self.size_bytes,
            architecture=architecture,
            name=self._text("general.name") or self.path.stem,
            kind=self._text("general.type") or "model",
            quantisation=self._quantisation(),
            layer_count=self._number(f"{architecture}.block_count"),
            context_tokens=self._number(f"{architecture}.context_length"),
            vocabulary_size=self.lengths.get("tokenizer.ggml.tokens", 0) or self._number(f"{architecture}.vocab_size"),
            parameter_count=self.parameter_count,
            embedding_width=self._number(f"{architecture}.embedding_length"),
            feed_forward_width=self._number(f"{architecture}.feed_forward_length"),
            kv_width=self._kv_width(architecture),
            has_chat_template="tokenizer.chat_template" in self.lengths,
            licence=self._text("general.license"),
            split_count=split_count,
            is_complete=split_count == 1,
            expansion=self._text("quorum.expansion"),
        )

    def require_part_of(self, split_count: int) -> None:
        """Refuse a file that lies where a later part should and says that it is none, or another one."""
        number, count = self._number("split.no", -1), self._number("split.count")
        if (f"{number + 1:05d}", count) != (part_number(self.path), split_count):
            raise self._damaged(f"it lies where a part of {split_count} is expected and is none, or another one")

    def _kv_width(self, architecture: str) -> int:
        heads = max(1, self._number(f"{architecture}.attention.head_count", 1))
        kv_heads = self._number(f"{architecture}.attention.head_count_kv", heads)
        head_width = self._number(f"{architecture}.embedding_length") // heads
        key_width = self._number(f"{architecture}.attention.key_length", head_width)
        return kv_heads * (key_width + self._number(f"{architecture}.attention.value_length", head_width))

    def _quantisation(self) -> str:
        number = self._number("general.file_type", -1)
        if number in LlamaFileType.__members__.values():
            return str(LlamaFileType(number).name).removeprefix("MOSTLY_").removeprefix("ALL_")
        most_common = self.weights_by_type.most_common(1)
        return most_common[0][0] if most_common else ""

    def _text(self, key: str) -> str:
        value = self.values.get(key, "")
        return value if isinstance(value, str) else ""

    def _number(self, key: str, default: int = 0) -> int:
        value = self.values.get(key, default)
        return value if isinstance(value, int) else default

    def _read_preamble(self) -> tuple[int, int]:
        if self.size_bytes == 0:
            raise ModelFileError(f"{self.path} is empty; fetch it again")
        magic = self._file.read(4)
        if magic != b"GGUF":
            raise ModelFileError(f"{self.path} is not a GGUF file: it starts with {magic!r}")
        self._window_start = 4
        version = self._integer("<I")
        if version & 0xFFFF == 0:
            raise ModelFileError(f"{self.path} is a big-endian GGUF file, which this machine cannot read")
        if version not in (2, 3):
            raise ModelFileError(f"{self.path} is GGUF version {version}; versions 2 and 3 can be read")
        tensor_count = self._integer("<Q")
        key_count = self._integer("<Q")
        if tensor_count > _MAX_TENSORS or key_count > _MAX_KEYS:
            raise self._damaged(f"it claims {tensor_count:,} tensors and {key_count:,} metadata keys")
        return tensor_count, key_count

    def _read_pair(self) -> None:
        start = self._position
        key = self._string("a metadata key", _MAX_NAME_BYTES)
        value_start = self._position
        self._read_value(key)
        self.pairs[key] = (start, value_start, self._position)

    def _read_value(self, key: str) -> None:
        kind = self._integer("<I")
        if kind == _STRING:
            length = self._integer("<Q")
            self.lengths[key] = length
            if length <= _MAX_KEPT_BYTES:
                self.values[key] = self._take(length).decode("utf-8", "replace")
            else:
                self._skip(length)
        elif kind == _ARRAY:
            self._skip_array(key)
        elif kind in _SCALARS:
            layout = _SCALARS[kind]
            self.values[key] = struct.unpack(layout, self._take(struct.calcsize(layout)))[0]
        else:
            raise self._damaged(f"metadata key {key[:80]!r} has the unknown type {kind}")

    def _skip_array(self, key: str) -> None:
        kind = self._integer("<I")
        count = self._integer("<Q")
        self.lengths[key] = count
        if kind in _SCALARS:
            self._skip(count * struct.calcsize(_SCALARS[kind]))
        elif kind == _STRING:
            self._strings_left -= count
            if self._strings_left < 0:
                raise self._damaged(f"metadata key {key[:80]!r} claims {count:,} strings")
            self._skip_strings(count)
        else:
            raise self._damaged(f"metadata key {key[:80]!r} is an array of the unreadable type {kind}")

    def _skip_strings(self, count: int) -> None:
        """The one hot loop: some hundred thousand tokens and merges, walked inside the window."""
        unpack = _LENGTH.unpack_from
        window, at = self._window, self._at
        last = len(window) - _LENGTH.size
        for _ in range(count):
            if at > last:
                self._at = at
                self._require(_LENGTH.size)
                window, at = self._window, self._at
                last = len(window) - _LENGTH.size
            at += _LENGTH.size + unpack(window, at)[0]
        self._at = min(at, len(window))
        self._skip(at - self._at)

    def _read_tensors(self, count: int) -> int:
        """Returns where the last tensor's data ends, from where the data begins."""
        ends = [0]
        for _ in range(count):
            name = self._string("a tensor name", _MAX_NAME_BYTES)
            dimensions = self._integer("<I")
            if dimensions > _MAX_DIMENSIONS:
                raise self._damaged(f"tensor {name[:80]!r} has {dimensions} dimensions")
            shape = tuple(self._integer("<Q") for _ in range(dimensions))
            elements = math.prod(shape)
            kind = self._integer("<I")
            offset = self._integer("<Q")
            type_name, size_bytes = self._stored(kind, elements)
            self.parameter_count += elements
            self.tensors.append(TensorFacts(name, type_name, shape, offset, size_bytes))
            ends.append(offset + size_bytes)
        return max(ends)

    def _stored(self, kind: int, elements: int) -> tuple[str, int]:
        """How a tensor is stored: the name of its type, and its size."""
        try:
            tensor_type = GGMLQuantizationType(kind)
        except ValueError:
            return "", 0  # a type newer than the gguf package: its size is not known, its offset still counts
        self.weights_by_type[tensor_type.name] += elements
        block_elements, block_bytes = GGML_QUANT_SIZES[tensor_type]
        return tensor_type.name, int(elements // block_elements * block_bytes)

    @property
    def _position(self) -> int:
        return self._window_start + self._at

    def _integer(self, layout: str) -> int:
        return int(struct.unpack(layout, self._take(struct.calcsize(layout)))[0])

    def _string(self, what: str, limit: int) -> str:
        length = self._integer("<Q")
        if length > limit:
            raise self._damaged(f"{what} is {length:,} bytes long")
        return self._take(length).decode("utf-8", "replace")

    def _take(self, count: int) -> bytes:
        self._require(count)
        self._at += count
        return self._window[self._at - count : self._at]

    def _skip(self, count: int) -> None:
        if count <= len(self._window) - self._at:
            self._at += count
            return
        target = self._position + count
        if target > self.size_bytes:
            raise self._cut_short()
        self._file.seek(target)
        self._window_start, self._window, self._at = target, b"", 0

    def _require(self, count: int) -> None:
        """Have `count` bytes in the window; `_at` may point past its end after a long string."""
        if self._at + count <= len(self._window):
            return
        start = self._position
        if start + count > self.size_bytes:
            raise self._cut_short()
        self._file.seek(start)
        self._window_start, self._window, self._at = start, self._file.read(max(count, _WINDOW_BYTES)), 0
        if len(self._window) < count:
            raise self._cut_short()

    def _cut_short(self) -> ModelFileError:
        return ModelFileError(f"{self.path} is cut short within its header ({self.size_bytes:,} bytes); fetch it again")

    def _damaged(self, fault: str) -> ModelFileError:
        return ModelFileError(f"{self.path} is damaged or no model: {fault}")
