"""Long prompts, read at the speed of an F16 cache: exact afterwards, whole or not at all, plainly where it fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from engine import prefill
from engine.config import KvType, ModelPlacement, NumberFormat, Policy, Sampling, SetConfig, Speculation
from engine.errors import DecodeError, MemoryShortage
from engine.loader import LoadedSet
from engine.prefill import LEAST_CARRIED_TOKENS, PromptReader, Stretch, stretches, usable_prefix
from engine.runtime.context import Context, ContextSettings, FloatRows, Run
from engine.runtime.devices import has_gpu
from engine.runtime.state import UnknownState, cells_of, convert, keep_beginning
from engine.runtime.template import Message
from engine.session import Session
from engine.types import Finished, FinishReason, PrefillProgress
from tests.engine.conftest import GREEDY, PLAIN, answer, never, settings, tokens_of

pytestmark = pytest.mark.skipif(has_gpu(), reason="a GPU's cache is F16")

LONG = LEAST_CARRIED_TOKENS
DRAFTED = Speculation(Policy.parse("fixed:3"))
SEEDED = Sampling(temperature=0.8, seed=4)
PRICES = "".join(f"{number}. A lamp of kind {number} costs {number * 7 % 31} coins.\n" for number in range(1, 39))
OTHERS = "".join(f"{number}. A chair of sort {number} weighs {number * 5 % 23} pounds.\n" for number in range(1, 39))
FIRST = Message("user", f"Here is a price list.\n{PRICES}Write a story about a man who buys some of them.")
SECOND = Message("user", "What happens on the next day?")
THIRD = Message("user", f"Here is another list.\n{OTHERS}Write a story about a girl who makes some of them.")


@pytest.fixture(scope="module")
def loaded(starter: Path, draft_models: dict[str, Path], cost_file: Path) -> Iterator[LoadedSet]:
    drafters = ("ngram", str(draft_models["few-bits"]))
    loaded = LoadedSet.load(SetConfig(starter, drafters, 3072, ModelPlacement(threads=2), cost_file=cost_file))
    assert loaded.reader.carries
    yield loaded
    loaded.close()


@pytest.fixture
def session(loaded: LoadedSet) -> Iterator[Session]:
    session = Session(loaded)
    yield session
    session.close()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For every F16 context that is made to read in, its cells."""
    made: list[int] = []

    def noting(model: object, given: ContextSettings) -> Context:
        made.append(given.context_tokens)
        return Context(model, given)  # type: ignore[arg-type]

    monkeypatch.setattr(prefill, "Context", noting)
    return made


# Which tokens are carried


def test_long_parts_are_carried_without_their_last_token() -> None:
    assert stretches([(0, LONG), (900, 900 + LONG + 1)]) == {Stretch(900, 900 + LONG)}
    assert stretches([]) == frozenset()


A, B = Stretch(0, 600), Stretch(800, 1500)


@pytest.mark.parametrize(
    ("shared", "wanted", "held", "usable"),
    [
        (700, (), (), 700),
        (600, (A,), (A,), 600),
        (599, (A,), (A,), 0),
        (1600, (A, B), (A, B), 1600),
        (1400, (A, B), (A, B), 800),
        (700, (A, B), (A,), 700),
        (1600, (A, B), (A,), 800),
        (1600, (A,), (A, B), 800),
        (1600, (), (A,), 0),
        (1600, (Stretch(0, 1500),), (A,), 0),
        (500, (B,), (), 500),
    ],
)
def test_what_was_read_otherwise_than_it_should_be_is_read_anew(
    shared: int, wanted: Sequence[Stretch], held: Sequence[Stretch], usable: int
) -> None:
    assert usable_prefix(shared, wanted, held) == usable


# The state


def test_a_state_converts_to_the_nearest_numbers_and_other_layouts_are_refused(loaded: LoadedSet) -> None:
    context = Context(loaded.model, ContextSettings(256, KvType.F16, 1, 4))
    sequence = context.allocate()
    context.decode([Run(sequence, tokens_of(loaded, PRICES)[:20], 0)])
    state = context.state(sequence)
    (cells,) = cells_of(state)
    assert cells.positions.tolist() == list(range(20))
    assert len(cells.rows) == 2 * loaded.model.layers
    before = [rows.values.copy().view(np.float16).astype(np.float32) for rows in cells.rows]
    converted = state.copy()
    convert(converted, KvType.F16, KvType.BF16)
    worst = 0.0
    for numbers, rows in zip(before, cells_of(converted)[0].rows, strict=True):
        assert rows.type[0] == NumberFormat.BF16
        after = (rows.values.astype(np.uint32) << 16).view(np.float32)
        worst = max(worst, float(np.max(np.abs(after - numbers) / np.maximum(np.abs(numbers), 1e-9))))
    assert 2**-10 < worst <= 2**-8, "eight bits remain, rounded to nearest"
    mixed = state.copy()
    convert(mixed, KvType.F16, KvType.BF16_F16)
    for ours, theirs in zip(cells_of(mixed)[0].keys, cells_of(converted)[0].keys, strict=True):
        assert np.array_equal(ours.values, theirs.values)
    for ours, theirs in zip(cells_of(mixed)[0].values, cells.values, strict=True):
        assert np.array_equal(ours.values, theirs.values)
    assert [int(rows.type[0]) for rows in cells_of(mixed)[0].rows] == [30] * len(cells.keys) + [1] * len(cells.values)
    back = converted.copy()
    convert(back, KvType.BF16, KvType.F16)
    again = back.copy()
    convert(again, KvType.F16, KvType.BF16)
    assert np.array_equal(again, converted)
    keep_beginning(back, state)
    assert np.array_equal(back, state)
    for broken in (state[:-1], state[8:], np.concatenate([state[:4], state])):
        with pytest.raises(UnknownState, match="state of a sequence out otherwise"):
            cells_of(broken.copy())
    with pytest.raises(UnknownState, match="format 1, not 30"):
        convert(state.copy(), KvType.BF16, KvType.F16)
    huge = converted.copy()
    cells_of(huge)[0].rows[3].values[2, 1] = 0x7F00
    with pytest.raises(UnknownState, match="too large"):
        convert(huge, KvType.BF16, KvType.F16)
    context.close()


# Reading


def rows(context: Context, sequence: int, tokens: Sequence[int], size: int) -> FloatRows:
    """Scored so many at a time and taken back again."""
    start = context.length(sequence)
    found = []
    for place in range(0, len(tokens), size):
        chunk = tokens[place : place + size]
        context.decode([Run(sequence, chunk, len(chunk))])
        found.append(context.logits().copy())
    context.truncate(sequence, start)
    return np.concatenate(found)


def test_after_a_carried_prompt_every_batch_size_is_bit_equal_to_single_tokens(
    loaded: LoadedSet, made: list[int]
) -> None:
    context, reader = loaded.context, PromptReader(loaded.context)
    made.clear()
    tokens = tokens_of(loaded, PRICES + OTHERS)
    sequence = context.allocate()
    context.hold_alone(sequence)
    assert reader.begin(sequence, 0, [(0, 801)]) == 0
    told = list(reader.read(sequence, tokens, 800, never()))
    assert (told[-1], made) == (800, [1024])
    assert context.length(sequence) == context.stored_length(sequence) == 800
    single = rows(context, sequence, tokens[800:832], 1)
    for size in (2, 3, 4, 8, 16, 32):
        assert np.array_equal(rows(context, sequence, tokens[800:832], size), single), size
    context.truncate(sequence, 0)
    reader.reason = "switched off"
    assert reader.begin(sequence, 0, [(0, 801)]) == 0
    assert len(list(reader.read(sequence, tokens, 800, never()))) > 1
    plain = rows(context, sequence, tokens[800:832], 1)
    assert not np.array_equal(plain, single), "it was really carried"
    assert (plain.argmax(axis=1) == single.argmax(axis=1)).mean() > 0.8
    context.free(sequence)
    assert len(loaded.model.dependants) == 1, "the second context is gone"


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_drafts_change_no_token_after_carried_prompts(loaded: LoadedSet, sampling: Sampling, made: list[int]) -> None:
    """A conversation with a long first and a long third question, drafted and plain."""
    said: list[list[tuple[int, ...]]] = []
    accepted = 0
    for speculation in (PLAIN, DRAFTED):
        session = Session(loaded)
        made.clear()
        messages: list[Message] = []
        said.append([])
        for question in (FIRST, SECOND, THIRD):
            messages.append(question)
            finished = answer(session.chat(messages, settings(speculation, sampling, 40), never()))
            messages.append(Message("assistant", finished.text))
            said[-1].append(finished.token_ids)
            accepted += finished.metrics.accepted
        assert len(made) == 2, "the second question is short"
        session.close()
    assert said[0] == said[1]
    assert sum(map(len, said[0])) > 60
    assert accepted > 20


def test_a_conversation_is_read_as_it_was_by_a_session_that_knows_its_tokens(
    loaded: LoadedSet, session: Session, made: list[int]
) -> None:
    """Retried, regenerated after a restart, edited: each time as if nothing had been in the cache."""

    def ask(one: Session, *messages: Message) -> Finished:
        return answer(one.chat(messages, settings(PLAIN, SEEDED, 24), never()))

    first = ask(session, FIRST)
    long = len(session.tokens) - len(first.token_ids) - 1
    assert ask(session, FIRST).metrics.reused_tokens == long, "nothing is read again"
    assert len(made) == 1
    said = Message("assistant", first.text)
    second = ask(session, FIRST, said, SECOND)
    row = loaded.context.logits()[-1].copy()
    restarted = Session(loaded, session.remembered[:2])
    again = ask(restarted, FIRST, said, SECOND)
    assert again.metrics.reused_tokens == 0
    assert again.token_ids == second.token_ids
    assert np.array_equal(loaded.context.logits()[-1], row)
    restarted.close()
    edited = Message("user", FIRST.content.replace("lamp of kind 30", "torch of kind 30"))
    changed = ask(session, edited)
    row = loaded.context.logits()[-1].copy()
    assert changed.metrics.reused_tokens == 0, "a stretch is carried whole"
    fresh = Session(loaded)
    assert ask(fresh, edited).token_ids == changed.token_ids
    assert np.array_equal(loaded.context.logits()[-1], row)
    fresh.close()


def test_a_stop_leaves_no_part_of_a_stretch(loaded: LoadedSet, session: Session) -> None:
    given = settings(PLAIN, GREEDY, 4)
    cancel = threading.Event()
    last = None
    for event in session.chat([FIRST], given, cancel):
        if isinstance(event, PrefillProgress):
            cancel.set()
        last = event
    assert isinstance(last, Finished)
    assert last.reason is FinishReason.CANCELLED
    assert (session.tokens, loaded.context.length(session._sequence)) == ((), 0)
    finished = answer(session.chat([FIRST], given, never()))
    other = Session(loaded)
    assert answer(other.chat([FIRST], given, never())).token_ids == finished.token_ids
    other.close()


@pytest.mark.parametrize("fault", ["no memory", "unknown layout"])
def test_what_cannot_be_carried_is_read_plainly_ever_after(
    starter: Path, cost_file: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    one = LoadedSet.load(SetConfig(starter, (), 1024, ModelPlacement(threads=2), cost_file=cost_file))
    calls: list[str] = []

    def failing(*_: object) -> None:
        calls.append(fault)
        raise MemoryShortage("as told") if fault == "no memory" else UnknownState("as told")

    monkeypatch.setattr(prefill, "check_memory" if fault == "no memory" else "convert", failing)
    prompt = tokens_of(one, PRICES)[:560]
    session = Session(one)
    told = answer(session.generate(prompt, settings(PLAIN, GREEDY, 8), never()))
    assert (one.reader.carries, one.reader.reason) == (False, "as told")
    assert answer(session.generate(prompt, settings(PLAIN, GREEDY, 8), never())).metrics.reused_tokens == 559
    again = Session(one)
    assert answer(again.generate(prompt, settings(PLAIN, GREEDY, 8), never())).token_ids == told.token_ids
    assert calls == [fault]
    unable = PromptReader(one.context)
    assert unable.reason == "as told", "and at load it is found out beforehand"
    one.close()


def test_a_state_that_the_cache_refuses_leaves_the_session_usable(
    loaded: LoadedSet, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = settings(PLAIN, GREEDY, 4)
    with monkeypatch.context() as patch:
        patch.setattr(loaded.context._lib, "llama_state_seq_set_data", lambda *_: 0)
        with pytest.raises(DecodeError, match="could not be brought back"):
            answer(session.chat([FIRST], given, never()))
    assert loaded.context.length(session._sequence) == 0
    assert len(answer(session.chat([FIRST], given, never())).token_ids) == 4
