"""Acceptance, learnt from verdicts."""

from __future__ import annotations

import pytest

from engine.acceptance import MEAN_PRIOR, AcceptanceModel
from engine.types import VotedDraft

MODELS = ("a", "b")


def draft(*probabilities: float, winner: str = "a", agreement: float = 1.0, proposers: int = 1) -> VotedDraft:
    count = len(probabilities)
    names = (("a", "b", "c")[:proposers],) * count
    return VotedDraft((1,) * count, probabilities, (agreement,) * count, names, winner)


def test_before_anything_is_learnt_confidence_and_harmony_count() -> None:
    model = AcceptanceModel([])
    assert model.token("a", 0.95, 1.0, 1) > model.token("a", 0.3, 1.0, 1)
    assert model.token("a", 0.6, 1.0, 2) > model.token("a", 0.6, 1.0, 1) > model.token("a", 0.6, 0.5, 2)
    assert model.mean(MODELS) == MEAN_PRIOR


def test_verdicts_move_the_estimate_of_their_own_kind_only() -> None:
    model = AcceptanceModel(["ngram"])
    others = {
        "less sure": ("a", 0.55, 1.0, 1),
        "contested": ("a", 0.95, 0.6, 2),
        "looked up": ("ngram", 0.95, 1.0, 1),
    }
    before = {name: model.token(*kind) for name, kind in others.items()}
    for _ in range(400):
        model.learn(("a",), draft(0.95), 1, 0)
    assert model.token("a", 0.95, 1.0, 1) < 0.01
    assert {name: model.token(*kind) for name, kind in others.items()} == before


def test_the_truth_is_found_and_a_change_is_followed() -> None:
    model = AcceptanceModel([])
    for step in range(400):
        model.learn(("a",), draft(0.7), 1, int(step % 4 > 0))
    assert model.token("a", 0.7, 1.0, 1) == pytest.approx(0.75, abs=0.05)
    assert model.mean(("a",)) == pytest.approx(0.75, abs=0.06)
    for _ in range(100):
        model.learn(("a",), draft(0.7), 1, 0)
    assert model.token("a", 0.7, 1.0, 1) < 0.2
    assert model.mean(("a",)) < 0.1


def test_what_comes_after_the_first_rejection_was_never_judged() -> None:
    model, reference = AcceptanceModel([]), AcceptanceModel([])
    model.learn(("a",), draft(0.9, 0.6, 0.3, 0.1), 4, 1)
    reference.learn(("a",), draft(0.9, 0.6), 2, 1)
    for confidence in (0.9, 0.6, 0.3, 0.1):
        assert model.token("a", confidence, 1.0, 1) == reference.token("a", confidence, 1.0, 1)
    assert model.mean(("a",)) == reference.mean(("a",))


def test_trimmed_tokens_and_empty_steps_teach_nothing() -> None:
    model = AcceptanceModel([])
    before = model.token("a", 0.9, 1.0, 1)
    model.learn(("a",), draft(0.9, 0.9), 0, 0)
    model.learn((), VotedDraft(), 0, 0)
    assert model.token("a", 0.9, 1.0, 1) == before
    assert model.mean(("a",)) == MEAN_PRIOR


def test_a_draft_that_no_model_took_part_in_says_nothing_about_models() -> None:
    model = AcceptanceModel(["ngram"])
    model.learn((), draft(0.9, winner="ngram"), 1, 0)
    assert model.mean(("a",)) == MEAN_PRIOR
    assert model.token("ngram", 0.9, 1.0, 1) < AcceptanceModel(["ngram"]).token("ngram", 0.9, 1.0, 1)


def test_a_voted_draft_is_estimated_token_by_token() -> None:
    model = AcceptanceModel([])
    voted = VotedDraft((1, 2), (0.9, 0.4), (1.0, 0.5), (("a", "b"), ("a",)), "a")
    assert model.voted(voted) == [model.token("a", 0.9, 1.0, 2), model.token("a", 0.4, 0.5, 1)]
