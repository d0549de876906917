"""Which draft models a pool drafts with: those that pay for a batch of that size, tried within a budget."""

from __future__ import annotations

from engine.acceptance import AcceptanceModel
from engine.config import LookAhead
from engine.cost import CostModel
from engine.pool_plan import NO_MODEL, PoolPlanner, Way


def make_cost(row_ms: float) -> CostModel:
    """A target whose passes of one token take 40 ms, and each further row so much more."""
    cost = CostModel()
    for tokens in range(1, 65):
        cost.set_base(tokens, 40.0 + row_ms * (tokens - 1))
    cost.set_drafter("fast", {1: 4.0})
    return cost


def rounds(planner: PoolPlanner, requests: int, drafted: tuple[float, float], plain_ms: float) -> list[Way]:
    """What is chosen in 600 rounds, where one with the drafter brings so many tokens a request in so many ms."""
    ways = []
    for _ in range(600):
        plan = planner.plan(requests, 100, lambda _names: True)
        tokens, elapsed_ms = drafted if plan.way.drafters else (1.0, plain_ms)
        planner.learn(plan, round(tokens * requests), elapsed_ms)
        ways.append(plan.way)
    return ways


def make_planner(overlap: LookAhead = LookAhead.OFF) -> PoolPlanner:
    return PoolPlanner(("fast",), make_cost(2.0), AcceptanceModel(("ngram",)), overlap, runs_apart=False)


def test_a_drafter_that_pays_is_found_and_kept() -> None:
    ways = rounds(make_planner(), 2, (3.0, 60.0), 42.0)
    assert ways[0] != ways[-1] or ways[0].drafters
    assert sum(way == Way(("fast",)) for way in ways[-100:]) > 95


def test_a_drafter_that_does_not_pay_rests_but_for_trials_within_the_budget() -> None:
    ways = rounds(make_planner(), 8, (1.2, 200.0), 60.0)
    tried = sum(way != NO_MODEL for way in ways)
    assert 0 < tried < 12
    # Each trial lost 125 ms: of 1 % of the time, of what there is to begin with, and once more than there was.
    assert tried * 125.0 <= 0.01 * sum(200.0 if way.drafters else 60.0 for way in ways) + 50.0 + 125.0


def test_what_pays_for_few_may_rest_for_many() -> None:
    planner = make_planner()
    few = rounds(planner, 2, (3.0, 60.0), 42.0)
    many = rounds(planner, 12, (1.2, 300.0), 60.0)
    assert few[-1] == Way(("fast",))
    assert many[-1] == NO_MODEL


def test_drafting_beside_the_pass_needs_two_requests() -> None:
    planner = make_planner(LookAhead.ON)
    alone = rounds(planner, 1, (3.0, 60.0), 42.0)
    assert set(alone) == {NO_MODEL}
    assert rounds(planner, 2, (3.0, 60.0), 42.0)[-1] == Way(("fast",), overlaps=True)


def test_reading_is_worth_it_where_the_rest_of_the_answer_is_long() -> None:
    planner = make_planner()
    assert planner.worth_reading(2, 100, 400, {"fast": 500.0}) == ("fast",)
    assert planner.worth_reading(2, 100, 3, {"fast": 500.0}) == ()


def test_passes_of_several_requests_are_foretold_from_those_of_one() -> None:
    cost = make_cost(2.0)
    assert cost.verify_ms(8, 0, sequences=4) == cost.verify_ms(8, 0)
    for _ in range(200):
        cost.observe_verify(4, 0, 69.0, sequences=4)
    # What was seen is believed, and sizes in its neighbourhood are dearer by as much.
    assert abs(cost.verify_ms(4, 0, sequences=4) - 69.0) < 1.0
    dearer = cost.verify_ms(4, 0, sequences=4) / cost.verify_ms(4, 0)
    assert abs(cost.verify_ms(8, 0, sequences=4) / cost.verify_ms(8, 0) - dearer) < 0.01
