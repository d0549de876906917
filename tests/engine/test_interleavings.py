"""Whatever is done to a conversation, in whatever order: caches stay true, and the answer is the target's own.

A real, tiny, random model answers; hypothesis thinks of what users do: ask, edit, regenerate, stop, walk away, switch
drafters and rules. After every step the invariants are checked.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from engine.config import (
    GenerationSettings,
    LookAhead,
    ModelPlacement,
    Policy,
    Sampling,
    SetConfig,
    Speculation,
    VoteMode,
    WeightRule,
)
from engine.invariants import CHECKS_VARIABLE, check_step
from engine.loader import LoadedSet
from engine.session import Session
from engine.types import Finished, FinishReason, StepDone
from tests.engine.conftest import PLAIN, answer, never
from tests.engine.making import TINY_TOKENS, write_tiny_llama

CONTEXT_TOKENS = 256
DRAFTERS = ("ngram", "suffix", "near", "far")
SAMPLINGS = (
    Sampling(temperature=0),
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.8, seed=2, repeat_penalty=1.2),
    Sampling(temperature=0, grammar="root ::= ([0-9] | [A-F])*"),
)
POLICIES = ("auto", "minions", "adaedl", "fixed:1", "fixed:3", "fixed:7", "off")


class Move(NamedTuple):
    """One thing a user does: keep some of the conversation, add to it, and ask."""

    kept: float
    """Share of the committed tokens that stay."""
    added: tuple[int, ...]
    drafters: frozenset[str]
    policy: str
    look_ahead: LookAhead
    vote: VoteMode
    weights: WeightRule
    sampling: int
    max_tokens: int
    events_heard: int
    """The answer is stopped after so many events..."""
    walks_away: bool
    """...or is heard no more."""


MOVES = st.builds(
    Move,
    kept=st.sampled_from((0.0, 0.3, 0.7, 0.95, 1.0, 1.0, 1.0)),
    added=st.lists(st.integers(2, TINY_TOKENS - 1), min_size=1, max_size=60).map(tuple),
    drafters=st.frozensets(st.sampled_from(DRAFTERS)),
    policy=st.sampled_from(POLICIES),
    look_ahead=st.sampled_from(LookAhead),
    vote=st.sampled_from(VoteMode),
    weights=st.sampled_from(WeightRule),
    sampling=st.integers(0, len(SAMPLINGS) - 1),
    max_tokens=st.integers(1, 48),
    events_heard=st.sampled_from((1, 2, 4, 8, 1000, 1000, 1000)),
    walks_away=st.booleans(),
)


FILLING = Move(
    kept=1.0,
    added=tuple(2 + number % (TINY_TOKENS - 2) for number in range(100)),
    drafters=frozenset(DRAFTERS),
    policy="fixed:3",
    look_ahead=LookAhead.OFF,
    vote=VoteMode.TREE,
    weights=WeightRule.HEDGE,
    sampling=3,
    max_tokens=48,
    events_heard=1000,
    walks_away=False,
)
"""Several of them fill the context, in which the grammar lets the answer not end."""


@dataclass
class Tally:
    """What was tried."""

    moves: int = 0
    steps: int = 0
    compared: int = 0
    accepted: int = 0
    rejected: int = 0
    reasons: set[FinishReason] = field(default_factory=set)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LoadedSet, LoadedSet]]:
    """A set with drafters that are right and wrong by turns, and one without drafters."""
    folder = tmp_path_factory.mktemp("tiny")
    target = write_tiny_llama(folder / "target.gguf")
    near, far = (write_tiny_llama(folder / f"{name}.gguf", noise) for name, noise in (("near", 0.1), ("far", 0.6)))
    one = ModelPlacement(threads=1)
    drafted = LoadedSet.load(SetConfig(target, ("ngram", "suffix", str(near), str(far)), CONTEXT_TOKENS, one))
    plain = LoadedSet.load(SetConfig(target, (), CONTEXT_TOKENS, one))
    yield drafted, plain
    drafted.close()
    plain.close()


def make(session: Session, loaded: LoadedSet, plain: LoadedSet, move: Move, tally: Tally) -> None:
    """Do what the move says and compare what was said with what the target alone says."""
    tokens = session.tokens
    prompt = [*tokens[: int(move.kept * len(tokens))], *move.added][-(CONTEXT_TOKENS - 1) :]
    session._set = loaded.with_drafters(move.drafters)  # as when drafters are switched in mid-conversation
    speculation = Speculation(Policy.parse(move.policy), move.weights, move.vote, move.look_ahead)
    settings = GenerationSettings(SAMPLINGS[move.sampling], speculation, move.max_tokens)
    cancel = threading.Event()
    heard: list[int] = []
    last = None
    for number, event in enumerate(session.generate(prompt, settings, cancel), start=1):
        if isinstance(event, StepDone):
            tally.steps += 1
            heard += [token.id for token in event.tokens]
        elif isinstance(event, Finished):
            last = event
        if number >= move.events_heard:
            if move.walks_away:
                break
            cancel.set()
    tally.moves += 1
    if last is not None:
        assert list(last.token_ids) == heard
        tally.accepted += last.metrics.accepted
        tally.rejected += last.metrics.rejected
        tally.reasons.add(last.reason)
        assert not any(report.note for report in last.metrics.drafters)
    reference = Session(plain)
    given = GenerationSettings(SAMPLINGS[move.sampling], PLAIN, move.max_tokens)
    expected = answer(reference.generate(prompt, given, never())).token_ids
    reference.close()
    is_whole = last is not None and last.reason is not FinishReason.CANCELLED
    assert tuple(heard) == (expected if is_whole else expected[: len(heard)])
    tally.compared += len(heard)


def test_no_order_of_events_makes_a_cache_untrue_or_changes_a_token(
    sets: tuple[LoadedSet, LoadedSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CHECKS_VARIABLE, "1")
    drafted, plain = sets
    tally = Tally()

    @hypothesis_settings(
        max_examples=220,
        derandomize=True,
        database=None,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(MOVES, min_size=6, max_size=14))
    @example([FILLING] * 4)
    def converse(moves: list[Move]) -> None:
        session = Session(drafted)
        try:
            for move in moves:
                make(session, drafted, plain, move, tally)
        finally:
            session.close()

    converse()
    print(f"\n{tally}")
    assert tally.steps > 8000
    assert tally.compared > 10_000
    assert tally.accepted > 500
    assert tally.rejected > 500
    assert tally.reasons == {*FinishReason}


def test_the_checks_find_what_is_untrue(sets: tuple[LoadedSet, LoadedSet]) -> None:
    loaded, _ = sets
    session = Session(loaded)
    settings = GenerationSettings(Sampling(temperature=0), Speculation(Policy.parse("fixed:3")), 8)
    answer(session.generate([5, 6, 7], settings, never()))
    tokens = list(session.tokens)
    context, sequence = loaded.context, session._sequence

    def check(committed: list[int]) -> None:
        check_step(context, sequence, committed, loaded.panel, ended=False)

    check(tokens)
    with pytest.raises(AssertionError, match="0 pending instead of one"):
        check(tokens[:-1])
    with pytest.raises(AssertionError, match="near has heard of other tokens"):
        check([9, *tokens[1:]])
    context._lengths[sequence] -= 1
    with pytest.raises(AssertionError, match="counted in the cache"):
        check(tokens)
    context._lengths[sequence] += 1
    drafter = loaded.panel.models[0]
    drafter._mirror.predictions.append(None)  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="near mirrors"):
        check(tokens)
    drafter._mirror.predictions.pop()  # type: ignore[attr-defined]
    check(tokens)
    session.close()
