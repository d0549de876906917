from __future__ import annotations

import contextlib
import os
import struct
import time
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from random import Random

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import ModelFileError
from models.gguf_file import is_later_part, read_header, read_layout, split_paths
from tests.models.making import token_texts, write_tiny_llama, write_vocabulary


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key.encode()) + struct.pack("<I", kind) + value


def header(
    pairs: Iterable[bytes] = (), tensors: Iterable[bytes] = (), version: int = 3, magic: bytes = b"GGUF"
) -> bytes:
    pairs, tensors = list(pairs), list(tensors)
    return magic + struct.pack("<IQQ", version, len(tensors), len(pairs)) + b"".join(pairs + tensors)


ARCHITECTURE = pair("general.architecture", 8, text(b"llama"))


def fault(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(ModelFileError) as caught:
        read_header(path)
    return str(caught.value)


def test_facts_agree_with_the_gguf_package(starter: Path) -> None:
    reader = gguf.GGUFReader(starter)
    facts = read_header(starter)
    assert facts.size_bytes == starter.stat().st_size
    assert facts.architecture == "llama"
    assert facts.name == reader.fields["general.name"].contents()
    assert facts.layer_count == reader.fields["llama.block_count"].contents() == 30
    assert facts.context_tokens == reader.fields["llama.context_length"].contents() == 8192
    assert facts.vocabulary_size == len(reader.fields["tokenizer.ggml.tokens"].data) == 49152
    assert facts.parameter_count == sum(tensor.n_elements for tensor in reader.tensors)
    assert (facts.quantisation, facts.licence, facts.kind) == ("Q4_1", "apache-2.0", "model")
    assert facts.has_chat_template
    assert facts.is_complete
    assert facts.split_count == 1
    assert facts.expansion == ""


def test_only_the_header_is_read_and_little_is_kept(starter: Path) -> None:
    read_header(starter)
    tracemalloc.start()
    read_header(starter)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 4 << 20


def test_what_is_no_model_file_is_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(ModelFileError, match="no such model file"):
        read_header(path)
    with pytest.raises(ModelFileError, match="is a folder"):
        read_header(tmp_path)
    assert "is empty" in fault(path, b"")
    assert "not a GGUF file" in fault(path, b"PK\x03\x04 a wheel")
    assert "not a GGUF file" in fault(path, b"GG")
    assert "big-endian" in fault(path, b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    assert "version 1" in fault(path, header(version=1))
    assert "version 9" in fault(path, header(version=9))
    assert "does not name its architecture" in fault(path, header())


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelFileError, match="no regular file"):
        read_header(tmp_path / "pipe.gguf")


def test_a_file_cut_anywhere_is_called_cut_short(starter: Path, tmp_path: Path) -> None:
    with open(starter, "rb") as file:
        head = file.read(4 << 20)
    path = tmp_path / "cut.gguf"
    for length in (5, 12, 24, 30, 100, 5_000, 500_000, 1_500_000):
        assert "cut short within its header" in fault(path, head[:length])
    path.write_bytes(head)
    os.truncate(path, starter.stat().st_size - 1)
    with pytest.raises(ModelFileError, match="is cut short: its weights need 98,362,432 bytes"):
        read_header(path)
    os.truncate(path, starter.stat().st_size)
    assert read_header(path).layer_count == 30


HUGE = 2**63
HOSTILE = {
    "tensor count": b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0),
    "key count": b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE),
    "key length": b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, HUGE),
    "value length": header([text(b"general.name") + struct.pack("<IQ", 8, HUGE)]),
    "value type": header([pair("general.name", 77, b"")]),
    "numbers in a list": header([pair("list", 9, struct.pack("<IQ", 4, HUGE))]),
    "strings in a list": header([pair("list", 9, struct.pack("<IQ", 8, HUGE))]),
    "many empty strings": header([pair("list", 9, struct.pack("<IQ", 8, 1 << 22) + bytes(1 << 20))]),
    "string length in a list": header([pair("list", 9, struct.pack("<IQQ", 8, 5, HUGE))]),
    "list of lists": header([pair("list", 9, struct.pack("<IQ", 9, 1))]),
    "dimensions": header([ARCHITECTURE], [text(b"t") + struct.pack("<I", 1 << 30)]),
    "tensor size": header([ARCHITECTURE], [text(b"t") + struct.pack("<I4QIQ", 4, *[HUGE] * 4, 0, 0)]),
    "tensor offset": header([ARCHITECTURE], [text(b"t") + struct.pack("<IQIQ", 1, 1, 0, HUGE)]),
    "tensor name": header([ARCHITECTURE], [struct.pack("<Q", HUGE)]),
    "alignment": header(
        [ARCHITECTURE, pair("general.alignment", 4, struct.pack("<I", 0))],
        [text(b"t") + struct.pack("<IQIQ", 1, 1, 0, 0)],
    ),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_absurd_headers_are_refused_in_bounded_memory(content: bytes, tmp_path: Path) -> None:
    tracemalloc.start()
    message = fault(tmp_path / "hostile.gguf", content)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "hostile.gguf" in message
    assert len(message) < 600
    assert peak_bytes < 8 << 20


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 3000), value=st.binary(min_size=1, max_size=8), cut=st.integers(0, 4000))
def test_a_damaged_header_gives_facts_or_a_model_file_error(tmp_path: Path, at: int, value: bytes, cut: int) -> None:
    whole = tmp_path / "tiny.gguf"
    if not whole.exists():
        write_tiny_llama(whole, layer_count=4)
    content = bytearray(whole.read_bytes())
    content[at : at + len(value)] = value
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(content[: len(content) - cut])
    with contextlib.suppress(ModelFileError):
        assert read_header(damaged).size_bytes == damaged.stat().st_size


def test_the_format_is_told_by_the_weights_when_the_file_does_not_say(tmp_path: Path) -> None:
    tensors = [text(b"a") + struct.pack("<IQQIQ", 2, 32, 4, 2, 0), text(b"b") + struct.pack("<IQIQ", 1, 8, 0, 96)]
    path = tmp_path / "model.gguf"
    path.write_bytes(header([ARCHITECTURE], tensors) + bytes(400))
    facts = read_header(path)
    assert facts.quantisation == "Q4_0"
    assert facts.parameter_count == 136
    assert facts.name == "model"


def test_a_tensor_type_of_the_future_does_not_hide_the_facts(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(header([ARCHITECTURE], [text(b"a") + struct.pack("<IQIQ", 1, 32, 999, 0)]) + bytes(64))
    assert read_header(path).architecture == "llama"


def part(number: int, count: int, elements: int) -> bytes:
    """One file of a split model, with a tensor of its own."""
    pairs = [pair("split.no", 2, struct.pack("<H", number - 1)), pair("split.count", 2, struct.pack("<H", count))]
    tensor = text(b"t%d" % number) + struct.pack("<IQIQ", 1, elements, 0, 0)
    return header([*pairs, ARCHITECTURE] if number == 1 else pairs, [tensor]) + bytes(4 * elements + 32)


def test_a_split_model_is_one_and_complete_when_all_parts_are_there(tmp_path: Path) -> None:
    first, second = split_paths(tmp_path / "big-00001-of-00002.gguf")
    first.write_bytes(part(1, 2, 100))
    facts = read_header(first)
    assert facts.split_count == 2
    assert not facts.is_complete
    second.write_bytes(part(2, 2, 900))
    facts = read_header(first)
    assert facts.is_complete
    assert (facts.parameter_count, facts.size_bytes) == (1000, first.stat().st_size + second.stat().st_size)
    renamed = tmp_path / "renamed.gguf"
    renamed.write_bytes(first.read_bytes())
    assert not read_header(renamed).is_complete
    assert is_later_part(second)
    assert not is_later_part(first)
    assert split_paths(tmp_path / "small.gguf") == (tmp_path / "small.gguf",)


def test_a_split_model_with_a_wrong_part_names_it(tmp_path: Path) -> None:
    """Cut short, a part of another model, and a circle: a part that is the first one again."""
    first, second = split_paths(tmp_path / "big-00001-of-00002.gguf")
    first.write_bytes(part(1, 2, 100))
    second.write_bytes(part(2, 2, 900)[:-2000])
    with pytest.raises(ModelFileError, match=r"big-00002-of-00002\.gguf is cut short"):
        read_header(first)
    for content in (part(2, 3, 900), part(1, 2, 100), header([ARCHITECTURE])):
        second.write_bytes(content)
        with pytest.raises(ModelFileError, match=r"big-00002-of-00002\.gguf .* is none, or another one"):
            read_header(first)
    second.unlink()
    second.symlink_to(first)
    with pytest.raises(ModelFileError, match="is none, or another one"):
        read_header(first)
    second.unlink()
    second.symlink_to(second)
    assert not read_header(first).is_complete


def test_an_absurd_number_of_parts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "big-00001-of-65535.gguf"
    path.write_bytes(part(1, 65_535, 1))
    with pytest.raises(ModelFileError, match="one of 65,535 parts"):
        read_header(path)


def test_many_seeded_faults_and_every_cut_give_facts_or_a_model_file_error(tmp_path: Path) -> None:
    whole = write_vocabulary(tmp_path / "whole.gguf", token_texts(60)).read_bytes()
    random = Random(576)
    values = [b"\xff" * 8, b"\xff" * 4, struct.pack("<Q", 1 << 62), struct.pack("<I", 9), bytes(8)]
    damaged = [whole[:length] for length in range(len(whole))]
    for _ in range(1000):
        content = bytearray(whole)
        for _ in range(random.randint(1, 4)):
            at, value = random.randrange(4, len(whole) - 8), random.choice(values)
            content[at : at + len(value)] = value
        damaged.append(bytes(content))
    path = tmp_path / "damaged.gguf"
    began = time.process_time()
    refused = 0
    for candidate in damaged:
        path.write_bytes(candidate)
        try:
            read_layout(path)
        except ModelFileError:
            refused += 1
    assert refused > len(whole) - 64  # a cut within the padding behind the last tensor may go unnoticed
    assert time.process_time() - began < len(damaged) * 0.1
