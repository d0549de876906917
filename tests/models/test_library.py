from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.errors import ModelFileError, SettingError
from models import header_index
from models.derive import derive
from models.folders import models_folder
from models.gguf_file import GgufFacts, read_header
from models.library import Origin, add_folder, added_folders, list_models, remove_folder, resolve
from models.starter import starter_path
from tests.models.making import write_parts, write_tiny_llama


@pytest.fixture
def shelf(home: Path, tmp_path: Path) -> Path:
    """A folder of the user's with a model two levels down."""
    folder = tmp_path / "shelf"
    (folder / "publisher").mkdir(parents=True)
    write_tiny_llama(folder / "publisher" / "Llama-Tiny-F16.gguf", layer_count=2)
    return folder


@pytest.mark.parametrize(
    "pasted",
    [" {}\n", '"{}"', "'{}'", "file://{}", "FILE://{}"],
    ids=["spaces", "quotes", "single quotes", "address", "capitals"],
)
def test_a_pasted_path_is_understood(shelf: Path, pasted: str) -> None:
    (shelf / "publisher").rename(shelf / "a publisher")
    path = shelf / "a publisher" / "Llama-Tiny-F16.gguf"
    written = str(path).replace(" ", "%20") if ":" in pasted else str(path)
    assert resolve(pasted.format(written)) == path


def test_what_is_pasted_instead_of_a_path_is_refused_kindly(home: Path) -> None:
    for text in ("~nobody-of-that-name/model.gguf", "a" * 5000, "null\0byte"):
        with pytest.raises(ModelFileError, match="no model file and no installed model"):
            resolve(text)


def test_nothing_installed(home: Path) -> None:
    assert list_models() == ()


def test_every_place_is_listed_starter_first(starter: Path, shelf: Path) -> None:
    os.link(starter, starter_path())
    write_tiny_llama(models_folder() / "fetched.gguf", layer_count=2)
    add_folder(shelf)
    derived = derive(shelf / "publisher" / "Llama-Tiny-F16.gguf", [1])
    models = list_models()
    assert [(model.name, model.origin) for model in models] == [
        ("SmolLM2-135M-Instruct.Q4_1", Origin.STARTER),
        ("fetched", Origin.FETCHED),
        (derived.name, Origin.DERIVED),
        ("Llama-Tiny-F16", Origin.FOLDER),
    ]
    assert [model.derived_from for model in models] == ["", "", derived.target_sha256, ""]
    assert all(model.fault == "" and model.facts is not None for model in models)


def test_of_many_files_only_those_that_changed_are_read_again(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the Hugging Face cache keeps them: 500 links to blobs."""
    hub = tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    content = write_tiny_llama(tmp_path / "one.gguf", layer_count=1).read_bytes()
    blobs = []
    for number in range(500):
        repository = hub / f"models--owner--model-{number}"
        snapshot = repository / "snapshots" / "0123abcd"
        snapshot.mkdir(parents=True)
        (repository / "blobs").mkdir()
        blobs.append(repository / "blobs" / "blob")
        blobs[-1].write_bytes(content)
        (snapshot / f"model-{number}.gguf").symlink_to(blobs[-1])
    read: list[Path] = []

    def counted(path: Path) -> GgufFacts:
        read.append(path)
        return read_header(path)

    monkeypatch.setattr(header_index, "read_header", counted)
    first = list_models()
    assert len(first) == len(read) == 500
    read.clear()
    assert list_models() == first
    assert read == []
    os.utime(blobs[7], ns=(1, 1))
    assert list_models() == first
    assert [path.name for path in read] == ["model-7.gguf"]


def test_a_broken_file_is_listed_with_its_fault(shelf: Path) -> None:
    add_folder(shelf)
    (shelf / "broken.gguf").write_bytes(b"GGUF")
    (shelf / "notes.txt").write_text("no model")
    (shelf / ".half.gguf").write_bytes(b"GGUF")
    by_name = {model.name: model for model in list_models()}
    assert by_name.keys() == {"broken", "Llama-Tiny-F16"}
    assert by_name["broken"].facts is None
    assert "cut short" in by_name["broken"].fault


def test_a_split_model_is_one_and_says_what_is_missing(shelf: Path) -> None:
    add_folder(shelf)
    paths = write_parts(shelf, "big")
    second = paths[1].read_bytes()
    paths[1].unlink()
    (first,) = (model for model in list_models() if model.name.startswith("big"))
    assert "first of 2 parts" in first.fault
    paths[1].write_bytes(second)
    (first,) = (model for model in list_models() if model.name.startswith("big"))
    assert first.fault == ""


def test_names_are_unique_and_each_resolves_to_its_file(shelf: Path) -> None:
    add_folder(shelf)
    (shelf / "other").mkdir()
    write_tiny_llama(shelf / "other" / "Llama-Tiny-F16.gguf", layer_count=3)
    models = list_models()
    assert [model.name for model in models] == ["Llama-Tiny-F16", "publisher/Llama-Tiny-F16"]
    assert [resolve(model.name) for model in models] == [model.path for model in models]
    assert resolve("llama-tiny-f16.GGUF") == models[0].path


def test_a_path_is_itself_whatever_it_is_called(shelf: Path) -> None:
    path = shelf / "publisher" / "Llama-Tiny-F16.gguf"
    assert resolve(str(path)) == path


def test_the_starter_has_a_short_name(home: Path, starter: Path) -> None:
    with pytest.raises(ModelFileError, match="not on this machine"):
        resolve("starter")
    os.link(starter, starter_path())
    assert resolve("Starter") == starter_path()


def test_an_unknown_name_brings_near_ones(shelf: Path) -> None:
    add_folder(shelf)
    with pytest.raises(ModelFileError, match="did you mean Llama-Tiny-F16"):
        resolve("llama-tiny-f32")
    with pytest.raises(ModelFileError, match=r"launch\.py models"):
        resolve("zzz")
    with pytest.raises(ModelFileError, match="is a folder"):
        resolve(str(shelf))
    with pytest.raises(ModelFileError, match="no model is named"):
        resolve("")


def test_folders_are_added_once_and_removed(shelf: Path, tmp_path: Path) -> None:
    add_folder(shelf)
    add_folder(shelf / ".." / "shelf")
    assert added_folders() == (shelf,)
    with pytest.raises(SettingError, match="no such folder"):
        add_folder(tmp_path / "missing")
    remove_folder(shelf)
    assert added_folders() == ()
    with pytest.raises(SettingError, match="not among the added folders: none"):
        remove_folder(shelf)


def test_a_folder_that_has_gone_is_no_fault(shelf: Path) -> None:
    add_folder(shelf)
    shelf.rename(shelf.with_name("moved"))
    assert list_models() == ()


def test_damaged_settings_are_named(shelf: Path, home: Path) -> None:
    add_folder(shelf)
    (home / "data" / "models.json").write_text("[")
    with pytest.raises(SettingError, match=r"models\.json"):
        list_models()
