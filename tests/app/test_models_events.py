"""What the Models tab does with paths, dropped files and model files, on a service without a model."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import gradio as gr
import pytest

from app.choices import SetChoice
from app.errands import Work
from app.layout import lay_out
from app.models_events import ModelsEvents
from app.models_tab import Derivation, deriving, dropped_file, fetching, identifying
from app.placements import Placements
from app.service import Service
from engine.config import GenerationSettings, SetConfig
from engine.errors import SettingError
from models import hub
from models.derive import derive
from models.folders import models_folder
from models.identity import known_sha256s
from models.library import STARTER_NAME, add_folder, added_folders, list_models, removable
from models.progress import no_report
from tests.app.conftest import finished, loading
from tests.models.making import write_parts, write_tiny_llama


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUORUM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "user" / ".ollama"))
    return tmp_path / "home"


@pytest.fixture
def events(service: Service) -> ModelsEvents:
    with gr.Blocks():
        base = SetChoice()
        return ModelsEvents(service, lay_out(base, GenerationSettings()), base, Placements(base))


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "my models").mkdir()
    return write_tiny_llama(tmp_path / "my models" / "mine.gguf", layer_count=2)


def done(work: Work) -> str:
    return work(no_report, threading.Event())


def test_a_pasted_file_becomes_the_target_where_it_lies(events: ModelsEvents, mine: Path) -> None:
    targets, box, notice = events.use_path(f'"{mine}"', STARTER_NAME)
    assert targets["value"] == str(mine)
    assert ("mine", str(mine)) in targets["choices"]
    assert box == ""
    assert "mine is chosen as the target; the file stays where it is." in notice
    assert list(models_folder().iterdir()) == []


def test_a_pasted_folder_is_looked_into_from_now_on(events: ModelsEvents, mine: Path) -> None:
    address = f"file://{str(mine.parent).replace(' ', '%20')}"
    targets, box, notice = events.use_path(address, STARTER_NAME)
    assert ("mine", str(mine)) in targets["choices"]
    assert targets["value"] == STARTER_NAME
    assert box == ""
    assert "1 model file. It is looked into" in notice
    assert added_folders() == (mine.parent,)
    assert [model.path for model in list_models()] == [mine]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no path is written"),
        ("/no/such/model.gguf", "no model file and no installed model is called"),
        (__file__, "is not a GGUF file"),
    ],
)
def test_a_path_that_leads_to_no_model_is_explained_and_stays_in_the_box(
    events: ModelsEvents, text: str, says: str
) -> None:
    targets, box, notice = events.use_path(text, STARTER_NAME)
    assert "value" not in targets
    assert "value" not in box
    assert says in notice
    assert 'role="alert"' in notice


def test_a_later_part_means_its_model_and_a_part_alone_is_none(events: ModelsEvents, tmp_path: Path) -> None:
    first, second = write_parts(tmp_path, "big")
    targets, _, _ = events.use_path(str(second), STARTER_NAME)
    assert targets["value"] == str(first)
    second.unlink()
    assert "lacks some of its parts" in events.use_path(str(first), STARTER_NAME)[2]


def told(**what: Any) -> str:
    return json.dumps(what)


def test_a_dropped_file_with_a_path_is_that_file(events: ModelsEvents, mine: Path) -> None:
    address = f"# from a file manager\r\nfile://{str(mine).replace(' ', '%20')}\r\n"
    targets, _, _, emptied = events.take_dropped(told(text=address, name="mine.gguf", size=1), STARTER_NAME)
    assert targets["value"] == str(mine)
    assert emptied == ""


def test_a_dropped_file_without_a_path_is_found_by_name_and_size(events: ModelsEvents, mine: Path) -> None:
    size_bytes = mine.stat().st_size
    assert dropped_file("mine.gguf", size_bytes) is None
    _, _, notice, _ = events.take_dropped(told(text="mine.gguf", name="mine.gguf", size=size_bytes), STARTER_NAME)
    assert "the browser does not tell where mine.gguf lies" in notice.lower()
    add_folder(mine.parent)
    assert events.take_dropped(told(text="", name="mine.gguf", size=size_bytes), STARTER_NAME)[0]["value"] == str(mine)
    assert dropped_file("mine.gguf", size_bytes + 1) is None
    _, _, notice, _ = events.take_dropped(told(name="my models", size=4096, isFolder=True), STARTER_NAME)
    assert "the folder my models lies" in notice


def test_models_are_removed_and_what_is_loaded_is_not(
    events: ModelsEvents, service: Service, set_config: SetConfig
) -> None:
    fetched = models_folder() / set_config.target.name
    os.link(set_config.target, fetched)
    other = write_tiny_llama(models_folder() / "other.gguf", layer_count=3)
    copy = derive(other, [1])
    add_folder(other.parent)
    assert removable() == (fetched.stem, "other", copy.name, str(other.parent))
    finished(service.load(loading(SetConfig(fetched, (), 256, set_config.placement))))
    assert "is loaded; unload it" in events.remove(fetched.stem)
    for name in (copy.name, "other", str(other.parent)):
        assert events.remove(name) == ""
    assert "Nothing was removed" in events.remove(None)
    assert removable() == (fetched.stem,)


def test_several_models_are_fetched_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []

    def fetch(reference: str, *_: object) -> Path:
        fetched.append(reference)
        return Path(f"{reference.rpartition('/')[2]}.gguf")

    monkeypatch.setattr(hub, "fetch", fetch)
    assert done(fetching("a/target:Q4_0, a/drafter")).startswith("target:Q4_0 and drafter are on this machine; choose")
    assert fetched == ["a/target:Q4_0", "a/drafter"]
    with pytest.raises(SettingError, match="nothing is named"):
        fetching(" , ")


def test_a_drafter_is_made_as_it_is_asked_for(starter: Path) -> None:
    said = done(deriving(str(starter), Derivation.QUICK))
    assert said.startswith("SmolLM2-135M-Instruct-without-14-Q4_0 can draft for")
    said = done(deriving(str(starter), Derivation.BITS))
    assert said.startswith("SmolLM2-135M-Instruct-Q2_K can draft for")


def test_every_model_gets_its_hash_once(mine: Path) -> None:
    add_folder(mine.parent)
    (mine.parent / "broken.gguf").write_bytes(b"GGUF")
    assert done(identifying()) == "all 1 models have their hash now; 1 were read for it"
    assert done(identifying()) == "all 1 models have their hash now; 0 were read for it"
    assert len(known_sha256s([mine])[mine]) == 64


def test_the_table_tells_what_a_file_is(events: ModelsEvents, mine: Path) -> None:
    add_folder(mine.parent)
    table, _, removables = events.list_installed()
    assert f"<dt>File</dt><dd>{mine}</dd>" in table
    assert "llama, 2 layers" in table
    assert "<dt>SHA-256</dt><dd>not computed yet</dd>" in table
    assert removables["choices"] == [str(mine.parent)]
    done(identifying())
    assert f"<dt>SHA-256</dt><dd>{known_sha256s([mine])[mine]}</dd>" in events.list_installed()[0]
