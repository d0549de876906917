"""Requests at once against one after another, on the real starter: what is written and what it adds up to."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from app.bench.prompts import first_of_each, read_prompts
from app.cli import main
from tests.bench import fake_server

PROMPTS = [
    {"id": "birds", "category": "chat", "prompt": "Name a few birds and say where they live."},
    {"id": "more-birds", "category": "chat", "prompt": "Name some more birds."},
    {"id": "river", "category": "story", "prompt": "Begin a story about a river."},
]


@pytest.fixture(scope="module")
def document(starter: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("concurrent")
    prompts, result = folder / "own.jsonl", folder / "result.json"
    prompts.write_text("".join(f"{json.dumps(prompt)}\n" for prompt in PROMPTS), encoding="utf-8")
    command = f"bench --target {starter} --prompts {prompts} --threads 1 --ctx 512 --concurrent 1,3 --repeat 2 "
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUORUM_HOME", str(folder))
        assert main([*command.split(), "--max-tokens", "12", "--json", str(result)]) == 0
    return json.loads(result.read_text(encoding="utf-8"))


def test_every_concurrency_is_measured_in_every_round(document: Any) -> None:
    assert document["complete"]
    assert [(row["concurrency"], row["round"]) for row in document["rows"]] == [(1, 1), (1, 2), (3, 1), (3, 2)]
    assert [entry["concurrency"] for entry in document["summary"]] == [1, 3]


def test_answers_are_those_of_sessions(document: Any) -> None:
    for row in document["rows"]:
        assert row["identical"] == len(PROMPTS)
        assert row["differing"] == []
        assert row["tokens"] == row["sequential_tokens"] == row["plain_tokens"]


def test_batches_are_as_large_as_was_asked_for(document: Any) -> None:
    alone, together = (row for row in document["rows"] if row["round"] == 1)
    assert alone["mean_batch"] == 1
    assert together["mean_batch"] > 1.5
    assert together["passes"] < alone["passes"]
    assert (len(alone["equal_ms"]), len(together["equal_ms"])) == (1, 3)
    assert set(together["parts_ms"]) == {"prefill", "draft", "verify", "sample", "other"}


def test_a_limit_takes_the_first_prompts_of_each_category() -> None:
    known = read_prompts()
    firsts = first_of_each(known, 1)
    assert len(firsts) == len({prompt.category for prompt in known})
    assert first_of_each(known, None) == known


@pytest.mark.parametrize("option", ["--concurrent=0", "--concurrent=1,x", "--concurrent=", "--overlap=on,maybe"])
def test_a_list_that_is_none_is_refused(option: str) -> None:
    with pytest.raises(SystemExit):
        main(["bench", option])


def test_ways_to_overlap_take_turns(
    starter: Path, draft_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are held against the same answers one after another; only the one overlaps."""
    prompts, result = tmp_path / "own.jsonl", tmp_path / "result.json"
    prompts.write_text("".join(f"{json.dumps(prompt)}\n" for prompt in PROMPTS), encoding="utf-8")
    monkeypatch.setenv("QUORUM_HOME", str(tmp_path))
    files = f"--target {starter} --drafters {draft_models['no-layer-14']} --prompts {prompts}"
    command = f"bench {files} --threads 1 --ctx 512 --concurrent 3 --overlap on,off --configs fixed:2 --repeat 2"
    assert main([*command.split(), "--max-tokens", "12", "--json", str(result)]) == 0
    rows = json.loads(result.read_text(encoding="utf-8"))["rows"]
    names = ["fixed:2, overlap on", "fixed:2, overlap off"]
    assert [(row["configuration"], row["round"]) for row in rows] == [(name, turn) for turn in (1, 2) for name in names]
    assert {row["identical"] for row in rows} == {len(PROMPTS)}
    for overlapped, in_turn in (rows[:2], rows[2:]):
        assert overlapped["sequential_ms"] == in_turn["sequential_ms"]
        assert overlapped["overlapped"] > 0
        assert in_turn["overlapped"] == 0


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in is started by its first line")
def test_a_peer_is_asked_for_as_many_at_once(
    starter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It answers none before three have come."""
    prompts, result, notes = tmp_path / "own.jsonl", tmp_path / "result.json", tmp_path / "notes.jsonl"
    prompts.write_text("".join(f"{json.dumps(prompt)}\n" for prompt in PROMPTS), encoding="utf-8")
    monkeypatch.setenv("QUORUM_HOME", str(tmp_path))
    monkeypatch.setenv("FAKE_SERVER_NOTES", str(notes))
    monkeypatch.setenv("FAKE_SERVER_AT_ONCE", "3")
    command = f"bench --target {starter} --drafters ngram --prompts {prompts} --threads 1 --ctx 512 --concurrent 3 "
    peer = f"--repeat 1 --max-tokens 8 --json {result} --peer llama-server={fake_server.written_to(tmp_path)}"
    assert main([*command.split(), *peer.split()]) == 0
    rows = json.loads(result.read_text(encoding="utf-8"))["peer_rows"]
    assert [row["setting"] for row in rows] == ["llama-server plain", "llama-server ngram-mod"]
    assert {(row["concurrency"], row["round"], row["tokens"], row["accepted"]) for row in rows} == {(3, 1, 12, 6)}
    asked = [json.loads(line) for line in notes.read_text(encoding="utf-8").splitlines()]
    assert len(asked) == 2 * (3 + 3)  # a warm-up of three for each server
    given = asked[0]["arguments"]
    assert given[given.index("--parallel") + 1] == "3"
    assert int(given[given.index("--ctx-size") + 1]) == 3 * 256
    assert "auto, 3 at once, against llama-server" in capsys.readouterr().out
