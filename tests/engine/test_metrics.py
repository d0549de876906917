"""The pace of an answer; its counters are tested with the pipeline that makes them."""

from __future__ import annotations

import pytest

from engine.metrics import Pace


def test_the_pace_forgets_and_starts_unknown() -> None:
    pace = Pace()
    assert pace.tokens_per_ms is None
    pace.learn(4, 20.0)
    assert pace.tokens_per_ms == 0.2
    for _ in range(200):
        pace.learn(1, 10.0)
    assert pace.tokens_per_ms == pytest.approx(0.1, rel=1e-3)


def test_steps_that_are_alike_leave_no_doubt_and_steps_that_differ_leave_some() -> None:
    steady, uneven = Pace(), Pace()
    assert steady.uncertainty is None
    for step in range(400):
        steady.learn(2, 10.0)
        uneven.learn(1 + 2 * (step % 2), 10.0)
    assert steady.uncertainty == pytest.approx(0, abs=1e-6)
    # As many steps count as 1.95 ÷ 0.05, each with a deviation of half its mean.
    assert uneven.uncertainty == pytest.approx(1.96 * 0.5 / 39**0.5, rel=0.05)
