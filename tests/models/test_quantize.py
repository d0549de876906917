from __future__ import annotations

import os
from pathlib import Path

import pytest
from gguf.constants import LlamaFileType

from engine.errors import ModelFileError
from engine.runtime.quantize import quantize
from models.gguf_file import read_header
from tests.models.making import greedy_tokens, write_tiny_llama


def test_a_quantised_copy_is_smaller_loads_and_can_be_quantised_again(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "source.gguf", layer_count=2)
    eight, four = tmp_path / "eight.gguf", tmp_path / "four.gguf"
    quantize(source, eight, LlamaFileType.MOSTLY_Q8_0, threads=1)
    quantize(eight, four, LlamaFileType.MOSTLY_Q4_0, threads=2)
    assert [read_header(path).quantisation for path in (eight, four)] == ["Q8_0", "Q4_0"]
    assert source.stat().st_size > eight.stat().st_size > four.stat().st_size
    assert len(greedy_tokens(four, 3, [1, 2, 3])) == 3
    assert sorted(os.listdir(tmp_path)) == ["eight.gguf", "four.gguf", "source.gguf"]


def test_what_cannot_be_quantised_leaves_the_old_copy(tmp_path: Path) -> None:
    source, destination = tmp_path / "source.gguf", tmp_path / "copy.gguf"
    source.write_bytes(b"GGUF" + bytes(20))
    destination.write_bytes(b"old")
    with pytest.raises(ModelFileError, match="could not quantise"):
        quantize(source, destination, LlamaFileType.MOSTLY_Q4_0, threads=1)
    assert destination.read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["copy.gguf", "source.gguf"]


def test_a_missing_source_and_no_threads(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such model file"):
        quantize(tmp_path / "missing.gguf", tmp_path / "copy.gguf", LlamaFileType.MOSTLY_Q4_0, threads=1)
    with pytest.raises(ValueError, match="threads"):
        quantize(tmp_path / "missing.gguf", tmp_path / "copy.gguf", LlamaFileType.MOSTLY_Q4_0, threads=0)
