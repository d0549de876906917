from __future__ import annotations

import argparse
import io
import json
import os
from pathlib import Path

import pytest

from app import models_command
from app.models_command import add_parser, run
from app.terminal import TransferLine
from engine.errors import ModelFileError, QuorumError, SettingError
from models import agreement, hub, layer_search
from models.catalogue import Machine, MachineKind, recommended
from models.derive import all_derived, note_measurement
from models.folders import models_folder
from models.identity import hash_file
from models.progress import Progress
from models.starter import starter_path
from tests.models.making import token_texts, write_tiny_llama, write_vocabulary


def models(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return run(parser.parse_args(["models", *arguments]))


@pytest.fixture
def tiny(home: Path) -> Path:
    return write_tiny_llama(models_folder() / "Tiny-F16.gguf", layer_count=3)


def test_an_empty_list_says_what_to_do(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert models() == 0
    assert "models fetch" in capsys.readouterr().out


def test_the_list_is_a_table_with_faults_below(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (models_folder() / "broken.gguf").write_bytes(b"GGUF")
    assert models("list") == 0
    head, first, second, _, fault = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "SIZE", "FORMAT", "PARAMETERS", "CONTEXT", "FROM"]
    assert first.split() == ["Tiny-F16", "0", "MB", "F16", "0", "M", "256", "fetched"]
    assert second.split()[0] == "broken"
    assert fault.startswith("broken cannot be used: ")


@pytest.mark.parametrize("arguments", [("--json",), ("list", "--json")])
def test_the_list_as_json(arguments: tuple[str, ...], tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models(*arguments)
    (model,) = json.loads(capsys.readouterr().out)
    assert (model["name"], model["path"], model["layer_count"]) == ("Tiny-F16", str(tiny), 3)


def test_a_present_starter_is_not_fetched_again(home: Path, starter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.link(starter, starter_path())
    assert models("fetch") == 0
    assert capsys.readouterr().out.strip() == str(starter_path())


@pytest.fixture
def office_machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(MachineKind.CPU, 15.5)
    monkeypatch.setattr(models_command, "this_machine", lambda: machine)
    return machine


def test_recommendations_can_be_copied_into_a_shell(
    home: Path, office_machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    models("recommend")
    printed = capsys.readouterr().out
    preset = recommended(office_machine)[0]
    assert f"python launch.py models fetch {preset.target.reference}\n" in printed
    assert "Q4_0 is first choice for a CPU" in printed


def test_recommended_fetches_target_and_drafters(
    home: Path, office_machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []

    def fetch(reference: str, *_: object) -> Path:
        fetched.append(reference)
        return Path(f"{len(fetched)}.gguf")

    monkeypatch.setattr(hub, "fetch", fetch)
    models("fetch", "recommended")
    preset = recommended(office_machine)[0]
    assert fetched == [offer.reference for offer in (preset.target, *preset.drafters)]


def test_a_small_machine_is_told_of_the_starter_alone(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models_command, "this_machine", lambda: Machine(MachineKind.CPU, 2))
    models("recommend")
    assert capsys.readouterr().out == "The starter (`python launch.py models fetch`, 0.1 GB) runs on every machine.\n"


def test_a_stopped_fetch_says_what_is_kept(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(hub, "fetch", stop)
    with pytest.raises(KeyboardInterrupt):
        models("fetch", "a/b")
    assert "the same command goes on from there" in capsys.readouterr().err


def test_all_about_a_model(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models("show", "Tiny-F16", "--json")
    shown = json.loads(capsys.readouterr().out)
    assert (shown["sha256"], shown["layer_count"]) == (hash_file(tiny), 3)
    models("derive", "Tiny-F16", "--drop", "1")
    (copy,) = all_derived()
    note_measurement(copy, agreement=0.75, cost_ratio=0.5)
    capsys.readouterr()
    models("show", copy.name)
    printed = capsys.readouterr().out
    assert "foresees 75% of the target's choices, a pass costs 50% of its" in printed
    assert f"sha256             {copy.sha256}" in printed
    elsewhere = write_tiny_llama(tmp_path / "elsewhere.gguf", layer_count=1)
    models("show", str(elsewhere))
    assert "origin             elsewhere" in capsys.readouterr().out
    (models_folder() / "broken.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match="cut short"):
        models("show", "broken")


def test_what_is_no_repository_is_refused(home: Path) -> None:
    with pytest.raises(SettingError, match="OWNER/REPOSITORY"):
        models("fetch", "nonsense")


def test_a_pairing_explains_itself(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_vocabulary(models_folder() / "target.gguf", token_texts(300), filler_bytes=400_000)
    write_vocabulary(models_folder() / "good.gguf", token_texts(300))
    write_vocabulary(models_folder() / "bad.gguf", token_texts(300)[::-1])
    models("pair", "target")
    printed = capsys.readouterr().out
    assert "fits      good" in printed
    assert "token 5 is 'token5' in the target" in printed
    assert "Without --drafters: ngram, suffix, good" in printed
    assert "  fits: needs " in printed
    models("pair", "target", "--json")
    verdicts = {verdict["name"]: verdict for verdict in json.loads(capsys.readouterr().out)}
    assert {name: verdict["is_compatible"] for name, verdict in verdicts.items()} == {"good": True, "bad": False}


def test_deriving_and_removing(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models("derive", "Tiny-F16", "--drop", "1", "--bits", "q8_0")
    (copy,) = all_derived()
    assert (copy.dropped_layers, copy.quantisation) == ((1,), "Q8_0")
    assert capsys.readouterr().out.strip() == str(copy.path)
    models("remove", copy.name)
    assert all_derived() == ()
    models("remove", "Tiny-F16")
    assert not tiny.exists()
    with pytest.raises(ModelFileError):
        models("remove", "Tiny-F16")


def test_a_search_shows_agreement_and_cost(
    home: Path, starter: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(layer_search, "_TOKENS_EACH", 2)
    monkeypatch.setattr(agreement, "default_threads", lambda: 1)
    monkeypatch.setattr(layer_search, "_candidates", lambda _: iter((17,)))
    models("derive", str(starter), "--search", "--seconds", "60")
    printed = capsys.readouterr()
    (copy,) = all_derived()
    assert printed.out.strip() == str(copy.path)
    assert "1 copies tried (every layer tried)" in printed.err
    assert "without a search without layer 14: agrees " in printed.err
    assert f"agrees {copy.agreement:.0%}" in printed.err
    with pytest.raises(SettingError, match="leave out --drop"):
        models("derive", str(starter), "--search", "--drop", "3")


def test_a_count_without_a_search_is_refused_instead_of_ignored(tiny: Path) -> None:
    with pytest.raises(SettingError, match="add --search"):
        models("derive", "Tiny-F16", "--count", "3")
    assert all_derived() == ()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("pair", ""), "no model is named"),
        (("remove", " "), "no model is named"),
        (("derive", "Tiny-F16", "--search", "--seconds", "-5"), "more than 0, found -5"),
        (("add-folder", __file__), "is a file; add the folder"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_reason(tiny: Path, arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(QuorumError, match=says):
        models(*arguments)


def test_malformed_layers_are_a_usage_error(tiny: Path) -> None:
    with pytest.raises(SystemExit):
        models("derive", "Tiny-F16", "--drop", "1;2")


def test_folders_are_added_and_forgotten_and_their_files_stay(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    mine = write_tiny_llama(shelf / "mine.gguf", layer_count=2)
    models("add-folder", str(shelf))
    assert "1 model file\n" in capsys.readouterr().err
    with pytest.raises(SettingError, match="not Quorum's to delete"):
        models("remove", "mine")
    models("remove", str(shelf))
    models()
    assert "No model is installed" in capsys.readouterr().out
    assert mine.exists()


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_rewrites_a_line_on_a_terminal_and_adds_lines_elsewhere() -> None:
    readings = [Progress("copying", 0, 10**9, 10**7), Progress("copying", 10**9, 10**9), Progress("quantising")]
    terminal, pipe = _Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        with TransferLine(stream) as line:
            for reading in readings:
                line.show(reading)
    assert terminal.getvalue().startswith("\rcopying: 0 % of 1.00 GB, 10 MB/s, 1:40 left\rcopying: 100 % of 1.00 GB ")
    assert terminal.getvalue().endswith("\n\rquantising\n")
    assert pipe.getvalue() == "copying\nquantising\n"
