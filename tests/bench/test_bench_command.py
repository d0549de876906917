"""Whole runs on the real starter: what they write, and what is left when they are ended."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from app import bench_command
from app.bench.journal import journal_path
from app.bench.row import Row
from app.cli import main
from models.expand import Fixtures
from models.progress import Progress, Report, stop_if_asked
from tests.bench import fake_server

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 240.0
PROMPTS = [
    {"id": "birds", "category": "chat", "prompt": "Name a few birds and say where they live."},
    {"id": "river", "category": "story", "prompt": "Begin a story about a river."},
]


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folders of our own; this machine is measured once for all runs here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUORUM_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "own.jsonl"
    path.write_text("".join(f"{json.dumps(prompt)}\n" for prompt in PROMPTS), encoding="utf-8")
    return path


def arguments(starter: Path, prompts: Path, *more: object) -> list[str]:
    fixed = ("bench", "--target", starter, "--prompts", prompts, "--threads", 1, "--ctx", 512)
    return [str(argument) for argument in (*fixed, *more)]


class Finished:
    """A run's exit code, and what it printed and wrote."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        self.json, self.csv, self.plot = folder / "out.json", folder / "out.csv", folder / "out.png"
        out, err = io.StringIO(), io.StringIO()
        results = ["--json", str(self.json), "--csv", str(self.csv), "--plot", str(self.plot)]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            self.code = main([*command, *results])
        self.out, self.err = out.getvalue(), err.getvalue()

    @property
    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.json.read_text(encoding="utf-8"))
        return document


@pytest.fixture(scope="module")
def run(
    starter: Path, draft_models: dict[str, Path], prompts: Path, tmp_path_factory: pytest.TempPathFactory
) -> Finished:
    """Two rounds of four configurations on two loaded sets, one of them with a draft model."""
    drafters = f"ngram,{draft_models['no-layer-14']}"
    configs = "auto;fixed:3,drafters=no-layer-14;fixed:2,exactness=fast,drafters=ngram"
    return Finished(
        tmp_path_factory.mktemp("run"),
        arguments(
            *(starter, prompts, "--drafters", drafters, "--configs", configs),
            *("--repeat", 2, "--max-tokens", 20, "--ceiling"),
        ),
    )


def test_every_configuration_answers_every_prompt_in_every_round(run: Finished) -> None:
    assert run.code == 0
    rows = run.document["rows"]
    assert Counter(row["config"] for row in rows) == {
        "plain": 4,
        "auto": 4,
        "fixed:3,drafters=no-layer-14": 4,
        "plain,exactness=fast": 4,
        "fixed:2,exactness=fast,drafters=ngram": 4,
    }
    assert len({(row["prompt_id"], row["config"], row["round"]) for row in rows}) == len(rows)
    assert {row["round"] for row in rows} == {1, 2}


def test_drafting_changes_no_answer(run: Finished) -> None:
    rows = run.document["rows"]
    assert all(row["identical_to_plain"] for row in rows if "fast" not in row["config"])
    assert sum(row["accepted"] for row in rows if row["config"].startswith("fixed:3")) > 0


def test_rows_have_the_promised_fields(run: Finished) -> None:
    promised = {
        *("prompt_id", "category", "config", "round", "tokens", "seconds", "tokens_per_second", "ratio_to_plain"),
        *("identical_to_plain", "distinct_4gram", "prefill_seconds", "time_to_first_token_seconds", "decode_seconds"),
        *("total_seconds", "verify_passes", "proposed", "drafted", "verified", "accepted", "mean_accepted_length"),
        *("acceptance_by_position", "agreement", "length_histogram", "time_split_seconds", "look_ahead_hits"),
        "peak_memory_bytes",
    }
    for row in run.document["rows"]:
        assert promised <= set(row)
        assert row["seconds"] == row["decode_seconds"]
        assert set(row["time_split_seconds"]) == {"plan", "draft", "vote", "verify", "sample", "other"}
        assert row["ratio_to_plain"] is not None
        assert row["peak_memory_bytes"] > 90e6


def test_the_document_names_what_it_depends_on(run: Finished) -> None:
    document = run.document
    assert {"machine", "models", "rows", "summary"} <= set(document)
    assert document["complete"] is True
    assert document["machine"]["threads"] == 1
    target, drafters = document["models"]["target"], document["models"]["drafters"]
    assert target["sha256"] == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert [drafter["name"] for drafter in drafters] == ["ngram", "no-layer-14"]
    kv = document["models"]["kv"]
    assert (kv["target"], kv["drafters"]) == ("BF16_F16, then F16", "F16")
    assert kv["exactness"].endswith(", then not compared: F16 cache")
    assert document["ceiling"]["ratio"] >= 1
    assert {row["config"] for row in document["warm_up"]} == {row["config"] for row in document["rows"]}
    summary = {config["config"]: config for config in document["summary"]["configs"]}
    assert set(summary["auto"]["ratio"]["by_category"]) == {"chat", "story"}
    assert {"value", "low", "high"} <= set(summary["auto"]["ratio"]["overall"])


def test_the_csv_has_a_line_for_each_row(run: Finished) -> None:
    lines = list(csv.DictReader(run.csv.read_text(encoding="utf-8").splitlines()))
    rows = run.document["rows"]
    assert list(lines[0]) == list(Row.__dataclass_fields__)
    assert [(line["prompt_id"], line["config"], line["tokens"]) for line in lines] == [
        (row["prompt_id"], row["config"], str(row["tokens"])) for row in rows
    ]
    drafted = next(line for line in lines if line["config"].startswith("fixed:3"))
    assert all(":" in entry for entry in drafted["length_histogram"].split())


def test_the_table_goes_to_output_and_progress_does_not(run: Finished) -> None:
    assert "Speed against plain" in run.out
    assert "sha256 b179c9523d0e" in run.out
    assert "Ceiling: " in run.out
    assert "function-preserving" not in run.out
    assert "[20/20] round 2/2" in run.err
    assert "round" not in run.out.replace("2 rounds", "")


def test_the_plot_is_a_picture_and_nothing_unfinished_is_left(run: Finished) -> None:
    assert run.plot.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in run.json.parent.iterdir()) == ["out.csv", "out.json", "out.png"]


def test_a_loop_is_answered_once_and_its_place_filled(
    starter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first prompt makes the starter repeat itself from its second line on."""
    line = "All work and no play makes Jack a dull boy."
    loop = f"Copy this page to the end.\n\n{chr(10).join([line] * 12)}"
    own = tmp_path / "own.jsonl"
    documents = [{"id": "loop", "category": "chat", "prompt": loop}, *PROMPTS]
    documents.append({"id": "spare", "category": "chat", "prompt": "What is a river delta?"})
    own.write_text("".join(f"{json.dumps(document)}\n" for document in documents), encoding="utf-8")
    options = ("--drafters", "ngram", "--repeat", 2, "--max-tokens", 48, "--limit-per-category", 1)
    finished = Finished(tmp_path, arguments(starter, own, *options))
    assert finished.code == 0
    document = finished.document
    assert Counter((row["prompt_id"], row["config"]) for row in document["rows"]) == {
        ("loop", "plain"): 1,
        **{(name, config): 2 for name in ("birds", "river") for config in ("plain", "auto")},
    }
    assert document["prompts"]["count"] == 2
    assert [loop["prompt_id"] for loop in document["summary"]["loops"]] == ["loop"]


def test_a_recording_is_replayed_without_a_model(
    starter: Path, draft_models: dict[str, Path], prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recording.json"
    drafters = f"{draft_models['no-layer-14']},ngram"
    assert main(arguments(starter, prompts, "--drafters", drafters, "--max-tokens", 24, "--record", path)) == 0
    assert "2 answers, no-layer-14, ngram" in capsys.readouterr().out
    replayed = Finished(tmp_path, ["bench", "--replay", str(path), "--configs", "auto,fixed:2"])
    assert replayed.code == 0
    assert "replayed from a recording" in replayed.out
    assert Counter(row["config"] for row in replayed.document["rows"]) == {"plain": 2, "auto": 2, "fixed:2": 2}
    assert replayed.document["models"]["target"]["sha256"].startswith("b179c952")
    assert replayed.document["costs"]["pass_ms"]["1"] > 0


def start(command: list[str], result: Path) -> subprocess.Popen[str]:
    """A run in a process of its own, which has finished a row or two."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        [sys.executable, str(REPOSITORY / "launch.py"), *command, "--json", str(result)],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"the run ended by itself: {process.communicate()}")
        with contextlib.suppress(OSError):
            if len(journal_path(result).read_text(encoding="utf-8").splitlines()) >= 3:
                return process
        time.sleep(0.05)
    process.kill()
    raise AssertionError("the run finished no row")


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_a_killed_run_resumes_where_it_was(starter: Path, prompts: Path, tmp_path: Path) -> None:
    command = arguments(starter, prompts, "--drafters", "ngram", "--repeat", 6, "--max-tokens", 60)
    result = tmp_path / "out.json"
    process = start(command, result)
    process.kill()
    process.communicate()
    kept = [json.loads(line) for line in journal_path(result).read_text(encoding="utf-8").split("\n")[1:-1]]
    assert len(kept) >= 2
    assert not result.exists()
    resumed = Finished(tmp_path, [*command, "--resume"])
    assert resumed.code == 0
    rows = resumed.document["rows"]
    assert len(rows) == 2 * 6 * 2
    assert [row["seconds"] for row in rows[: len(kept)]] == [row["seconds"] for row in kept]
    assert len({(row["prompt_id"], row["config"], row["round"]) for row in rows}) == len(rows)
    assert not journal_path(result).exists()


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_ctrl_c_keeps_what_was_finished(starter: Path, prompts: Path, tmp_path: Path) -> None:
    command = arguments(starter, prompts, "--drafters", "ngram", "--repeat", 50, "--max-tokens", 60)
    result = tmp_path / "out.json"
    process = start(command, result)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    document = json.loads(result.read_text(encoding="utf-8"))
    assert document["complete"] is False
    assert 2 <= len(document["rows"]) < 200
    assert len(journal_path(result).read_text(encoding="utf-8").splitlines()) == 1 + len(document["rows"])
    assert "interrupted" in out


def test_an_unfinished_run_is_not_overwritten(
    starter: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal_path(tmp_path / "out.json").write_text("{}\n", encoding="utf-8")
    command = arguments(starter, prompts, "--drafters", "ngram", "--json", tmp_path / "out.json")
    assert main(command) == 2
    assert "--resume" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in is started by its first line")
def test_a_peer_stands_in_the_same_table(
    starter: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = fake_server.written_to(tmp_path)
    notes = tmp_path / "notes.jsonl"
    monkeypatch.setenv("FAKE_SERVER_NOTES", str(notes))
    peer = f"llama-server={program}"
    finished = Finished(
        tmp_path,
        arguments(starter, prompts, "--drafters", "ngram", "--repeat", 2, "--max-tokens", 8, "--peer", peer),
    )
    assert finished.code == 0
    document = finished.document
    theirs = [row for row in document["rows"] if row["config"].startswith("llama-server")]
    assert Counter((row["config"], row["round"]) for row in theirs) == {
        (f"llama-server {name}", number): 2 for name in ("plain", "ngram-mod") for number in (1, 2)
    }
    assert {row["tokens_per_second"] for row in theirs} == {10.0}
    assert {row["identical_to_plain"] for row in theirs} == {False}
    assert document["models"]["peer"]["version"].startswith("version: 1.2.3")
    assert document["models"]["peer"]["kv_type"] == "f16"
    assert "llama-server draft-simple n-max 3" in document["models"]["peer"]["left_out"]
    assert set(document["summary"]["peer"]["against_best"]) == {"plain", "auto"}
    assert "Speed against llama-server" in finished.out
    asked = [json.loads(line) for line in notes.read_text(encoding="utf-8").splitlines()]
    assert len(asked) == 2 * 2 * (1 + 2)  # a warm-up for each server
    assert len({json.dumps(note["request"]["prompt"]) for note in asked}) == 3


def test_ctrl_c_ends_the_building_of_fixtures(
    starter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the first sign of progress; what that leaves behind is the builder's own affair."""

    def build(directory: Path, source: Path, report: Report, *, cancel: threading.Event) -> Fixtures:
        assert (directory, source) == (tmp_path / "fixtures", starter)
        report(Progress("writing"))
        os.kill(os.getpid(), signal.SIGINT)
        stop_if_asked(cancel, "building")
        raise AssertionError("it was not told to stop")

    monkeypatch.setattr(bench_command, "fetch_starter", lambda _report, _cancel: starter)
    monkeypatch.setattr(bench_command, "build_fixtures", build)
    assert main(["bench", "--build-fixtures", str(tmp_path / "fixtures")]) == 130
    assert capsys.readouterr().out == ""


def test_built_fixtures_are_named(
    starter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Fixtures({"target-1b": tmp_path / "target-1b.gguf"}, {"drafter-q2k": tmp_path / "drafter-q2k.gguf"})
    monkeypatch.setattr(bench_command, "fetch_starter", lambda _report, _cancel: starter)
    monkeypatch.setattr(bench_command, "build_fixtures", lambda _directory, _starter, _report, cancel: made)
    assert main(["bench", "--build-fixtures", str(tmp_path)]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "target-1b.gguf"), str(tmp_path / "drafter-q2k.gguf")]


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--configs", "turbo"], "unknown policy"),
        (["--peer", "vllm=/bin/true"], "--peer takes llama-server=PATH"),
        (["--temperature", "9"], "temperature"),
        (["--categories", "poetry"], "no prompt has the category"),
        (["--resume"], "--json OUT or --csv OUT"),
        (["--max-tokens", "600"], "leaves room"),
        (["--record", "x", "--temperature", "0.8"], "leave --temperature at 0"),
        (["--replay", "/nowhere"], "no recording"),
        (["--configs", "auto,drafters=nobody"], "nobody"),
    ],
)
def test_faults_are_named(
    starter: Path, prompts: Path, options: list[str], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(starter, prompts, "--drafters", "ngram", *options)) == 2
    assert fault in capsys.readouterr().err
