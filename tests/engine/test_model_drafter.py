"""A real draft model: its mirror follows the committed tokens however they came about, and spares passes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from engine.config import ModelPlacement
from engine.cost import CostModel
from engine.drafters.base import DraftRequest, KeepDrafting, Score, always
from engine.drafters.model import SCORED_CATCH_UP_TOKENS, SPARE_CELLS, ModelDrafter
from engine.drafting import MEASURED_READ_TOKENS, Panel
from engine.runtime.model import Model
from engine.types import Draft
from tests.engine.making import write_tiny_llama

CONTEXT_TOKENS = 512
COUNTING = "one two three four five six seven eight nine ten, "


@pytest.fixture(scope="module")
def target(starter: Path) -> Iterator[Model]:
    """Only its vocabulary is needed."""
    model = Model(starter, vocabulary_only=True)
    yield model
    model.close()


@pytest.fixture(scope="module")
def load(draft_models: dict[str, Path], target: Model) -> Callable[[], ModelDrafter]:
    def load() -> ModelDrafter:
        placement = ModelPlacement(threads=1)
        path = draft_models["few-bits"]
        return ModelDrafter.load(path, "few", target.vocabulary, placement=placement, context_tokens=CONTEXT_TOKENS)

    return load


@pytest.fixture(scope="module")
def drafter(load: Callable[[], ModelDrafter]) -> Iterator[ModelDrafter]:
    drafter = load()
    yield drafter
    drafter.close()


@pytest.fixture(scope="module")
def other(load: Callable[[], ModelDrafter]) -> Iterator[ModelDrafter]:
    drafter = load()
    yield drafter
    drafter.close()


@pytest.fixture
def text(target: Model, drafter: ModelDrafter) -> list[int]:
    """Three times the numbers to ten: what follows leaves no doubt. The drafter has read nothing yet."""
    drafter.forget()
    drafter.take_score()
    return target.vocabulary.tokenize(COUNTING * 3, adds_special=False)


@pytest.fixture
def expected(other: ModelDrafter) -> Callable[[Sequence[int], int], tuple[int, ...]]:
    """What a drafter says that has read these tokens and nothing else."""

    def expected(tokens: Sequence[int], count: int) -> tuple[int, ...]:
        other.forget()
        other.begin(tokens)
        return draft(other, count).tokens

    return expected


Expected = Callable[[Sequence[int], int], tuple[int, ...]]


def draft(drafter: ModelDrafter, count: int = 4, path: Sequence[int] = (), keep: KeepDrafting = always) -> Draft:
    return drafter.start(DraftRequest(tuple(path), count, keep, threading.Event())).result()


def look_ahead(drafter: ModelDrafter, path: Sequence[int], count: int = 4) -> Draft:
    return drafter.start_look_ahead(DraftRequest(tuple(path), count, always, threading.Event())).result()


def catch_up(drafter: ModelDrafter, count: int) -> int:
    """Tokens read."""
    future = drafter.start_catch_up(count, threading.Event())
    assert future is not None
    return future.result()


def test_a_drafter_with_few_tokens_is_measured_with_those(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", tokens=MEASURED_READ_TOKENS // 2)
    target = Model(path, vocabulary_only=True)
    tiny = ModelDrafter.load(path, "tiny", target.vocabulary, placement=ModelPlacement(threads=1), context_tokens=128)
    panel, cost = Panel([tiny]), CostModel()
    panel.measure(cost, threading.Event())
    assert panel.failures == {}
    assert cost.knows_drafter("tiny")
    tiny.close()
    target.close()


def test_it_says_the_same_however_the_text_came_about(
    drafter: ModelDrafter, text: list[int], expected: Expected
) -> None:
    wanted = expected(text, 6)

    def by_accepting() -> None:
        drafter.begin(text[:10])
        draft(drafter)
        drafter.accept(text[10:])

    def after_another_text() -> None:
        drafter.begin([*text[:5], *text[20:40]])
        draft(drafter)
        drafter.begin(text)

    def by_truncating() -> None:
        drafter.begin([*text, 5, 6, 7])
        draft(drafter)
        drafter.truncate(len(text))

    def with_drafts_in_between() -> None:
        drafter.begin(text[:12])
        for start in range(12, len(text), 3):
            draft(drafter)
            drafter.accept(text[start : start + 3])

    def with_look_ahead_in_between() -> None:
        drafter.begin(text[:12])
        for start in range(12, len(text), 3):
            made = draft(drafter, 2)
            look_ahead(drafter, made.tokens)
            drafter.accept(text[start : start + 3])

    def by_catching_up() -> None:
        drafter.begin(text)
        assert catch_up(drafter, 7) == 7
        while drafter.behind_tokens:
            catch_up(drafter, 7)

    for way in (
        by_accepting,
        after_another_text,
        by_truncating,
        with_drafts_in_between,
        with_look_ahead_in_between,
        by_catching_up,
    ):
        way()
        made = draft(drafter, 6)
        assert made.tokens == wanted, way.__name__
        assert all(0 < probability <= 1 for probability in made.probabilities)
        drafter.forget()


def test_along_a_path_it_goes_on_after_the_path(drafter: ModelDrafter, text: list[int], expected: Expected) -> None:
    drafter.begin(text[:20])
    draft(drafter)
    assert draft(drafter, 4, text[20:26]).tokens == expected(text[:26], 4)
    assert draft(drafter, 4).tokens == expected(text[:20], 4)
    assert drafter.behind_tokens == 0


def test_a_draft_takes_one_pass_a_token_and_what_is_known_none(drafter: ModelDrafter, text: list[int]) -> None:
    drafter.begin(text)
    catch_up(drafter, 1000)
    first = draft(drafter, 4)
    assert drafter.last_passes == 3  # catching up gave the first prediction
    assert draft(drafter, 4) == first
    assert drafter.last_passes == 0
    drafter.accept(first.tokens)
    draft(drafter, 4)
    assert (drafter.last_passes, drafter.last_extra_tokens) == (4, 0)
    drafter.accept(text[:6])
    draft(drafter, 1)
    assert (drafter.last_passes, drafter.last_extra_tokens) == (1, 5)


def test_a_look_ahead_that_was_right_is_the_next_draft_for_nothing(drafter: ModelDrafter, text: list[int]) -> None:
    drafter.begin(text)
    sent = draft(drafter, 2).tokens
    ahead = look_ahead(drafter, sent, 5).tokens
    drafter.accept([*sent, ahead[0]])
    assert draft(drafter, 4).tokens == ahead[1:]
    assert drafter.last_passes == 0


def test_a_look_ahead_that_was_wrong_leaves_no_trace(
    drafter: ModelDrafter, text: list[int], expected: Expected
) -> None:
    drafter.begin(text)
    sent = draft(drafter, 2).tokens
    look_ahead(drafter, sent)
    wrong = text[0]
    drafter.accept([sent[0], wrong])
    assert draft(drafter).tokens == expected([*text, sent[0], wrong], 4)
    assert drafter._branch is None


def test_a_look_ahead_of_another_text_is_not_mistaken_for_this_one(
    drafter: ModelDrafter, other: ModelDrafter, text: list[int]
) -> None:
    other.forget()
    for one in (drafter, other):
        one.begin(text)
        own = draft(one, 6).tokens
    aside = look_ahead(drafter, text[3:5], 4).tokens
    # The new text agrees with the mirror for four tokens, and then by chance with the branch at one place.
    new = [*text, *own[:4], aside[2]]
    for one in (drafter, other):
        one.begin(new)
    # Both ran the same passes, so that a model in doubt here is in the same doubt.
    assert draft(drafter) == draft(other)


def test_its_guesses_are_scored_on_what_was_committed_since(drafter: ModelDrafter, text: list[int]) -> None:
    drafter.begin(text)
    first = draft(drafter, 3).tokens
    assert drafter.take_score() == Score()
    drafter.accept(first[:2])
    draft(drafter, 1)
    assert drafter.take_score() == Score(2, 2)
    drafter.accept([text[0]])
    draft(drafter, 1)
    assert drafter.take_score() == Score(0, 1)
    assert drafter.take_score() == Score()


def test_a_long_text_is_read_in_slices_and_can_be_left_off(drafter: ModelDrafter, text: list[int]) -> None:
    long = (text * 12)[:300]
    drafter.begin(long)
    assert drafter.behind_tokens == 300
    assert (catch_up(drafter, 128), drafter.behind_tokens) == (128, 172)
    cancelled = threading.Event()
    cancelled.set()
    stopped = drafter.start_catch_up(128, cancelled)
    assert stopped is not None
    assert (stopped.result(), drafter.behind_tokens) == (0, 172)
    assert (catch_up(drafter, 1000), drafter.behind_tokens) == (172, 0)
    assert drafter.start_catch_up(128, threading.Event()) is None


def test_a_draft_that_is_cancelled_while_it_reads_abstains(drafter: ModelDrafter, text: list[int]) -> None:
    drafter.begin((text * 20)[: 10 * SCORED_CATCH_UP_TOKENS])
    cancelled = threading.Event()
    cancelled.set()
    assert drafter.start(DraftRequest((), 4, always, cancelled)).result().tokens == ()
    assert drafter.behind_tokens == 10 * SCORED_CATCH_UP_TOKENS


def test_it_stops_when_told_and_cancelling_ends_after_the_token_in_hand(drafter: ModelDrafter, text: list[int]) -> None:
    drafter.begin(text)
    assert len(draft(drafter, 8, keep=lambda probabilities, _entropy: len(probabilities) < 3)) == 3
    cancelled = threading.Event()
    cancelled.set()
    assert len(drafter.start(DraftRequest((), 8, always, cancelled)).result()) == 1


def test_it_has_room_to_the_end_of_the_targets_context(
    drafter: ModelDrafter, text: list[int], expected: Expected
) -> None:
    """Also for a draft at the very end and a branch beside it that differs from its first token on."""
    full = (text * 30)[:CONTEXT_TOKENS]
    drafter.begin(full)
    assert len(draft(drafter, 31)) == 31
    assert len(look_ahead(drafter, (text * 3)[3:34], 16)) == 16
    assert draft(drafter).tokens == expected(full, 4)
    too_much = (text * 30)[: CONTEXT_TOKENS + SPARE_CELLS + 300]
    drafter.begin(too_much)
    assert draft(drafter).tokens == ()


def test_it_has_a_thread_only_while_it_drafts_beside_others(load: Callable[[], ModelDrafter], text: list[int]) -> None:
    before = threading.active_count()
    drafter = load()
    drafter.begin(text)
    first = draft(drafter)
    assert threading.active_count() == before
    drafter.forget()
    drafter.begin(text)
    request = DraftRequest((), 4, always, threading.Event())
    assert drafter.start_beside(request).result().tokens == first.tokens
    assert draft(drafter).tokens == first.tokens
    assert threading.active_count() == before + 1
    drafter.end_thread()
    assert threading.active_count() == before
    assert len(look_ahead(drafter, first.tokens, 2)) == 2
    assert threading.active_count() == before + 1
    drafter.close()
    assert threading.active_count() == before
    assert drafter.model.handle is None
