from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from engine.errors import ModelFileError
from models.rewrite import Change, Source, write_model
from tests.models.making import write_tiny_llama


def copied(source: Source, path: Path) -> Path:
    write_model(source, path, [tensor.carried_over(tensor.name) for tensor in source.tensors], {}, lambda _: None)
    return path


def test_a_copy_without_changes_is_the_same_file(starter: Path, tmp_path: Path) -> None:
    assert copied(Source(starter), tmp_path / "copy.gguf").read_bytes() == starter.read_bytes()


def test_the_gguf_package_reads_the_same_from_the_copy(tmp_path: Path) -> None:
    lists = {"attention.head_count_kv": [2, 2, 2], "rope.sections": [1, 2]}
    path = write_tiny_llama(tmp_path / "source.gguf", layer_count=3, lists=lists)
    source = Source(path)
    changes: dict[str, Change] = {
        "llama.block_count": 3,
        "general.name": "Ünlike",
        "llama.rope.sections": [9],
        "quorum.note": "new",
    }
    planned = [tensor.carried_over(tensor.name) for tensor in source.tensors]
    written: list[int] = []
    write_model(source, tmp_path / "copy.gguf", planned, changes, written.append)
    before, after = gguf.GGUFReader(path), gguf.GGUFReader(tmp_path / "copy.gguf")
    values = {key: field.contents() for key, field in after.fields.items() if not key.startswith("GGUF.")}
    expected = {key: field.contents() for key, field in before.fields.items() if not key.startswith("GGUF.")}
    assert values == expected | {"general.name": "Ünlike", "llama.rope.sections": [9], "quorum.note": "new"}
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert (old.name, old.tensor_type) == (new.name, new.tensor_type)
        assert np.array_equal(old.data, new.data)
    assert sum(written) == sum(tensor.n_bytes for tensor in before.tensors)


def test_values_are_those_that_the_gguf_package_dequantises(starter: Path) -> None:
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(starter).tensors}
    for tensor in Source(starter).tensors[:12]:
        expected = gguf.dequantize(theirs[tensor.name].data, theirs[tensor.name].tensor_type)
        assert np.array_equal(tensor.values(), expected)
        assert tensor.values().shape == tensor.values_shape


def test_numbers_and_lists_are_read(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "source.gguf", layer_count=3, lists={"rope.sections": [1, 2]})
    source = Source(path)
    assert source.number("llama.block_count") == 3
    assert source.numbers("llama.rope.sections") == [1, 2]
    assert source.numbers("llama.block_count") is None
    assert source.numbers("general.name") is None


@pytest.mark.parametrize("shape", [(3,), (33, 2)])
def test_a_tensor_that_does_not_fill_its_blocks_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = tmp_path / "odd.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_tensor_info("odd", (*reversed(shape[1:]), 34), np.dtype(np.uint8), 34, gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    content = path.read_bytes()
    wide = np.uint64(32).tobytes()
    assert wide in content
    path.write_bytes(content.replace(wide, np.uint64(shape[0]).tobytes()) + bytes(4096))
    with pytest.raises(ModelFileError, match="is damaged"):
        Source(path)
