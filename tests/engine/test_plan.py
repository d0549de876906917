"""The planners, on a simulated clock: what they spend on trying, when they switch, and who catches up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from engine.config import KvType, LookAhead, Policy, Speculation
from engine.cost import CALIBRATED_SIZES, DRAFT_START_PASSES, CostModel
from engine.drafters.base import Score
from engine.learning import Learning
from engine.length import LONGEST_DRAFT
from engine.plan import (
    CATCH_UP_SLICE_TOKENS,
    FIRST_CREDIT_MS,
    HEARING_SHARE,
    LONGEST_HEARING_PROMPT_TOKENS,
    MOST_HEARING_SLICES,
    PROBE_SHARE,
    READY_BEHIND_TOKENS,
    Plan,
    Planner,
    Situation,
)
from engine.setting import Setting
from engine.types import VotedDraft

CHAINS_ONLY = Setting(KvType.F16, is_exact=None, pass_sizes=None, allows_branches=False)
PLAIN_MS = 20.0
DRAFT_MS = 8.0

Outcome = Callable[[Plan, int], tuple[int, float]]
"""Tokens and time of a planned step, by its number."""


def situation(step: int = 1, room: int = 15, behind: Mapping[str, int] | None = None, **changes: object) -> Situation:
    values = {
        "context_tokens": 100,
        "room_tokens": room,
        "emitted_tokens": step,
        "remaining_tokens": None,
        "hint": VotedDraft(),
        "behind_tokens": behind or {},
    }
    return Situation(**(values | changes))  # type: ignore[arg-type]


def a_learning(names: Sequence[str], draft_ms: float = DRAFT_MS, read_ms: float | None = None) -> Learning:
    cost = CostModel()
    for size in CALIBRATED_SIZES:
        cost.set_base(size, PLAIN_MS * (0.8 + 0.2 * size))
    for name in names:
        cost.observe_draft([name], 1, (1 + DRAFT_START_PASSES) * draft_ms)
        if read_ms is not None:
            cost.observe_read(name, 1, read_ms)
    return Learning(cost, ["ngram"], names, runs_apart=False, setting=CHAINS_ONLY)


@dataclass
class Simulation:
    """Many steps of the auto policy with made-up outcomes."""

    names: tuple[str, ...]
    look_ahead: LookAhead = LookAhead.AUTO
    time_ms: float = 0.0
    steps: int = 0
    picked: list[tuple[str, ...]] = field(default_factory=list)
    believed_best: list[tuple[str, ...]] = field(default_factory=list)
    """What was picked in the steps that tried nothing."""

    def __post_init__(self) -> None:
        self.learning = a_learning(self.names)
        self.planner = self.learning.planner(Speculation(look_ahead=self.look_ahead))

    def run(self, steps: int, outcome: Outcome, hint: VotedDraft | None = None) -> None:
        for _ in range(steps):
            self.steps += 1
            where = situation(self.steps, behind=dict.fromkeys(self.names, 1), hint=hint or VotedDraft())
            plan = self.planner.plan(where)
            tokens, step_ms = outcome(plan, self.steps)
            self.planner.learn(plan, tokens, step_ms)
            self.time_ms += step_ms
            self.picked.append(plan.drafters)
            if not plan.is_probe:
                self.believed_best.append(plan.drafters)


def hostile(plan: Plan, _step: int) -> tuple[int, float]:
    """Drafts cost time and are never accepted."""
    loss_ms = len(plan.drafters) * DRAFT_MS * (2 if plan.look_ahead else 1) + PLAIN_MS
    return 1, PLAIN_MS + (loss_ms if plan.drafters else 0)


def helpful(plan: Plan, _step: int) -> tuple[int, float]:
    return (3, 2 * PLAIN_MS) if plan.drafters else (1, PLAIN_MS)


@pytest.mark.parametrize("names", [("a",), ("a", "b", "c"), ("a", "b", "c", "d")])
def test_trying_hostile_drafters_costs_a_small_share_and_a_start(names: tuple[str, ...]) -> None:
    simulation = Simulation(names)
    simulation.run(2000, hostile)
    start_ms = simulation.time_ms - 2000 * PLAIN_MS
    assert start_ms <= 0.10 * 2000 * PLAIN_MS
    before_ms = simulation.time_ms
    simulation.run(10_000, hostile)
    later_ms = simulation.time_ms - before_ms
    assert later_ms <= (1 + 1.25 * PROBE_SHARE) * 10_000 * PLAIN_MS  # what a probe will cost is foretold roughly


def test_what_was_never_tried_is_only_tried_within_the_budget() -> None:
    simulation = Simulation(("a", "b", "c"))
    simulation.run(100, hostile)
    assert set(simulation.believed_best) <= {("a",), ()}
    assert Counter(simulation.believed_best)["a",] <= 5
    start_ms = simulation.time_ms - 100 * PLAIN_MS
    assert start_ms <= 300  # a guess that fails wholly costs more than was foretold of it


def test_trying_never_stops_though() -> None:
    simulation = Simulation(("a", "b"))
    simulation.run(4000, hostile)
    late = Counter(simulation.picked[2000:])
    assert late[()] > 1900
    assert late["a",] >= 1
    assert late["b",] >= 1
    assert late["a", "b"] >= 1


def test_what_cannot_pay_is_tried_half_as_often() -> None:
    unknown, hopeless = Simulation(("a",), LookAhead.OFF), Simulation(("a",), LookAhead.OFF)
    hopeless.learning.acceptance.hear({"a": Score(3, 300)})
    tries = []
    for simulation in (unknown, hopeless):
        simulation.run(8000, hostile)
        tries.append(Counter(simulation.picked[4000:])["a",])
    assert 0 < tries[1] <= 0.6 * tries[0]


def test_a_drafter_that_helps_is_used_nearly_always_and_a_change_rests_it() -> None:
    simulation = Simulation(("a",), LookAhead.OFF)
    simulation.run(300, helpful)
    assert Counter(simulation.picked[100:])["a",] >= 197  # plain decoding is timed now and then
    simulation.run(300, hostile)
    assert Counter(simulation.picked[400:])[()] >= 180


def test_a_drafter_that_begins_to_help_is_switched_on_again() -> None:
    simulation = Simulation(("a",), LookAhead.OFF)
    simulation.run(500, hostile)
    assert Counter(simulation.picked[-100:])[()] >= 95
    simulation.run(1500, helpful)
    assert Counter(simulation.picked[-100:])["a",] >= 98


def test_plain_decoding_is_timed_again_now_and_then_while_drafting_pays() -> None:
    simulation = Simulation(("a",), LookAhead.OFF)
    simulation.run(2000, helpful)
    trials = [step for step, names in enumerate(simulation.picked) if not names]
    assert 10 <= len(trials) <= 25


def test_plain_decoding_needs_no_trial_where_plain_passes_happen_anyway() -> None:
    learning = a_learning(["a"])
    planner = learning.planner(Speculation())
    for step in range(1, 400):
        plan = planner.plan(situation(step, behind={"a": 1}))
        assert plan.length > 0
        planner.learn(plan, 1, PLAIN_MS)
        learning.cost.observe_verify(1, 100, PLAIN_MS)


@dataclass
class Conversation:
    """Answers of 200 steps by one drafter, which must read each prompt and falls behind while it rests."""

    prompt_tokens: int
    read_ms: float
    time_ms: float = 0.0
    steps: int = 0

    def __post_init__(self) -> None:
        self.learning = a_learning(["a"], read_ms=self.read_ms)
        self.planner = self.learning.planner(Speculation(look_ahead=LookAhead.OFF))

    def answer(self, outcome: Outcome) -> int:
        """Gives the number of steps that the drafter took part in."""
        behind = self.prompt_tokens
        drafted = 0
        for step in range(200):
            self.steps += 1
            plan = self.planner.plan(situation(step, behind={"a": behind}))
            if plan.catch_up:
                read = min(behind, CATCH_UP_SLICE_TOKENS)
                behind -= read
                self.time_ms += read * self.read_ms
                self.learning.acceptance.hear({"a": Score(read // 10 if outcome is hostile else read - 2, read)})
            elif plan.drafters:
                self.time_ms += behind * self.read_ms
                behind = 0
                drafted += 1
            tokens, step_ms = outcome(plan, self.steps)
            self.planner.learn(plan, tokens, step_ms)
            self.time_ms += step_ms
            behind += tokens
        return drafted


def test_a_drafter_that_once_disappointed_is_heard_again_in_later_answers() -> None:
    conversation = Conversation(prompt_tokens=80, read_ms=0.5)
    assert sum(conversation.answer(hostile) for _ in range(4)) < 40
    assert max(conversation.answer(helpful) for _ in range(4)) > 150


@pytest.mark.parametrize("prompt_tokens", [20, 80, 400])
def test_a_hostile_drafters_reading_is_paid_from_the_same_share(prompt_tokens: int) -> None:
    conversation = Conversation(prompt_tokens, read_ms=1.5)
    for _ in range(10):
        conversation.answer(hostile)
    start_ms, start_steps = conversation.time_ms, conversation.steps
    for _ in range(50):
        conversation.answer(hostile)
    plain_ms = (conversation.steps - start_steps) * PLAIN_MS
    assert conversation.time_ms - start_ms <= (1 + 1.5 * PROBE_SHARE) * plain_ms


def test_equals_are_not_flapped_between() -> None:
    """Two drafters as good as each other, times shaken by a tenth: the choice stays."""

    def shaken(plan: Plan, step: int) -> tuple[int, float]:
        return (3, 2 * PLAIN_MS * (1 + 0.1 * ((step * 7919) % 21 - 10) / 10)) if plan.drafters else (1, PLAIN_MS)

    simulation = Simulation(("a", "b"), LookAhead.OFF)
    simulation.run(1200, shaken)
    late = simulation.believed_best[200:]
    switches = sum(now != before for now, before in zip(late[1:], late, strict=False))
    assert switches <= len(late) / 50


def test_a_free_draft_and_none_are_weighed_apart() -> None:
    hint = VotedDraft((1,) * 6, (0.99,) * 6, (1.0,) * 6, (("ngram",),) * 6, "ngram")
    simulation = Simulation(("a",), LookAhead.OFF)

    def outcome(plan: Plan, _step: int) -> tuple[int, float]:
        return (6, 60.0) if not plan.drafters else (6, 60.0 + 6 * DRAFT_MS)

    simulation.run(200, helpful)
    simulation.run(200, outcome, hint)
    simulation.run(20, helpful)
    assert Counter(simulation.picked[100:200])["a",] >= 98
    assert Counter(simulation.picked[300:400])[()] >= 95
    assert Counter(simulation.picked[400:])["a",] >= 19


def test_no_draft_where_there_is_no_room() -> None:
    planner = a_learning(["a"]).planner(Speculation())
    plan = planner.plan(situation(room=0, behind={"a": 0}))
    assert (plan.drafters, plan.length, plan.look_ahead) == ((), 0, False)
    assert planner.plan(situation(room=2, behind={"a": 0})).length == 2


def test_the_probe_budget_starts_small() -> None:
    assert FIRST_CREDIT_MS <= 5 * PLAIN_MS


def test_the_first_answer_begins_with_the_drafter_that_was_heard_to_be_best() -> None:
    learning = a_learning(["a", "b", "c"])
    learning.acceptance.hear({"a": Score(140, 200), "b": Score(180, 200), "c": Score(160, 200)})
    planner = learning.planner(Speculation(look_ahead=LookAhead.OFF))
    plans = [planner.plan(situation(behind={"a": 1, "b": 1, "c": 1})) for _ in range(10)]
    assert next(plan for plan in plans if not plan.is_probe).drafters == ("b",)


def test_a_drafter_heard_to_be_better_is_gone_over_to_without_a_trial() -> None:
    simulation = Simulation(("a", "b"), LookAhead.OFF)
    simulation.run(30, helpful)
    used = simulation.picked[-1]
    other = ("b",) if used == ("a",) else ("a",)
    simulation.learning.acceptance.hear({used[0]: Score(140, 200), other[0]: Score(195, 200)})
    simulation.run(60, helpful)
    assert simulation.believed_best[-1] == other


# Catching up


TOO_DEAR_TO_TRY_MS = 2.2
"""At so much a token, 500 tokens are never read for a trial."""
SLICE_MS = CATCH_UP_SLICE_TOKENS * TOO_DEAR_TO_TRY_MS


def let_pass(planner: Planner, elapsed_ms: float) -> None:
    """A step that drafts nothing and takes so long."""
    planner.learn(Plan((), 0, False, (), ""), 1, elapsed_ms)


def test_a_resting_drafter_reads_along_until_it_was_heard() -> None:
    learning = a_learning(["a", "b"], read_ms=TOO_DEAR_TO_TRY_MS)
    planner = learning.planner(Speculation(look_ahead=LookAhead.OFF))
    ready = {"a": 1}
    assert planner.plan(situation(64, behind={**ready, "b": 500})).catch_up == (), "nothing was saved up for it"
    let_pass(planner, SLICE_MS / HEARING_SHARE)
    assert planner.plan(situation(60, behind={**ready, "b": 500})).catch_up == ()
    assert planner.plan(situation(64, behind={**ready, "b": 500})).catch_up == ("b",)
    let_pass(planner, SLICE_MS / HEARING_SHARE)
    too_long = 64 + LONGEST_HEARING_PROMPT_TOKENS + 1
    assert planner.plan(situation(64, behind={**ready, "b": too_long})).catch_up == ()
    learning.acceptance.hear({"b": Score(400, 600)})
    assert planner.plan(situation(64, behind={**ready, "b": 500})).catch_up == ()


def test_a_drafter_that_is_never_heard_does_not_read_for_ever() -> None:
    planner = a_learning(["a", "b"], read_ms=TOO_DEAR_TO_TRY_MS).planner(Speculation(look_ahead=LookAhead.OFF))
    heard = 0
    for _ in range(3 * MOST_HEARING_SLICES):
        let_pass(planner, SLICE_MS / HEARING_SHARE)
        heard += planner.plan(situation(64, behind={"a": 1, "b": 500})).catch_up == ("b",)
    assert heard == MOST_HEARING_SLICES


def test_hearing_takes_a_small_share_of_time() -> None:
    learning = a_learning(["a", "b", "c"], read_ms=TOO_DEAR_TO_TRY_MS)
    planner = learning.planner(Speculation(look_ahead=LookAhead.OFF))
    slices = 0
    for _ in range(5000):
        let_pass(planner, PLAIN_MS)
        slices += bool(planner.plan(situation(64, behind={"a": 1, "b": 500, "c": 500})).catch_up)
    assert 1 <= slices <= HEARING_SHARE * 5000 * PLAIN_MS / SLICE_MS


def test_a_drafter_that_is_mostly_wrong_is_not_heard_for_long() -> None:
    learning = a_learning(["a", "b"], read_ms=TOO_DEAR_TO_TRY_MS)
    planner = learning.planner(Speculation(look_ahead=LookAhead.OFF))
    learning.acceptance.hear({"b": Score(15, 60)})
    let_pass(planner, SLICE_MS / HEARING_SHARE)
    assert planner.plan(situation(64, behind={"a": 1, "b": 500})).catch_up == ()


def auto_plan(learning: Learning, where: Situation) -> Plan:
    return learning.planner(Speculation(look_ahead=LookAhead.OFF)).plan(where)


def test_nobody_reads_before_the_first_token() -> None:
    behind = {"a": READY_BEHIND_TOKENS + 1}
    for text in ("auto", "fixed:3", "minions", "adaedl"):
        planner = a_learning(["a"], 1.0, 0.01).planner(Speculation(Policy.parse(text)))
        plan = planner.plan(situation(0, behind=behind))
        assert (plan.catch_up, plan.drafters) == ((), ()), text
        assert planner.plan(situation(1, behind=behind)).catch_up == ("a",), text


def test_reading_must_be_repaid_by_the_rest_of_the_answer() -> None:
    where = situation(1, behind={"a": 1000})
    assert auto_plan(a_learning(["a"], 1.0, 0.05), where).catch_up == ("a",)
    assert auto_plan(a_learning(["a"], 1.0, 50.0), where).catch_up == ()
    nearly_done = situation(90, behind={"a": 1000}, remaining_tokens=3)
    assert auto_plan(a_learning(["a"], 1.0, 0.3), nearly_done).catch_up == ()


def test_of_two_late_drafters_the_one_sooner_repaid_reads_first() -> None:
    where = situation(1, behind={"a": 2000, "b": 200})
    assert auto_plan(a_learning(["a", "b"], 1.0, 0.05), where).catch_up == ("b",)


def test_a_drafter_barely_behind_drafts_at_once() -> None:
    plan = (
        a_learning(["a"])
        .planner(Speculation(Policy.parse("fixed:3")))
        .plan(situation(0, behind={"a": READY_BEHIND_TOKENS}))
    )
    assert (plan.drafters, plan.catch_up) == (("a",), ())


# The comparison policies


def test_comparison_policies_use_every_drafter_that_is_ready() -> None:
    planner = a_learning(["a", "b", "c"]).planner(Speculation(Policy.parse("fixed:5"), look_ahead=LookAhead.ON))
    plan = planner.plan(situation(5, behind={"a": 1, "b": 500, "c": 2}))
    assert plan.drafters == ("a", "c")
    assert plan.catch_up == ("b",)
    assert (plan.length, plan.look_ahead) == (5, True)


def test_they_run_ahead_only_when_told_to() -> None:
    for look_ahead in (LookAhead.AUTO, LookAhead.OFF):
        planner = a_learning(["a"]).planner(Speculation(Policy.parse("fixed:5"), look_ahead=look_ahead))
        assert not planner.plan(situation(behind={"a": 1})).look_ahead


def test_plain_asks_nobody() -> None:
    plan = a_learning(["a"]).planner(Speculation(Policy.parse("off"))).plan(situation(behind={"a": 900}))
    assert (plan.drafters, plan.length, plan.catch_up) == ((), 0, ())


def test_auto_drafts_at_most_what_is_calibrated() -> None:
    assert auto_plan(a_learning(["a"]), situation(room=500, behind={"a": 0})).length == LONGEST_DRAFT


def test_one_learner_serves_all_answers_with_the_same_settings() -> None:
    learning = a_learning(["a"])
    assert learning.planner(Speculation()) is learning.planner(Speculation())
    assert learning.rule(Policy.parse("minions")) is learning.rule(Policy.parse("minions"))
    assert learning.rule(Policy.parse("fixed:1")) is not learning.rule(Policy.parse("fixed:2"))


def test_time_is_worth_the_best_rate_of_the_same_kind_of_situation() -> None:
    hint = VotedDraft((1,) * 6, (0.99,) * 6, (1.0,) * 6, (("ngram",),) * 6, "ngram")
    simulation = Simulation(("a",), LookAhead.OFF)
    simulation.run(200, helpful)
    simulation.run(200, lambda _plan, _step: (12, 60.0), hint)
    ready = {"a": 1}
    assert simulation.planner.plan(situation(behind=ready)).pace == pytest.approx(3 / (2 * PLAIN_MS), rel=0.02)
    assert simulation.planner.plan(situation(behind=ready, hint=hint)).pace == pytest.approx(12 / 60.0, rel=0.02)


def test_time_is_never_worth_less_than_plain_decoding_gives() -> None:
    simulation = Simulation(("a",), LookAhead.OFF)
    simulation.run(200, lambda _plan, _step: (1, 10 * PLAIN_MS))
    cost = simulation.learning.cost
    plain_pace = 1 / (cost.verify_ms(1, 100) + cost.overhead_ms)
    assert simulation.planner.plan(situation(behind={"a": 1})).pace == pytest.approx(plain_pace)
