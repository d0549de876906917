from __future__ import annotations

import os
import threading
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import LlamaFileType

from engine.errors import ModelFileError, SettingError
from models.derive import all_derived, derive, derive_default, list_derived, remove_derived
from models.gguf_file import read_header
from models.identity import hash_file
from models.progress import Cancelled, Progress
from tests.models.making import greedy_tokens, write_tiny_llama


def tensors_of(path: Path) -> dict[str, tuple[str, bytes]]:
    return {tensor.name: (tensor.tensor_type.name, tensor.data.tobytes()) for tensor in gguf.GGUFReader(path).tensors}


def values_of(path: Path) -> dict[str, object]:
    reader = gguf.GGUFReader(path)
    return {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}


@pytest.mark.parametrize("has_own_head", [False, True], ids=["tied head", "own head"])
def test_kept_layers_close_ranks_and_keep_their_bytes(home: Path, tmp_path: Path, has_own_head: bool) -> None:
    target = write_tiny_llama(tmp_path / "Tiny-F16.gguf", layer_count=5, has_own_head=has_own_head)
    copy = derive(target, [3, 1])
    assert copy.dropped_layers == (1, 3)
    assert copy.name == "Tiny-without-1-3-F16"
    before, after = tensors_of(target), tensors_of(copy.path)
    assert len(after) == 3 * 9 + (3 if has_own_head else 2)
    for name, content in after.items():
        parts = name.split(".")
        if parts[0] == "blk":
            parts[1] = str((0, 2, 4)[int(parts[1])])
        assert content == before[".".join(parts)]
    assert read_header(copy.path).layer_count == 3
    assert len(greedy_tokens(copy.path, 4, [1, 2, 3])) == 4


def test_lists_with_a_value_for_each_layer_are_cut_and_others_are_not(home: Path, tmp_path: Path) -> None:
    target = write_tiny_llama(
        tmp_path / "target.gguf", 4, lists={"attention.head_count_kv": [10, 11, 12, 13], "rope.sections": [1, 2, 3]}
    )
    before, after = values_of(target), values_of(derive(target, [2]).path)
    assert after.pop("llama.attention.head_count_kv") == [10, 11, 13]
    assert after.pop("llama.block_count") == 3
    assert after.pop("general.name") == "Tiny without layer 2"
    assert after.items() < before.items()


def test_the_vocabulary_of_the_starter_is_carried_over(home: Path, starter: Path) -> None:
    copy = derive(starter, [14])
    before, after = values_of(starter), values_of(copy.path)
    assert {key for key in before if before[key] != after[key]} == {"llama.block_count", "general.name"}
    assert before.keys() == after.keys()


def test_the_default_is_shorter_smaller_and_speaks(home: Path, starter: Path) -> None:
    readings: list[Progress] = []
    copy = derive_default(starter, readings.append)
    facts = read_header(copy.path)
    assert (facts.layer_count, facts.quantisation) == (29, "Q4_0")
    assert (copy.dropped_layers, copy.quantisation) == ((14,), "Q4_0")
    assert copy.name == "SmolLM2-135M-Instruct-without-14-Q4_0"
    assert copy.size_bytes == copy.path.stat().st_size < starter.stat().st_size
    assert copy.sha256 == hash_file(copy.path)
    assert copy.target_sha256 == hash_file(starter)
    copied = [reading for reading in readings if reading.phase.startswith("copying")]
    assert copied[-1].done_bytes == copied[-1].total_bytes > 0
    assert len(set(greedy_tokens(copy.path, 12))) > 4


def test_a_deep_target_spares_two_layers(home: Path, tmp_path: Path) -> None:
    copy = derive_default(write_tiny_llama(tmp_path / "deep.gguf", layer_count=36))
    assert copy.dropped_layers == (17, 26)


def test_names_stay_short_and_differ(home: Path, tmp_path: Path) -> None:
    target = write_tiny_llama(tmp_path / "target.gguf", layer_count=30)
    first, second = derive(target, range(1, 28)), derive(target, range(2, 29))
    assert first.name.startswith("target-without-27-layers-")
    assert first.name != second.name
    assert len(first.file_name) < 60


def test_fewer_bits_alone(home: Path, tmp_path: Path) -> None:
    target = write_tiny_llama(tmp_path / "target.gguf", layer_count=2)
    copy = derive(target, file_type=LlamaFileType.MOSTLY_Q8_0)
    assert read_header(copy.path).quantisation == "Q8_0"
    assert read_header(copy.path).layer_count == 2


def test_a_copy_is_made_once_and_again_when_it_is_damaged(home: Path, tmp_path: Path) -> None:
    target = write_tiny_llama(tmp_path / "target.gguf", layer_count=3)
    copy = derive(target, [1])
    made_at = copy.path.stat().st_mtime_ns
    assert derive(target, [1]) == copy
    assert derive(target.rename(tmp_path / "renamed.gguf"), [1]) == copy
    assert copy.path.stat().st_mtime_ns == made_at
    (tmp_path / "renamed.gguf").rename(target)
    os.truncate(copy.path, 100)
    assert all_derived() == ()
    assert derive(target, [1]) == copy
    assert hash_file(copy.path) == copy.sha256


def test_copies_are_listed_for_their_own_target_wherever_it_lies(home: Path, tmp_path: Path) -> None:
    target = write_tiny_llama(tmp_path / "target.gguf", layer_count=3)
    other = write_tiny_llama(tmp_path / "other.gguf", layer_count=4)
    copy, copy_of_other = derive(target, [1]), derive(other, [1])
    moved = target.rename(tmp_path / "moved.gguf")
    assert list_derived(moved) == (copy,)
    assert list_derived(other) == (copy_of_other,)
    assert set(all_derived()) == {copy, copy_of_other}


def test_a_target_of_the_same_size_and_other_bytes_has_no_copies(home: Path, tmp_path: Path) -> None:
    target = write_tiny_llama(tmp_path / "target.gguf", layer_count=3)
    derive(target, [1])
    content = bytearray(target.read_bytes())
    content[-4:] = np.float32(2.0).tobytes()
    changed = tmp_path / "changed.gguf"
    changed.write_bytes(content)
    assert list_derived(changed) == ()


def test_removing_leaves_no_trace(home: Path, tmp_path: Path) -> None:
    target = write_tiny_llama(tmp_path / "target.gguf", layer_count=3)
    first, second = derive(target, [0]), derive(target, [1])
    remove_derived(first)
    assert list_derived(target) == (second,)
    remove_derived(second)
    remove_derived(second)
    assert list_derived(target) == ()
    assert os.listdir(home / "cache" / "derived") == []


def test_what_cannot_be_derived_is_refused(home: Path, tmp_path: Path) -> None:
    target = write_tiny_llama(tmp_path / "target.gguf", layer_count=3)
    with pytest.raises(SettingError, match="layers 0 to 2"):
        derive(target, [3])
    with pytest.raises(SettingError, match="one must stay"):
        derive(target, [0, 1, 2])
    with pytest.raises(SettingError, match="neither"):
        derive(target)
    hybrid = write_tiny_llama(tmp_path / "hybrid.gguf", layer_count=3, architecture="lfm2")
    with pytest.raises(ModelFileError, match="'lfm2', whose layers cannot be left out"):
        derive(hybrid, [1])
    assert list(home.rglob("*.gguf")) == []
    assert list(home.rglob("*.part")) == []


def test_stopping_leaves_nothing(home: Path, tmp_path: Path) -> None:
    target = write_tiny_llama(tmp_path / "target.gguf", layer_count=3)
    cancel = threading.Event()

    def stop_while_copying(progress: Progress) -> None:
        if progress.phase.startswith("copying"):
            cancel.set()

    with pytest.raises(Cancelled):
        derive(target, [1], LlamaFileType.MOSTLY_Q4_0, stop_while_copying, cancel)
    assert [path for path in home.rglob("*") if path.is_file() and path.name != "hashes.json"] == []


def test_stopping_in_the_middle_of_quantising_leaves_nothing(home: Path, starter: Path) -> None:
    cancel = threading.Event()
    readings: list[Progress] = []

    def stop_when_something_is_written(progress: Progress) -> None:
        if progress.phase.startswith("quantising"):
            readings.append(progress)
            if progress.done_bytes:
                cancel.set()

    with pytest.raises(Cancelled):
        derive(starter, (), LlamaFileType.MOSTLY_Q2_K, stop_when_something_is_written, cancel)
    assert 0 < readings[-1].done_bytes < readings[-1].total_bytes
    assert [path for path in home.rglob("*") if path.is_file() and path.name != "hashes.json"] == []
    assert derive(starter, (), LlamaFileType.MOSTLY_Q2_K).quantisation == "Q2_K"


def test_a_format_that_cannot_be_is_explained_by_the_process_that_tried(home: Path, tmp_path: Path) -> None:
    target = write_tiny_llama(tmp_path / "target.gguf", layer_count=2)
    content = bytearray(target.read_bytes())
    place = content.index(b"llama.block_count")
    content[place : place + 17] = b"llama.block_counx"
    target.write_bytes(content)
    with pytest.raises(ModelFileError, match="could not quantise"):
        derive(target, (), LlamaFileType.MOSTLY_Q8_0)
    assert list(home.rglob("*.gguf")) == []
