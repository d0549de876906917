"""`launch.py verify-lossless`: its verdict, its report and its exit code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from app.bench.prompts import Prompt, read_prompts
from app.cli import main
from app.verification import after_earlier_turns, spread
from app.verify_command import EXIT_DIVERGED
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


def test_questions_come_after_earlier_turns_by_turns() -> None:
    known = read_prompts()

    def length(prompt: Prompt) -> int:
        return sum(len(message.content.split()) for message in prompt.messages)

    longer = after_earlier_turns(known[:6], known, (0, 90, 400), length)
    for place, (before, after) in enumerate(zip(known[:6], longer, strict=True)):
        assert after.messages[-len(before.messages) :] == before.messages
        assert (after.id, after.category) == (before.id, before.category)
        assert (after.messages == before.messages) is (place % 3 == 0)
        assert length(after) >= (0, 90, 400)[place % 3]
        roles = [message.role for message in after.messages]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
        assert before.messages[-1] not in after.messages[:-1]
    assert longer[1].messages[0] != longer[2].messages[0] != longer[4].messages[0]


def test_long_conversations_are_verified(prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = {"id": "rivers", "category": "list", "prompt": "Name three rivers, and write about each of them. " * 12}
    prompts.write_text(prompts.read_text() + "\n" + json.dumps(more), encoding="utf-8")
    given = [
        *QUICK,
        "--prompts",
        str(prompts),
        "--max-tokens",
        "12",
        "--policy",
        "fixed:3",
        "--after",
        "600,0",
        "--json",
    ]
    digests = set()
    for _ in range(2):
        assert main(given) == 0
        document = json.loads(capsys.readouterr().out)
        digests.add(document["plain_digest"])
    assert len(digests) == 1
    assert document["longest_position"] > 600
    assert sorted({one["prompt_tokens"] > 600 for one in document["comparisons"]}) == [False, True]
    assert document["exactness"]["badge"].startswith(("exact", "no batch", "not compared"))
