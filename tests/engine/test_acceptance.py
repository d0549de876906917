"""Acceptance, learnt from verdicts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.acceptance import MEAN_PRIOR, SET_GAIN, AcceptanceModel, HeardStore
from engine.drafters.base import Score
from engine.types import VotedDraft

MODELS = ("a", "b")
RIGHT, WRONG = (1,), (2,)
"""What the target chooses where the draft says 1."""


def draft(*probabilities: float, winner: str = "a", agreement: float = 1.0, proposers: int = 1) -> VotedDraft:
    count = len(probabilities)
    names = (("a", "b", "c")[:proposers],) * count
    return VotedDraft((1,) * count, probabilities, (agreement,) * count, names, winner)


def learn_both(model: AcceptanceModel, voted: VotedDraft, chosen: tuple[int, ...]) -> None:
    model.learn(voted, chosen)
    model.learn_mean(("a",), voted, chosen)


def test_before_anything_is_learnt_confidence_and_harmony_count() -> None:
    model = AcceptanceModel([])
    assert model.token("a", 0.95, 1.0, 1) > model.token("a", 0.3, 1.0, 1)
    assert model.token("a", 0.6, 1.0, 2) > model.token("a", 0.6, 1.0, 1) > model.token("a", 0.6, 0.5, 2)
    assert model.mean(("a",)) == MEAN_PRIOR
    assert model.mean(MODELS) == pytest.approx(MEAN_PRIOR + SET_GAIN)


def test_verdicts_move_the_estimate_of_their_own_drafter_only_and_of_their_own_kind_most() -> None:
    model = AcceptanceModel(["ngram"])
    others = {"looked up": ("ngram", 0.95, 1.0, 1), "another model": ("b", 0.95, 1.0, 1)}
    own = {"less sure": ("a", 0.55, 1.0, 1), "contested": ("a", 0.95, 0.6, 2)}
    before = {name: model.token(*kind) for name, kind in (others | own).items()}
    for _ in range(400):
        model.learn(draft(0.95), WRONG)
    assert model.token("a", 0.95, 1.0, 1) < 0.01
    assert {name: model.token(*kind) for name, kind in others.items()} == {name: before[name] for name in others}
    for name, kind in own.items():
        assert 0.8 * before[name] < model.token(*kind) < before[name]


def test_a_text_in_which_all_is_foreseen_better_or_worse_is_followed_before_each_kind_is() -> None:
    model = AcceptanceModel([])
    for _ in range(10):
        for sure in (0.3, 0.4, 0.6, 0.7, 0.85):
            model.learn(draft(sure), WRONG)
    unseen = ("a", 0.95, 1.0, 1)
    assert model.token(*unseen) < 0.9 * AcceptanceModel([]).token(*unseen)
    for _ in range(400):
        model.learn(draft(0.3), WRONG)
    assert model.token(*unseen) == pytest.approx(AcceptanceModel([]).token(*unseen), abs=0.02), "it is expected now"


def test_look_ups_are_believed_less_than_was_counted() -> None:
    """Of several kinds of token those are sent that were counted too high."""
    model = AcceptanceModel(["ngram"])
    for step in range(400):
        model.learn(draft(0.7, winner="ngram"), RIGHT if step % 4 else WRONG)
    assert 0.55 < model.token("ngram", 0.7, 1.0, 1) < 0.72


def test_a_new_text_begins_as_look_ups_are_counted_whatever_the_one_before_was_like() -> None:
    model = AcceptanceModel(["ngram"])
    kind, model_kind = ("ngram", 0.5, 1.0, 1), ("a", 0.5, 1.0, 1)
    model.learn(draft(0.95, winner="a"), WRONG)
    for _ in range(20):
        model.learn(draft(0.95, winner="ngram"), WRONG)
    before, of_model = model.token(*kind), model.token(*model_kind)
    model.begin_text()
    assert model.token(*kind) == AcceptanceModel(["ngram"]).token(*kind) > before
    assert model.token(*model_kind) == of_model


def test_what_a_drafter_may_turn_out_to_be_nears_what_it_is_as_it_is_heard() -> None:
    model = AcceptanceModel([])
    assert model.at_best(("a",)) > 0.95
    model.hear({"a": Score(6, 10)})
    early = model.at_best(("a",))
    model.hear({"a": Score(180, 300)})
    assert 0.6 < model.at_best(("a",)) < 0.67 < early


def test_look_ups_are_trusted_alike() -> None:
    model = AcceptanceModel(["ngram", "suffix"])
    for _ in range(400):
        model.learn(draft(0.95, winner="ngram"), WRONG)
    assert model.token("suffix", 0.95, 1.0, 1) < 0.01


def test_the_truth_is_found_and_a_change_is_followed() -> None:
    model = AcceptanceModel([])
    for step in range(400):
        learn_both(model, draft(0.7), RIGHT if step % 4 else WRONG)
    assert model.token("a", 0.7, 1.0, 1) == pytest.approx(0.75, abs=0.05)
    assert model.mean(("a",)) == pytest.approx(0.75, abs=0.06)
    for _ in range(100):
        learn_both(model, draft(0.7), WRONG)
    assert model.token("a", 0.7, 1.0, 1) < 0.2
    assert model.mean(("a",)) < 0.1


def test_what_comes_after_the_first_wrong_token_teaches_nothing() -> None:
    model, reference = AcceptanceModel([]), AcceptanceModel([])
    learn_both(model, draft(0.9, 0.6, 0.3, 0.1), (*RIGHT, *WRONG, *RIGHT, *RIGHT))
    learn_both(reference, draft(0.9, 0.6), (*RIGHT, *WRONG))
    for confidence in (0.9, 0.6, 0.3, 0.1):
        assert model.token("a", confidence, 1.0, 1) == reference.token("a", confidence, 1.0, 1)
    assert model.mean(("a",)) == reference.mean(("a",))


def test_a_token_that_was_not_sent_teaches_when_the_target_came_to_its_place() -> None:
    """A step that sent nothing still says whether the first token of the draft was right."""
    model = AcceptanceModel([])
    before = model.token("a", 0.1, 1.0, 1)
    for _ in range(50):
        model.learn(draft(0.1, 0.1), RIGHT)
    assert model.token("a", 0.1, 1.0, 1) > 0.7 > before


def test_empty_drafts_teach_nothing() -> None:
    model = AcceptanceModel([])
    learn_both(model, VotedDraft(), RIGHT)
    assert model.mean(("a",)) == MEAN_PRIOR


def test_a_draft_that_no_model_led_says_nothing_about_the_mean_of_models() -> None:
    model = AcceptanceModel(["ngram"])
    learn_both(model, draft(0.9, winner="ngram"), WRONG)
    assert model.mean(("a",)) == MEAN_PRIOR
    assert model.token("ngram", 0.9, 1.0, 1) < AcceptanceModel(["ngram"]).token("ngram", 0.9, 1.0, 1)


def test_a_voted_draft_is_estimated_token_by_token() -> None:
    model = AcceptanceModel([])
    voted = VotedDraft((1, 2), (0.9, 0.4), (1.0, 0.5), (("a", "b"), ("a",)), "a")
    assert model.voted(voted) == [model.token("a", 0.9, 1.0, 2), model.token("a", 0.4, 0.5, 1)]


def test_what_was_heard_of_a_drafter_counts_until_more_is_known_of_its_set() -> None:
    model = AcceptanceModel(["ngram"])
    assert model.general(("a",)) == MEAN_PRIOR
    model.hear({"a": Score(180, 200), "b": Score(120, 200), "ngram": Score(5, 5), "c": Score()})
    assert model.general(("a",)) == pytest.approx(0.9, abs=0.01)
    assert model.general(("a", "b")) == pytest.approx(model.general(("a",)) + SET_GAIN)
    assert model.mean(("b",)) == pytest.approx(0.6, abs=0.01)
    assert model.heard_tokens("a") == pytest.approx(200, abs=20), "what was heard long ago counts a little less"
    assert model.heard_tokens("c") == model.heard_tokens("ngram") == 0


def test_no_set_is_believed_to_be_always_right() -> None:
    model = AcceptanceModel([])
    model.hear({name: Score(1000, 1000) for name in "abc"})
    assert model.general(("a", "b", "c")) < 1


def test_what_was_heard_is_kept_for_the_next_start(tmp_path: Path) -> None:
    first, second, other = AcceptanceModel([]), AcceptanceModel([]), AcceptanceModel([])
    first.hear({"a": Score(90, 100)})
    other.hear({"b": Score(10, 100)})
    path = tmp_path / "heard.json"
    store = HeardStore(path, "target")
    store.save(first)
    store.save(other)
    HeardStore(path, "another target").save(AcceptanceModel([]))
    HeardStore(path, "target").recall(second)
    assert second.heard() == {**first.heard(), **other.heard()}
    third = AcceptanceModel([])
    store.recall(third)
    assert third.heard() == {}, "what was kept since the start is for the next one"


@pytest.mark.parametrize("entry", [{"a": [2, 1]}, {"a": "x"}, {"a": [1]}, ["a"], {"a": [0, 5]}, {"a": [None, 5]}])
def test_a_damaged_store_is_no_reason_to_stop(tmp_path: Path, entry: object) -> None:
    path = tmp_path / "heard.json"
    path.write_text(json.dumps({"version": HeardStore.VERSION, "entries": {"target": entry}}))
    model = AcceptanceModel([])
    HeardStore(path, "target").recall(model)
    assert model.heard_tokens("a") == 0
