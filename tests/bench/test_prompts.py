"""The prompts that come with the program keep what the benchmark promises about them; a user's file is checked."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from app.bench.prompts import Half, choose_prompts, read_prompts
from engine.errors import SettingError

CATEGORIES = {"chat", "code", "rewrite", "summarise", "structured", "story", "question", "multi-turn"}


def write(path: Path, *documents: object) -> Path:
    path.write_text("".join(f"{json.dumps(document)}\n" for document in documents), encoding="utf-8")
    return path


def test_shipped_prompts_are_many_varied_and_split() -> None:
    prompts = read_prompts()
    counts = Counter(prompt.category for prompt in prompts)
    assert set(counts) == CATEGORIES
    assert min(counts.values()) >= 7
    by_half = Counter((prompt.category, prompt.half) for prompt in prompts)
    # About half of the answers of a small model loop and count in no figure.
    assert all(by_half[category, Half.REPORT] >= 6 for category in CATEGORIES)
    assert all(by_half[category, Half.TUNE] >= 4 for category in CATEGORIES)


def test_few_shipped_prompts_are_copied_from() -> None:
    prompts = read_prompts()
    assert 0 < sum(prompt.copies for prompt in prompts) <= 0.4 * len(prompts)
    report = [prompt for prompt in prompts if prompt.half is Half.REPORT]
    assert sum(prompt.copies for prompt in report) <= 0.4 * len(report)


def test_shipped_conversations_carry_earlier_answers() -> None:
    for prompt in read_prompts():
        roles = [message.role for message in prompt.messages]
        assert ("assistant" in roles) == (prompt.category == "multi-turn")


def test_half_is_fixed_by_the_id() -> None:
    """These two must never move: figures are compared across releases."""
    halves = {prompt.id: prompt.half for prompt in read_prompts()}
    assert halves["chat-red-sunset"] is Half.REPORT
    assert halves["chat-neighbour-drums"] is Half.TUNE


def test_halves_make_up_the_whole() -> None:
    prompts = read_prompts()
    halves = [choose_prompts(prompts, half) for half in (Half.TUNE, Half.REPORT)]
    assert {prompt.id for half in halves for prompt in half} == {prompt.id for prompt in prompts}
    assert sum(map(len, halves)) == len(choose_prompts(prompts, Half.ALL))


def test_categories_choose() -> None:
    chosen = choose_prompts(read_prompts(), Half.ALL, ["story", "code"])
    assert {prompt.category for prompt in chosen} == {"story", "code"}
    # Category by category, whatever the order of the file.
    assert [prompt.category for prompt in chosen] == sorted(prompt.category for prompt in chosen)


def test_unknown_category_names_the_known_ones() -> None:
    with pytest.raises(SettingError, match=r"'poetry'; there are chat, "):
        choose_prompts(read_prompts(), Half.ALL, ["poetry"])


def test_reads_a_file_of_the_users_own(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    path = write(
        tmp_path / "own.jsonl",
        {"id": "a", "category": "one", "prompt": "Say hello."},
        {"id": "b", "category": "two", "messages": [*turns, {"role": "user", "content": "Bye"}], "copies": True},
    )
    first, second = read_prompts(path)
    assert [message.content for message in first.messages] == ["Say hello."]
    assert [message.role for message in second.messages] == ["user", "assistant", "user"]
    assert (first.copies, second.copies) == (False, True)


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        ([], "not a JSON object"),
        ({"category": "one", "prompt": "x"}, "'id' must be a text"),
        ({"id": "a", "category": " ", "prompt": "x"}, "'category' must be a text"),
        ({"id": "a", "category": "one"}, "give either 'prompt' or 'messages'"),
        ({"id": "a", "category": "one", "prompt": "x", "messages": []}, "give either 'prompt' or 'messages'"),
        ({"id": "a", "category": "one", "messages": []}, "'messages' must be a list"),
        ({"id": "a", "category": "one", "messages": [{"role": "wizard", "content": "x"}]}, "needs a 'role'"),
        ({"id": "a", "category": "one", "messages": [{"role": "assistant", "content": "x"}]}, "must be the user's"),
        ({"id": "a", "category": "one", "prompt": "  "}, "not empty"),
    ],
)
def test_refuses_a_line_that_is_no_prompt(tmp_path: Path, document: object, fault: str) -> None:
    path = write(tmp_path / "own.jsonl", {"id": "good", "category": "one", "prompt": "x"}, document)
    with pytest.raises(SettingError, match=f"own.jsonl, line 2: .*{fault}"):
        read_prompts(path)


def test_refuses_an_id_twice_no_json_and_no_file(tmp_path: Path) -> None:
    twice = {"id": "a", "category": "one", "prompt": "x"}
    with pytest.raises(SettingError, match="line 2: the id 'a' is already taken"):
        read_prompts(write(tmp_path / "twice.jsonl", twice, twice))
    (tmp_path / "text.jsonl").write_text("Say hello.\n", encoding="utf-8")
    with pytest.raises(SettingError, match=r"text.jsonl, line 1"):
        read_prompts(tmp_path / "text.jsonl")
    with pytest.raises(SettingError, match="cannot read the prompts"):
        read_prompts(tmp_path / "absent.jsonl")
