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
