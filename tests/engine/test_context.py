"""The native context on the real starter: lengths are true after whatever happened, and rows are bit-equal."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from engine.config import KvType, Sampling
from engine.errors import DecodeError
from engine.runtime.context import Context, ContextSettings, FloatRows, PassCancelled, Run
from engine.runtime.model import Model
from engine.runtime.sampler import Sampler

ROOM = 256
BATCH = 64


@pytest.fixture(scope="module")
def model(starter: Path) -> Iterator[Model]:
    model = Model(starter)
    yield model
    model.close()


@pytest.fixture
def context(model: Model) -> Iterator[Context]:
    context = new_context(model)
    yield context
    context.close()


def new_context(model: Model) -> Context:
    return Context(model, ContextSettings(ROOM, KvType.BF16, 1, max_outputs=16, max_sequences=3, batch_tokens=BATCH))


@pytest.fixture(scope="module")
def text(model: Model) -> list[int]:
    words = "The harbour was quiet when the first boats came in, and nobody counted the crates. "
    return model.vocabulary.tokenize(words * 20, adds_special=False)[:ROOM]


def read(context: Context, sequence: int, tokens: Sequence[int]) -> FloatRows:
    """Feed tokens in batches, the last one alone; the row after it."""
    for start in range(0, len(tokens) - 1, BATCH):
        context.decode([Run(sequence, tokens[start : min(start + BATCH, len(tokens) - 1)], 0)])
    context.decode([Run(sequence, tokens[-1:], 1)])
    row: FloatRows = context.logits()[0].copy()
    return row


def fresh_row(model: Model, tokens: Sequence[int]) -> FloatRows:
    """The row after these tokens in a context that has seen nothing else."""
    context = new_context(model)
    row = read(context, context.allocate(), tokens)
    context.close()
    return row


def test_lengths_follow_passes_truncation_copies_and_freeing(context: Context, text: list[int]) -> None:
    one = context.allocate()
    assert context.length(one) == 0
    read(context, one, text[:20])
    assert context.length(one) == 20
    two = context.copy(one)
    context.truncate(one, 5)
    assert (context.length(one), context.length(two)) == (5, 20)
    context.free(one)
    assert context.allocate() == one
    assert (context.length(one), context.length(two)) == (0, 20)


def test_a_copy_goes_its_own_way(model: Model, context: Context, text: list[int]) -> None:
    one = context.allocate()
    read(context, one, text[:20])
    two = context.copy(one)
    context.truncate(two, 12)
    row_two = read(context, two, text[30:35])
    row_one = read(context, one, text[20:25])
    assert np.array_equal(row_one, fresh_row(model, text[:25]))
    assert np.array_equal(row_two, fresh_row(model, [*text[:12], *text[30:35]]))


def test_two_sequences_in_one_pass_are_as_each_alone(model: Model, context: Context, text: list[int]) -> None:
    one, two = context.allocate(), context.allocate()
    read(context, one, text[:20])
    read(context, two, text[40:50])
    context.decode([Run(one, text[20:23], 2), Run(two, text[50:54], 1)])
    rows = context.logits()
    assert rows.shape == (3, model.vocabulary.size)
    assert np.array_equal(rows[1], fresh_row(model, text[:23]))
    assert np.array_equal(rows[2], fresh_row(model, text[40:54]))
    assert (context.length(one), context.length(two)) == (23, 14)


def test_alone_a_sequence_is_bit_equal_whatever_other_sequences_leave(
    model: Model, context: Context, text: list[int]
) -> None:
    """In a shared cache it would go on in the cells that another one left before it, and add up in another order."""
    one, two = context.allocate(), context.allocate()
    read(context, one, text[100:150])
    context.hold_alone(two)
    read(context, two, text[:40])
    context.free(one)
    context.hold_alone(two)
    assert np.array_equal(read(context, two, text[40:70]), fresh_row(model, text[:70]))


def test_sequences_take_turns_and_find_everything_as_they_left_it(
    model: Model, context: Context, text: list[int]
) -> None:
    parts = {context.allocate(): text[:130], context.allocate(): text[60:200]}
    for start in range(0, 120, 30):
        for sequence, tokens in parts.items():
            context.hold_alone(sequence)
            row = read(context, sequence, tokens[start : start + 30])
            context.truncate(sequence, start + 20)
            row = read(context, sequence, tokens[start + 20 : start + 30])
            assert np.array_equal(row, fresh_row(model, tokens[: start + 30]))
    assert [context.length(sequence) for sequence in parts] == [120, 120]
    first, second = parts
    with pytest.raises(AssertionError, match="in the cache"):
        context.decode([Run(first, text[:1], 1)])
    with pytest.raises(AssertionError, match="in the cache"):
        context.truncate(first, 3)
    context.free(first)
    assert context.allocate() == first
    context.hold_alone(first)
    assert np.array_equal(read(context, first, text[:30]), fresh_row(model, text[:30]))
    context.hold_alone(second)
    assert np.array_equal(read(context, second, parts[second][120:]), fresh_row(model, parts[second]))


def test_both_together_may_be_longer_than_the_cache(context: Context, text: list[int]) -> None:
    for sequence in (context.allocate(), context.allocate()):
        context.hold_alone(sequence)
        read(context, sequence, text[: ROOM - 20])


def test_a_state_that_cannot_be_brought_back_leaves_an_empty_sequence(
    context: Context, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = context.allocate(), context.allocate()
    read(context, one, text[:20])
    context.hold_alone(two)
    monkeypatch.setattr(context._lib, "llama_state_seq_set_data", lambda *_: 0)
    with pytest.raises(DecodeError, match="20 tokens could not be brought back"):
        context.hold_alone(one)
    assert context.length(one) == 0
    context.hold_alone(one)
    read(context, one, text[:20])


def test_a_pass_without_room_changes_nothing(model: Model, context: Context, text: list[int]) -> None:
    one, two = context.allocate(), context.allocate()
    read(context, one, text[: ROOM - 10])
    read(context, two, text[:6])
    with pytest.raises(DecodeError, match=rf"{ROOM} tokens has no room for 9"):
        context.decode([Run(one, text[:5], 1), Run(two, text[6:10], 1)])
    assert (context.length(one), context.length(two)) == (ROOM - 10, 6)
    context.decode([Run(two, text[6:10], 1)])
    assert np.array_equal(context.logits()[0], fresh_row(model, text[:10]))
    context.free(one)
    read(context, two, text[10:200])
    assert context.length(two) == 200


class TripWire(threading.Event):
    """Is set from the n-th time on that somebody asks: a stop that comes in the middle of a pass."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls_left = calls

    def is_set(self) -> bool:
        self.calls_left -= 1
        return self.calls_left < 0


def test_a_cancelled_pass_changes_nothing(model: Model, context: Context, text: list[int]) -> None:
    one = context.allocate()
    read(context, one, text[:20])
    with pytest.raises(PassCancelled):
        context.decode([Run(one, text[20:80], 1)], TripWire(40))
    assert context.length(one) == 20
    row = read(context, one, text[20:24])
    assert np.array_equal(row, fresh_row(model, text[:24]))
    context.decode([Run(one, text[24:28], 1)], TripWire(10**9))
    assert context.length(one) == 28


def test_what_a_pass_cannot_hold_is_refused_before_llama_cpp_sees_it(context: Context, text: list[int]) -> None:
    one = context.allocate()
    with pytest.raises(ValueError, match="at most 16 rows"):
        context.decode([Run(one, text[:17], 17)])
    with pytest.raises(ValueError, match="65"):
        context.decode([Run(one, text[: BATCH + 1], 1)])
    assert context.length(one) == 0
    context.decode([Run(one, text[:16], 16)])
    assert context.logits().shape[0] == 16


def test_sequences_are_limited_and_cannot_be_cut_longer(context: Context, text: list[int]) -> None:
    one, _, _ = (context.allocate() for _ in range(3))
    with pytest.raises(ValueError, match="all 3 sequences"):
        context.allocate()
    with pytest.raises(ValueError, match="has 0 tokens, cannot be cut to 1"):
        context.truncate(one, 1)


def test_only_the_thread_that_made_a_context_may_use_it(context: Context) -> None:
    refused: list[bool] = []

    def use() -> None:
        try:
            context.allocate()
        except AssertionError:
            refused.append(True)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert refused == [True]


def test_closing_twice_is_closing_once_and_a_model_closes_its_contexts(starter: Path) -> None:
    model = Model(starter)
    first, second = new_context(model), new_context(model)
    first.close()
    first.close()
    model.close()
    model.close()
    assert first.handle is None
    assert second.handle is None
    assert model.handle is None


# The sampler


def chain(model: Model, sampling: Sampling, history: Sequence[int] = ()) -> Sampler:
    return Sampler(sampling, model.vocabulary, history)


SAMPLED = Sampling(temperature=0.9, seed=5, repeat_penalty=1.3, presence_penalty=0.5)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), SAMPLED], ids=["greedy", "sampled"])
def test_a_draft_is_matched_by_the_tokens_that_single_steps_give(
    model: Model, context: Context, text: list[int], sampling: Sampling
) -> None:
    one = context.allocate()
    sampler = chain(model, sampling, text[:20])
    read(context, one, text[:19])
    singles = [text[19]]
    for _ in range(8):
        context.decode([Run(one, singles[-1:], 1)])
        accepted, token = sampler.match(context, (), 0)
        assert accepted == 0
        singles.append(token)
    sampler.close()
    for wrong_at in (0, 3, 7):
        context.truncate(one, 19)
        draft = list(singles[1:])
        draft[wrong_at] += 1
        sampler = chain(model, sampling, text[:20])
        context.decode([Run(one, [text[19], *draft], len(draft) + 1)])
        assert sampler.match(context, draft, 0) == (wrong_at, singles[1 + wrong_at])
        sampler.close()
        sampler.close()


def test_penalties_count_the_history(model: Model, context: Context, text: list[int]) -> None:
    one = context.allocate()
    read(context, one, text[:40])
    plain = chain(model, Sampling(temperature=0)).match(context, (), 0)[1]
    heavy = Sampling(temperature=0, presence_penalty=2.0, repeat_penalty=5.0)
    assert chain(model, heavy, [plain]).match(context, (), 0)[1] != plain
    assert chain(model, heavy, []).match(context, (), 0)[1] == plain
    windowless = Sampling(temperature=0, presence_penalty=2.0, repeat_penalty=5.0, penalty_last_tokens=0)
    assert chain(model, windowless, [plain]).match(context, (), 0)[1] == plain


def test_a_seed_is_drawn_once_and_can_be_given_again(model: Model, context: Context, text: list[int]) -> None:
    one = context.allocate()
    read(context, one, text[:40])
    hot = Sampling(temperature=5.0, top_k=0, top_p=1.0, min_p=0.0)
    drawn = chain(model, hot)
    again = chain(model, Sampling(temperature=5.0, top_k=0, top_p=1.0, min_p=0.0, seed=drawn.seed))
    tokens = [sampler.match(context, (), 0)[1] for sampler in (drawn, again)]
    assert tokens[0] == tokens[1]
    others = {chain(model, hot).match(context, (), 0)[1] for _ in range(8)}
    assert len(others) > 1
