"""The check that drafting changes nothing: it finds the real program identical, and a divergence where there is one."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from engine.config import Policy, Sampling, Speculation
from engine.loader import LoadedSet
from engine.lossless import (
    CLOSE_MARGIN,
    Divergence,
    PlainAnswer,
    answer_drafted,
    answer_plainly,
    first_divergence,
    margin,
)
from engine.runtime.context import Context
from engine.runtime.sampler import Sampler
from tests.engine.conftest import GREEDY, never, tokens_of

PLAIN = PlainAnswer((5, 6, 7), (3.0, 0.2, 1.0, 0.4))
FIXED = Speculation(Policy.parse("fixed:3"))


@pytest.mark.parametrize(
    ("drafted", "expected"),
    [
        ((5, 6, 7), None),
        ((5, 9, 7), Divergence(1, 6, 9, 0.2)),
        ((9, 9, 9), Divergence(0, 5, 9, 3.0)),
        ((5, 6), Divergence(2, 7, None, 1.0)),
        ((5, 6, 7, 8), Divergence(3, None, 8, 0.4)),
    ],
)
def test_the_first_difference_is_found_with_the_margin_there(
    drafted: Sequence[int], expected: Divergence | None
) -> None:
    assert first_divergence(PLAIN, drafted) == expected


def test_close_calls_are_counted() -> None:
    assert PLAIN.close_calls == 2
    assert margin(np.array([1.0, -2.0, 1.0 + CLOSE_MARGIN, 0.0], np.float32)) == CLOSE_MARGIN


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8, seed=4)], ids=["greedy", "seeded"])
def test_the_real_program_is_identical_and_has_a_margin_for_every_choice(small: LoadedSet, sampling: Sampling) -> None:
    prompt = tokens_of(small, "The harbour was quiet when the first boats came in, and")
    plain = answer_plainly(small, prompt, sampling, 24, never())
    drafted = answer_drafted(small, prompt, sampling, FIXED, 24, never())
    assert plain is not None
    assert drafted is not None
    assert len(plain.tokens) == len(plain.margins) == 24
    assert min(plain.margins) >= 0
    assert drafted.metrics.accepted > 0
    assert first_divergence(plain, drafted.token_ids) is None


def test_a_program_that_takes_what_is_drafted_is_found_out(small: LoadedSet, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = tokens_of(small, "one two three four one two three five one two three")
    plain = answer_plainly(small, prompt, GREEDY, 24, never())
    match = Sampler.match

    def credulous(self: Sampler, context: Context, draft: Sequence[int], first_output: int) -> tuple[int, int]:
        accepted, final = match(self, context, draft, first_output)
        return (accepted + 1, final) if accepted < len(draft) else (accepted, final)

    monkeypatch.setattr(Sampler, "match", credulous)
    drafted = answer_drafted(small, prompt, GREEDY, FIXED, 24, never())
    assert plain is not None
    assert drafted is not None
    divergence = first_divergence(plain, drafted.token_ids)
    assert divergence is not None
    position = divergence.position
    assert drafted.token_ids[:position] == plain.tokens[:position]
    assert drafted.token_ids[position] == divergence.drafted_token != divergence.plain_token == plain.tokens[position]
    assert divergence.margin == plain.margins[position] > 0


def test_a_comparison_that_is_cancelled_says_nothing(small: LoadedSet) -> None:
    cancel = threading.Event()
    cancel.set()
    assert answer_plainly(small, [5, 6], GREEDY, 4, cancel) is None
    assert answer_drafted(small, [5, 6], GREEDY, FIXED, 4, cancel) is None
