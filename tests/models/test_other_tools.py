"""Folders as other programs leave them, with real files in them."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from models import header_index
from models.derive import derive
from models.gguf_file import GgufFacts, read_header
from models.library import Origin, add_folder, list_models, resolve
from tests.models.making import write_parts, write_tiny_llama


@pytest.fixture
def user(home: Path, tmp_path: Path) -> Path:
    """The home folder of a user who has other programs."""
    folder = tmp_path / "user"
    folder.mkdir()
    return folder


def model(path: Path, layer_count: int = 2) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_tiny_llama(path, layer_count)


def listed() -> list[tuple[str, Origin]]:
    return [(model.name, model.origin) for model in list_models()]


def hub_file(user: Path, repository: str, commit: str, name: str, layer_count: int = 2) -> Path:
    """A blob and its link in a snapshot, as the hub's client leaves them."""
    folder = user / ".cache" / "huggingface" / "hub" / f"models--{repository.replace('/', '--')}"
    blob = model(folder / "blobs" / f"{commit}-{name.replace('/', '-')}", layer_count)
    link = folder / "snapshots" / commit / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(os.path.relpath(blob, link.parent))
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(commit)
    return link


def ollama_model(models: Path, *name: str, layer_count: int = 2) -> Path:
    """A manifest and the blob it names."""
    made = model(models / "blobs" / "made", layer_count)
    digest = hashlib.sha256(made.read_bytes()).hexdigest()
    blob = made.rename(models / "blobs" / f"sha256-{digest}")
    manifest = models.joinpath("manifests", *name)
    manifest.parent.mkdir(parents=True, exist_ok=True)
    layers = [
        {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:" + "0" * 64},
        {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"},
    ]
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    return blob


def test_the_hub_cache_shows_the_current_version_of_each_file(user: Path) -> None:
    hub_file(user, "a/Old-GGUF", "1" * 40, "kept-Q4_0.gguf", 1)
    hub_file(user, "a/Old-GGUF", "1" * 40, "gone-Q8_0.gguf", 2)
    current = hub_file(user, "a/Old-GGUF", "2" * 40, "kept-Q4_0.gguf", 3)
    hub_file(user, "b/Deep-GGUF", "3" * 40, "Q8_0/deep-Q8_0.gguf", 4)
    assert listed() == [
        ("kept-Q4_0", Origin.HUB_CACHE),
        ("gone-Q8_0", Origin.HUB_CACHE),
        ("deep-Q8_0", Origin.HUB_CACHE),
    ]
    assert resolve("kept-Q4_0") == current


def test_the_hub_cache_moves_with_its_variable(user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_file(user, "a/b", "1" * 40, "x.gguf")
    (user / ".cache" / "huggingface").rename(tmp_path / "moved")
    assert listed() == []
    monkeypatch.setenv("HF_HOME", str(tmp_path / "moved"))
    assert listed() == [("x", Origin.HUB_CACHE)]


def test_a_link_whose_file_has_gone_is_not_listed(user: Path) -> None:
    hub_file(user, "a/b", "1" * 40, "x.gguf").resolve().unlink()
    assert listed() == []


def test_ollama_models_have_their_real_names(user: Path) -> None:
    models = user / ".ollama" / "models"
    blob = ollama_model(models, "registry.ollama.ai", "library", "llama3.2", "1b", layer_count=2)
    ollama_model(models, "registry.ollama.ai", "someone", "tiny", "latest", layer_count=3)
    ollama_model(models, "hf.co", "bartowski", "Tiny-GGUF", "Q4_0", layer_count=4)
    assert {name for name, _ in listed()} == {
        "llama3.2:1b",
        "someone/tiny:latest",
        "hf.co/bartowski/Tiny-GGUF:Q4_0",
    }
    assert resolve("llama3.2:1b") == blob
    assert derive(blob, [1]).name == "Tiny-without-1-F16"


def test_two_tags_of_one_blob_are_one_model(user: Path) -> None:
    models = user / ".ollama" / "models"
    ollama_model(models, "registry.ollama.ai", "library", "tiny", "1b")
    ollama_model(models, "registry.ollama.ai", "library", "tiny", "latest")
    assert listed() == [("tiny:1b", Origin.OLLAMA)]


MODEL_LAYER = '{"mediaType": "application/vnd.ollama.image.model"'


@pytest.mark.parametrize(
    "manifest",
    [
        *("", "[", "[]", '{"layers": 3}'),
        f'{{"layers": [{MODEL_LAYER}}}]}}',
        f'{{"layers": [{MODEL_LAYER}, "digest": "sha256:../../secret"}}]}}',
    ],
)
def test_a_damaged_manifest_is_passed_over(user: Path, manifest: str) -> None:
    path = user / ".ollama" / "models" / "manifests" / "registry.ollama.ai" / "library" / "x" / "latest"
    path.parent.mkdir(parents=True)
    path.write_text(manifest)
    assert listed() == []


def test_lm_studio_llama_cpp_and_gpt4all(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    model(user / ".lmstudio" / "models" / "publisher" / "Tiny-GGUF" / "studio.gguf", 1)
    model(user / ".cache" / "llama.cpp" / "org_repo_cached.gguf", 2)
    model(user / ".local" / "share" / "nomic.ai" / "GPT4All" / "four.gguf", 3)
    assert listed() == [
        ("org_repo_cached", Origin.LLAMA_CPP),
        ("studio", Origin.LM_STUDIO),
        ("four", Origin.GPT4ALL),
    ]
    monkeypatch.setenv("LLAMA_CACHE", str(user / ".lmstudio"))
    assert listed() == [("studio", Origin.LLAMA_CPP), ("four", Origin.GPT4ALL)]


def test_jan_models_are_named_as_jan_names_them(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    data = user / ".local" / "share" / "Jan" / "data"
    folder = data / "llamacpp" / "models" / "org" / "repo"
    model(folder / "model.gguf", 1)
    (folder / "model.yml").write_text("model_path: llamacpp/models/org/repo/model.gguf\nname: 'Tiny 1'\n")
    outside = model(user / "mine.gguf", 2)
    (data / "llamacpp" / "models" / "linked").mkdir()
    (data / "llamacpp" / "models" / "linked" / "model.yml").write_text(f"model_path: {outside}\n")
    (data / "llamacpp" / "models" / "empty").mkdir()
    (data / "llamacpp" / "models" / "empty" / "model.yml").write_text("name: nothing\n")
    assert listed() == [("linked", Origin.JAN), ("Tiny 1", Origin.JAN)]


def test_a_file_seen_by_two_tools_is_listed_once(user: Path) -> None:
    path = model(user / ".lmstudio" / "models" / "a" / "b" / "shared.gguf")
    add_folder(path.parent)
    assert listed() == [("shared", Origin.FOLDER)]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose header was read, in order."""
    seen: list[str] = []

    def counted(path: Path) -> GgufFacts:
        seen.append(path.name)
        return read_header(path)

    monkeypatch.setattr(header_index, "read_header", counted)
    return seen


def test_headers_are_read_once_and_again_when_a_file_changes(
    user: Path, home: Path, tmp_path: Path, reads: list[str]
) -> None:
    shelf = tmp_path / "shelf"
    first = model(shelf / "first.gguf", 2)
    (shelf / "broken.gguf").write_bytes(b"GGUF")
    add_folder(shelf)
    before = list_models()
    assert sorted(reads) == ["broken.gguf", "first.gguf"]
    assert list_models() == before
    assert len(reads) == 2
    model(first, 3)
    (shelf / "broken.gguf").unlink()
    (changed,) = list_models()
    assert changed.facts is not None
    assert changed.facts.layer_count == 3
    assert reads[2:] == ["first.gguf"]
    (home / "cache" / "headers.json").write_text('{"format": 2, "entries": {"a": [1]}}')
    assert list_models() == (changed,)
    assert reads[3:] == ["first.gguf"]


def test_a_remembered_split_model_notices_what_becomes_of_its_parts(
    user: Path, tmp_path: Path, reads: list[str]
) -> None:
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    _, later = write_parts(shelf, "big")
    whole = later.read_bytes()
    add_folder(shelf)

    def fault() -> str:
        (model,) = list_models()
        return model.fault

    assert fault() == fault() == ""
    assert reads == ["big-00001-of-00002.gguf"]
    later.write_bytes(whole[:-20])
    assert "cut short" in fault()
    later.unlink()
    assert "some of the others are missing" in fault()
    later.write_bytes(whole)
    assert fault() == ""
    assert len(reads) == 4


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege on Windows")
def test_links_that_lead_nowhere_are_passed_over(user: Path, tmp_path: Path) -> None:
    shelf = tmp_path / "shelf"
    model(shelf / "good.gguf")
    (shelf / "self.gguf").symlink_to(shelf / "self.gguf")
    (shelf / "gone.gguf").symlink_to(shelf / "nothing.gguf")
    (shelf / "below").symlink_to(shelf)
    (shelf / "up").symlink_to(tmp_path)
    add_folder(shelf)
    assert listed() == [("good", Origin.FOLDER)]


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege on Windows")
def test_linked_folders_are_followed_once(user: Path, tmp_path: Path) -> None:
    """As people do who keep models on another disk."""
    model(tmp_path / "disk" / "publisher" / "far.gguf")
    studio = user / ".lmstudio" / "models"
    studio.mkdir(parents=True)
    (studio / "disk").symlink_to(tmp_path / "disk")
    (studio / "again").symlink_to(tmp_path / "disk")
    assert listed() == [("far", Origin.LM_STUDIO)]
