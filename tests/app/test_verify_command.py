"""`launch.py verify-lossless`: its verdict, its report and its exit code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from app.bench.prompts import Prompt, read_prompts
from app.cli import main
from app.verify_command import EXIT_DIVERGED, spread
from engine.runtime.context import Context
from engine.runtime.sampler import Sampler

QUICK = ["verify-lossless", "--drafters", "ngram,suffix", "--threads", "1", "--ctx", "1024"]
COUNTING = "Go on with the list: one two three four one two three five one two three six one two three"


@pytest.fixture(autouse=True)
def _use_home(starter_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUORUM_HOME", str(starter_home))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"id": "counting", "category": "list", "prompt": COUNTING}), encoding="utf-8")
    return path


def test_the_real_program_passes(prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--prompts", str(prompts), "--max-tokens", "24", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["identical"] is True
    assert document["divergences"] == []
    assert document["answers"] == len(document["comparisons"]) == 2 * 3
    assert {(one["sampling"], one["policy"]) for one in document["comparisons"]} == {
        (sampling, policy)
        for sampling in ("greedy", "temperature 0.8, seed 1")
        for policy in ("auto", "fixed:3", "fixed:7")
    }
    assert document["compared_tokens"] == sum(one["compared_tokens"] for one in document["comparisons"]) > 0
    assert document["verified"] >= document["accepted"] > 0
    assert len(document["distinct_4gram"]) == 2


def test_a_divergence_is_told_and_is_exit_code_1(
    prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    match = Sampler.match

    def credulous(self: Sampler, context: Context, draft: Sequence[int], first_output: int) -> tuple[int, int]:
        accepted, final = match(self, context, draft, first_output)
        return (accepted + 1, final) if accepted < len(draft) else (accepted, final)

    monkeypatch.setattr(Sampler, "match", credulous)
    given = [*QUICK, "--prompts", str(prompts), "--max-tokens", "24", "--policy", "fixed:3"]
    assert main(given) == EXIT_DIVERGED
    printed = capsys.readouterr().out
    assert printed.startswith("DIFFERENT: ")
    assert "counting, greedy, fixed:3: differs first at token " in printed
    assert "where the target's two best tokens were " in printed


def test_without_drafts_it_says_that_it_shows_nothing(prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--prompts", str(prompts), "--max-tokens", "4", "--policy", "off"]) == 0
    assert "Nothing was drafted" in capsys.readouterr().out


def test_what_is_wrong_is_told_before_anything_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--prompts", "no/such/file.jsonl"]) == 2
    assert "no/such/file.jsonl" in capsys.readouterr().err
    assert main([*QUICK, "--max-tokens", "1000"]) == 2
    assert "leaves room for 24 beside the answer" in capsys.readouterr().err


def test_prompts_are_taken_from_all_over_the_file() -> None:
    known = read_prompts()
    chosen = spread(known, 8)
    assert {prompt.category for prompt in chosen} == {prompt.category for prompt in known}
    assert spread(known, 10_000) == known
    one = (Prompt("a", "b", known[0].messages),)
    assert spread(one, 3) == one
