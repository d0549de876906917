from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from engine.runtime.model import Model
from models import pairing
from models.derive import derive, note_measurement
from models.folders import models_folder
from models.library import add_folder
from models.pairing import choose_drafters, explain, order_reason, pairings, suggest
from models.starter import starter_path
from tests.models.making import token_texts, write_vocabulary

TOKENS = token_texts(300)
GIGABYTE = 2**30


@pytest.fixture
def target(home: Path) -> Path:
    return write_vocabulary(models_folder() / "target.gguf", TOKENS, filler_bytes=400_000)


def drafter(name: str, tokens: list[str] = TOKENS, filler_bytes: int = 0) -> Path:
    return write_vocabulary(models_folder() / f"{name}.gguf", tokens, filler_bytes)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files whose vocabulary was loaded, in order."""
    seen: list[Path] = []

    def counted(path: Path, **settings: Any) -> Model:
        seen.append(path)
        return Model(path, **settings)

    monkeypatch.setattr(pairing, "Model", counted)
    return seen


def test_the_free_drafters_serve_every_target(target: Path) -> None:
    assert choose_drafters(target) == ("ngram", "suffix")
    assert "models derive target.gguf" in suggest(target)


def test_a_target_of_a_known_family_is_told_what_to_fetch(home: Path) -> None:
    target = write_vocabulary(models_folder() / "Qwen3-4B.gguf", TOKENS, filler_bytes=2_000_000)
    assert "models derive" in suggest(target)
    os.truncate(target, 2_000_000_000)
    assert "models fetch unsloth/Qwen3-0.6B-GGUF:Q4_0` gets one" in suggest(target)


def test_the_three_cheapest_that_fit_are_chosen(target: Path) -> None:
    sizes = {"d": 40_000, "b": 20_000, "a": 10_000, "c": 30_000}
    paths = {name: str(drafter(name, filler_bytes=size)) for name, size in sizes.items()}
    drafter("foreign", token_texts(299)[::-1])
    drafter("larger", filler_bytes=500_000)
    assert choose_drafters(target) == ("ngram", "suffix", paths["a"], paths["b"], paths["c"])


def test_a_measured_copy_comes_before_cheaper_models(home: Path, starter: Path) -> None:
    worse, better = derive(starter, (14,)), derive(starter, (13, 14))
    by_size = choose_drafters(starter)
    assert [Path(path) for path in by_size[2:]] == [better.path, worse.path]  # the smaller one first
    assert order_reason(by_size) == f"{better.path.stem} then {worse.path.stem} by size, smallest first"
    assert order_reason(("ngram", "suffix")) == ""
    note_measurement(worse, agreement=0.8, cost_ratio=0.96)
    half_measured = order_reason(choose_drafters(starter))
    assert f"({worse.path.stem} 1.20); then {better.path.stem} by size" in half_measured
    note_measurement(better, agreement=0.4, cost_ratio=0.9)
    assert [Path(path) for path in choose_drafters(starter)[2:]] == [worse.path, better.path]


def test_the_same_model_in_two_places_is_chosen_once(target: Path, tmp_path: Path) -> None:
    first = drafter("first")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "first.gguf").write_bytes(first.read_bytes())
    (tmp_path / "elsewhere" / "target.gguf").write_bytes(target.read_bytes())
    add_folder(tmp_path / "elsewhere")
    assert choose_drafters(target) == ("ngram", "suffix", str(first))


def test_what_finds_no_room_in_memory_is_left_out(target: Path) -> None:
    drafter("small")
    assert len(choose_drafters(target, free_bytes=8 * GIGABYTE)) == 3
    assert choose_drafters(target, free_bytes=0) == ("ngram", "suffix")


@pytest.mark.parametrize(
    ("tokens", "adds_bos", "tokenizer", "rule"),
    [
        (
            [*TOKENS[:7], "other", *TOKENS[8:]],
            False,
            "gpt2",
            "token 7 is 'token7' in the target and 'other' in the dra",
        ),
        (TOKENS, True, "gpt2", "one adds a BOS token and the other does not"),
        (TOKENS, False, "llama", "tokenizer types differ (target byte-level BPE, drafter SentencePiece)"),
        (token_texts(300 + 129), False, "gpt2", "sizes differ by more than 128 (target 300, drafter 429)"),
    ],
    ids=["text", "flag", "type", "size"],
)
def test_a_refusal_names_its_rule_and_what_would_fit(
    target: Path, tokens: list[str], adds_bos: bool, tokenizer: str, rule: str
) -> None:
    drafter("good")
    bad = write_vocabulary(models_folder() / "bad.gguf", tokens, adds_bos=adds_bos, tokenizer=tokenizer)
    verdict = explain(target, bad)
    assert not verdict.is_compatible
    assert rule in verdict.reason
    assert verdict.suggestion == "good can draft for this target"


def test_a_refusal_of_special_tokens_names_both_texts(home: Path) -> None:
    target = write_vocabulary(models_folder() / "target.gguf", TOKENS, filler_bytes=400_000, adds_bos=True)
    bad = write_vocabulary(models_folder() / "bad.gguf", TOKENS, adds_bos=True, bos=1)
    assert "BOS tokens differ (target 0 '<|start|>', drafter 1 '<|end|>')" in explain(target, bad).reason


def test_a_padded_vocabulary_is_accepted(target: Path) -> None:
    assert explain(target, drafter("padded", token_texts(300 + 128))).is_worth_choosing


def test_special_tokens_spelled_differently_are_accepted(target: Path) -> None:
    assert explain(target, drafter("renamed", ["<|bos|>", "<|eos|>", *TOKENS[2:]])).is_compatible


def test_a_larger_file_is_compatible_with_a_caution(target: Path) -> None:
    verdict = explain(target, drafter("larger", filler_bytes=500_000))
    assert verdict.is_compatible
    assert not verdict.is_worth_choosing
    assert "no smaller than the target" in verdict.caution
    assert "is the target itself" in explain(target, target).caution


def test_a_file_that_cannot_be_read_is_explained(target: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"PK")
    assert "not a GGUF file" in explain(target, broken).reason
    assert "no such model file" in explain(target, tmp_path / "missing.gguf").reason


def test_verdicts_on_all_put_the_good_first(target: Path) -> None:
    drafter("good")
    drafter("bad", token_texts(299)[::-1])
    drafter("large", filler_bytes=500_000)
    (models_folder() / "broken.gguf").write_bytes(b"GGUF")
    verdicts = {verdict.name: verdict for verdict in pairings(target)}
    assert list(verdicts) == ["good", "target", "large", "bad", "broken"]
    assert verdicts["good"].suggestion == ""
    assert all(verdict.suggestion for name, verdict in verdicts.items() if name != "good")
    assert "cut short" in verdicts["broken"].reason


def test_a_verdict_is_remembered_until_a_file_changes(target: Path, loads: list[Path]) -> None:
    candidate = drafter("candidate")
    assert explain(target, candidate).is_compatible
    assert loads == [target, candidate]
    assert explain(target, candidate).is_compatible
    assert loads == [target, candidate]
    changed = drafter("changed", [*TOKENS[:7], "other", *TOKENS[8:]])
    os.replace(changed, candidate)
    assert "token 7" in explain(target, candidate).reason
    write_vocabulary(target, [*TOKENS[:7], "other", *TOKENS[8:]], filler_bytes=400_000)
    assert explain(target, candidate).is_compatible
    assert loads == [target, candidate] * 3


def test_a_damaged_memory_of_verdicts_only_costs_time(target: Path, home: Path, loads: list[Path]) -> None:
    candidate = drafter("candidate")
    for content in ("[", "[]", '{"a": 1}'):
        (home / "cache" / "pairs.json").write_text(content)
        assert explain(target, candidate).is_compatible
    assert loads == [target, candidate] * 3


def test_a_derived_copy_of_the_starter_drafts_for_it(home: Path, starter: Path) -> None:
    os.link(starter, starter_path())
    copy = derive(starter_path(), [14])
    assert choose_drafters(starter_path()) == ("ngram", "suffix", str(copy.path))
