"""Places in a pass go to the likeliest tokens of all requests, and there are as many as pay."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from engine.marginal import share_out


def flat(_count: int) -> float:
    return 10.0


def test_where_a_place_costs_nothing_all_are_sent() -> None:
    assert share_out([(0.9, 0.5), (0.1,), ()], 3.0, flat, 8) == [2, 1, 0]


def test_where_a_place_costs_a_pass_none_is_sent() -> None:
    assert share_out([(0.9, 0.8), (0.9,)], 2.0, lambda count: 10.0 * (2 + count) / 2, 8) == [0, 0]


def test_the_easiest_request_gets_the_longest_draft() -> None:
    survivals = [(0.95, 0.9, 0.85, 0.8), (0.6, 0.3, 0.1), (0.2,)]
    assert share_out(survivals, 3.0, lambda count: 10.0 + 1.4 * count, 8) == [4, 1, 0]


def test_drafts_shrink_as_the_batch_grows() -> None:
    """Beyond some rows a pass costs by the row, as on every machine."""
    own = (0.8, 0.64, 0.51, 0.41)

    def sent(requests: int) -> float:
        counts = share_out([own] * requests, float(requests), lambda count: max(20.0, 2.5 * (requests + count)), 64)
        return sum(counts) / requests

    assert sent(1) > sent(4) > sent(16) == 0


def test_a_dearer_size_is_passed_over_for_a_cheaper_larger_one() -> None:
    costs = {0: 10.0, 1: 16.0, 2: 22.0, 3: 16.0, 4: 23.0}
    assert share_out([(0.9, 0.8, 0.7, 0.6)], 1.0, costs.__getitem__, 4) == [3]
    # And one that must not be sent, however good it would be.
    assert share_out([(0.9, 0.8, 0.7)], 1.0, lambda count: math.inf if count == 3 else costs[count], 4) == [2]


@given(
    st.lists(st.lists(st.floats(0, 1), max_size=6), min_size=1, max_size=6),
    st.lists(st.floats(0.5, 10), min_size=40, max_size=40),
    st.integers(0, 30),
)
def test_no_other_choice_of_places_brings_more(drafts: list[list[float]], steps_ms: list[float], most: int) -> None:
    survivals = [sorted(own, reverse=True) for own in drafts]
    requests = float(len(survivals))
    counts = share_out(survivals, requests, lambda count: 5.0 + sum(steps_ms[:count]), most)
    assert sum(counts) <= most
    assert all(count <= len(own) for count, own in zip(counts, survivals, strict=True))

    def rate(gained: float, count: int) -> float:
        return (requests + gained) / (5.0 + sum(steps_ms[:count]))

    chosen = sum(sum(own[:count]) for own, count in zip(survivals, counts, strict=True))
    ranked = sorted((survival for own in survivals for survival in own), reverse=True)
    best = max(rate(sum(ranked[:count]), count) for count in range(min(most, len(ranked)) + 1))
    assert math.isclose(rate(chosen, sum(counts)), best)
