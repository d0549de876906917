from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from gguf.constants import LlamaFileType

from engine.errors import ModelFileError
from models.derive import write_copy
from models.expand import DRAFTERS, Expansion, build_fixtures, expand
from models.gguf_file import read_header
from models.identity import hash_file
from models.progress import Cancelled, Progress
from tests.models.making import greedy_tokens, write_tiny_llama

TINY = Expansion("target-tiny.gguf", "tiny cost", extra_layers=7, feed_forward=160)


def test_an_expansion_of_the_starter_says_what_the_starter_says(starter: Path, tmp_path: Path) -> None:
    same = Expansion("same.gguf", "same cost", 0, 1536, LlamaFileType.MOSTLY_Q8_0)
    larger = Expansion("larger.gguf", "little more cost", 3, 2048, LlamaFileType.MOSTLY_Q8_0)
    for expansion in (same, larger):
        expand(starter, tmp_path / expansion.file_name, expansion)
    facts = read_header(tmp_path / "larger.gguf")
    assert facts.layer_count == 33
    assert facts.name == "SmolLM2-135M-Instruct expansion (little more cost)"
    assert facts.expansion == larger.recipe
    assert facts.has_chat_template
    width, key_width = 576, 192
    new_neurons = 30 * 3 * (2048 - 1536) * width
    new_layers = 3 * (3 * 2048 * width + 2 * width * width + 2 * key_width * width + 2 * width)
    assert facts.parameter_count == read_header(starter).parameter_count + new_neurons + new_layers
    tokens = greedy_tokens(tmp_path / "larger.gguf", 40)
    assert tokens == greedy_tokens(tmp_path / "same.gguf", 40)
    assert len(set(tokens)) > 15


def test_the_new_layers_add_nothing_wherever_they_are(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "source.gguf", layer_count=4)
    expand(source, tmp_path / "larger.gguf", Expansion("", "x", 9, 96, LlamaFileType.MOSTLY_F16))
    assert read_header(tmp_path / "larger.gguf").layer_count == 13
    assert greedy_tokens(tmp_path / "larger.gguf", 20, [1, 2, 3]) == greedy_tokens(source, 20, [1, 2, 3])
    write_copy(tmp_path / "larger.gguf", tmp_path / "hurt.gguf", (0,), None)
    assert greedy_tokens(tmp_path / "hurt.gguf", 20, [1, 2, 3]) != greedy_tokens(source, 20, [1, 2, 3])


def test_all_fixtures_are_built_load_and_differ(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "source.gguf", layer_count=30)
    readings: list[Progress] = []
    fixtures = build_fixtures(tmp_path / "fixtures", source, readings.append, [TINY])
    assert fixtures.targets.keys() == {"target-tiny"}
    assert fixtures.drafters.keys() == {name.removesuffix(".gguf") for name in DRAFTERS}
    paths = {**fixtures.targets, **fixtures.drafters}
    assert sorted(os.listdir(tmp_path / "fixtures")) == sorted(path.name for path in paths.values())
    layer_counts = {name: read_header(path).layer_count for name, path in paths.items()}
    assert layer_counts == {
        "target-tiny": 37,
        **dict.fromkeys(("drafter-q2k", "drafter-q8", "drafter-tq2"), 30),
        **{f"drafter-drop{layer}": 29 for layer in (10, 14, 20, 24)},
        "drafter-drop4": 26,
        "drafter-drop8": 22,
    }
    assert len({hash_file(path) for path in paths.values()}) == len(paths)
    for path in paths.values():
        assert len(greedy_tokens(path, 2, [1, 2, 3])) == 2
    assert {reading.phase.split(":")[0] for reading in readings} == {path.name for path in paths.values()}


def test_building_again_repairs_what_does_not_fit_and_keeps_the_rest(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "source.gguf", layer_count=30)
    folder = tmp_path / "fixtures"
    fixtures = build_fixtures(folder, source, expansions=[TINY])
    first = {path.name: (path.stat().st_mtime_ns, hash_file(path)) for path in folder.iterdir()}
    os.truncate(fixtures.drafters["drafter-q8"], 500)
    larger = Expansion(TINY.file_name, "other cost", 8, 160)
    build_fixtures(folder, source, expansions=[larger])
    assert read_header(fixtures.targets["target-tiny"]).expansion == larger.recipe
    build_fixtures(folder, source, expansions=[TINY])
    second = {path.name: (path.stat().st_mtime_ns, hash_file(path)) for path in folder.iterdir()}
    changed = {"target-tiny.gguf", "drafter-q8.gguf"}
    assert {name for name in first if first[name] != second[name]} == changed
    assert all(first[name][1] == second[name][1] for name in first), "rebuilt files are the same, byte for byte"


@pytest.mark.parametrize("moment", ["writing half precision", "quantising"])
def test_an_expansion_can_be_stopped_and_leaves_nothing(tmp_path: Path, moment: str) -> None:
    source = write_tiny_llama(tmp_path / "source.gguf", layer_count=2)
    cancel = threading.Event()

    def stop(progress: Progress) -> None:
        if progress.phase.startswith(moment):
            cancel.set()

    with pytest.raises(Cancelled):
        expand(source, tmp_path / "larger.gguf", replace(TINY, feed_forward=40_000), stop, cancel)
    assert os.listdir(tmp_path) == ["source.gguf"]


def test_what_cannot_be_expanded_is_refused(tmp_path: Path) -> None:
    other = write_tiny_llama(tmp_path / "qwen.gguf", layer_count=2, architecture="qwen2")
    with pytest.raises(ModelFileError, match="plain llama"):
        expand(other, tmp_path / "larger.gguf", TINY)
    source = write_tiny_llama(tmp_path / "source.gguf", layer_count=2)
    with pytest.raises(ValueError, match="96 neurons"):
        expand(source, tmp_path / "larger.gguf", Expansion("", "less", 0, 64))
    assert sorted(os.listdir(tmp_path)) == ["qwen.gguf", "source.gguf"]


def test_a_wider_expansion_says_what_the_narrow_one_says(starter: Path, tmp_path: Path) -> None:
    narrow = Expansion("narrow.gguf", "same", 0, 1536, LlamaFileType.MOSTLY_F16)
    wide = Expansion("wide.gguf", "wide", 1, 2048, LlamaFileType.MOSTLY_F16, width=768)
    for expansion in (narrow, wide):
        expand(starter, tmp_path / expansion.file_name, expansion)
    facts = read_header(tmp_path / "wide.gguf")
    assert (facts.embedding_width, facts.layer_count, facts.feed_forward_width) == (768, 31, 2048)
    assert facts.kv_width == 2 * 4 * 64
    assert "width 768" in facts.expansion
    tokens = greedy_tokens(tmp_path / "wide.gguf", 24)
    assert tokens == greedy_tokens(tmp_path / "narrow.gguf", 24)
    assert len(set(tokens)) > 10
    for width in (512, 700, 704):
        with pytest.raises(ValueError, match=f"width 576 cannot have {width}"):
            expand(starter, tmp_path / "no.gguf", replace(wide, width=width))
