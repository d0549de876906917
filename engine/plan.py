"""What the next step does: which model drafters run, how far, whether they run ahead, and who catches up.

`FullPlanner` uses every drafter always; it serves the comparison policies. `AutoPlanner` weighs drafter sets, and trees
against chains, by what steps with them really brought and took and, where there were few, by what costs and the
drafters' guesses let foresee, apart for each kind of situation (how promising the free draft is). It takes the one with
the most tokens per second, and spends at most a fixed share of its time on trying the others, and another on letting
drafters that rest read along, so that their guesses are known. Plain decoding is always among the choices.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from engine.acceptance import AcceptanceModel
from engine.config import LookAhead
from engine.cost import CostModel
from engine.length import LONGEST_DRAFT, LengthRule
from engine.types import VotedDraft

READY_BEHIND_TOKENS = 32
"""A drafter that is behind by no more reads it as part of drafting."""
CATCH_UP_SLICE_TOKENS = 128
"""A drafter further behind reads this much in one step, so that tokens keep coming."""
PROBE_SHARE = 0.01
"""At most this share of time goes into trying what is not believed best."""
FIRST_CREDIT_MS = 50.0
MOST_CREDIT_MS = 1000.0
LEAST_LOSS_MS = 1.0
ARM_MEMORY = 0.985
ARM_PRIOR_STEPS = 100.0
"""What a choice is foreseen to bring counts as so many steps with it, and ever less the more there were."""
SEEN_STEPS = 30.0
"""The rate of so many steps is what time is worth, whatever was foreseen."""
FREE_PRIOR_STEPS = 4.0
"""The same where no draft model takes part, or a tree is sent: of these little can be foreseen, and much is soon
seen."""
OPTIMISM_PRIOR_MS = 500.0
BLENDED_STEPS = 8
"""A choice that was not used is weighed anew this often."""
FORESEEN_STEPS = 25
"""What is foreseen is worked out anew this often."""
HEARD_TOKENS = 300
"""A draft model is let read along until it was heard on so many tokens of the target's: as one that rests it would
have to be tried in a hundred steps to be judged as well."""
HEARING_SHARE = 0.02
"""At most this share of time goes into that."""
MOST_HEARING_CREDIT_MS = 300.0
HEARING_SLICE_TOKENS = 64
MOST_HEARING_SLICES = 24
LONGEST_HEARING_PROMPT_TOKENS = 512
"""A longer prompt is not read for that alone."""
HOPELESS_PRICE = 2.0
"""A trial of what cannot pay, even if it is as good as it may turn out to be, is charged this many times."""
STALE_STEPS = 100
STALE_ARM_STEPS = 2.0
"""What a choice brought longer ago than this counts as so few steps: the task may have changed since."""
TREE_MARGIN = 1.03
"""A tree is believed to take so much longer than the chain it grew from, until it was seen to bring more."""
SWITCH_MARGIN = 1.03
"""A challenger must be faster by this factor: rates of some dozens of steps are no surer, and a rested drafter
has the prompt to read first."""
EXPECTED_ANSWER_TOKENS = 200
"""Assumed where no limit is set, when deciding whether reading a prompt repays a drafter."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known when a step is planned."""

    context_tokens: int
    room_tokens: int
    """Most tokens that may still be drafted: limits of the answer and of the context."""
    emitted_tokens: int
    remaining_tokens: int | None
    """Tokens until the answer's limit; None without one."""
    hint: VotedDraft
    """What the free drafters say."""
    behind_tokens: Mapping[str, int]
    """For each model drafter in working order, the committed tokens it has yet to read."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One step's decisions."""

    drafters: tuple[str, ...]
    """Model drafters that draft."""
    length: int
    """Most tokens to draft."""
    look_ahead: bool
    catch_up: tuple[str, ...]
    """Model drafters that read a slice of what they are behind by."""
    reason: str
    branches: bool = False
    """Whether side branches may be sent."""
    bucket: int = 0
    charged_ms: float | None = None
    """What a trial is expected to lose; None for what is no trial."""
    pace: float = 0.0
    """What a millisecond is worth in this step, in tokens: the best rate known for its situation. A token gained in a
    situation spares time in the same, so it is not weighed by the rate of others."""

    @property
    def is_probe(self) -> bool:
        """Whether it tries what is not believed best."""
        return self.charged_ms is not None


class Planner(ABC):
    """Plans steps and learns from what they brought."""

    @abstractmethod
    def plan(self, situation: Situation) -> Plan:
        """Decide the next step."""

    def learn(self, plan: Plan, emitted: int, step_ms: float) -> None:  # noqa: B027 - a fixed plan learns nothing
        """Hear what a planned step emitted, and its time without catching up."""


class FullPlanner(Planner):
    """Every drafter, always, as far as the length rule says."""

    def __init__(self, rule: LengthRule, look_ahead: LookAhead) -> None:
        self._rule = rule
        self._look_ahead = look_ahead is LookAhead.ON

    def plan(self, situation: Situation) -> Plan:
        length = min(self._rule.limit(), situation.room_tokens)
        if length == 0:
            return Plan((), 0, False, (), "no draft")
        ready, late = _by_readiness(situation)
        late = late if situation.emitted_tokens else ()
        return Plan(ready, length, self._look_ahead and bool(ready), late, f"length {length} by rule")


def _by_readiness(situation: Situation) -> tuple[tuple[str, ...], tuple[str, ...]]:
    behind = situation.behind_tokens
    ready = tuple(name for name, tokens in behind.items() if tokens <= READY_BEHIND_TOKENS)
    late = tuple(name for name, tokens in behind.items() if tokens > READY_BEHIND_TOKENS)
    return ready, late


@dataclass(slots=True)
class Budget:
    """Time saved up for what may bring nothing: a share of what steps take."""

    share: float
    most_ms: float
    credit_ms: float = 0.0

    def earn(self, elapsed_ms: float) -> None:
        self.credit_ms = min(self.credit_ms + self.share * elapsed_ms, self.most_ms)

    def allows(self, loss_ms: float) -> bool:
        return loss_ms <= self.credit_ms

    def charge(self, loss_ms: float) -> None:
        self.credit_ms -= loss_ms

    def settle(self, charged_ms: float, lost_ms: float) -> None:
        """Pay in full for what lost more than was foreseen and charged."""
        self.credit_ms -= max(0.0, lost_ms - charged_ms)


def trial_budget() -> Budget:
    """For trying what is not believed best."""
    return Budget(PROBE_SHARE, MOST_CREDIT_MS, FIRST_CREDIT_MS)


@dataclass(slots=True)
class Arm:
    """What steps with one choice brought and took, with forgetting."""

    steps: float = 0.0
    tokens: float = 0.0
    time_ms: float = 0.0
    last_tried: int = 0

    @property
    def tokens_per_ms(self) -> float:
        return self.tokens / self.time_ms

    def learn(self, tokens: int, elapsed_ms: float, step: int) -> None:
        memory = ARM_MEMORY
        if self.steps and step - self.last_tried > STALE_STEPS:
            memory = min(memory, STALE_ARM_STEPS / self.steps)
        self.steps = self.steps * memory + 1
        self.tokens = self.tokens * memory + tokens
        self.time_ms = self.time_ms * memory + elapsed_ms
        self.last_tried = step

    def loss_ms(self, best: Arm) -> float:
        """What one step with this choice is expected to cost more than its tokens would with the best."""
        return max((self.time_ms - self.tokens / best.tokens_per_ms) / self.steps, LEAST_LOSS_MS)


Option = TypeVar("Option")


def best_or_usual(arms: Mapping[Option, Arm], known: Iterable[Option], usual: Option) -> Option:
    """The fastest of those that are known; the usual one where that is hardly slower."""
    best = max(known, key=lambda option: arms[option].tokens_per_ms)
    if usual in arms and arms[best].tokens_per_ms < SWITCH_MARGIN * arms[usual].tokens_per_ms:
        return usual
    return best


def next_on_trial(arms: Mapping[Option, Arm], others: Iterable[Option]) -> Option:
    """The one whose turn it is: the longest untried, of these the fastest as far as is foreseen."""
    return min(others, key=lambda other: (arms[other].last_tried, -arms[other].tokens_per_ms))


class Choice(NamedTuple):
    """One way to draft."""

    drafters: tuple[str, ...] = ()
    look_ahead: bool = False
    branches: bool = False


NO_MODEL = Choice()
"""Only the free drafters."""


class _Foreseen(NamedTuple):
    tokens: float
    time_ms: float
    step: int

    @property
    def tokens_per_ms(self) -> float:
        return self.tokens / self.time_ms


@dataclass(slots=True)
class Optimism:
    """By how much steps with draft models take longer, for what they bring, than was foreseen of them.

    What was tried is then not thought worse than what was not, only because the one was seen and the other foreseen.
    """

    seen_ms: float = 0.0
    foreseen_ms: float = 0.0

    def learn(self, step_ms: float, foreseen_ms: float) -> None:
        """Take in a step, and what its tokens were foreseen to take."""
        self.seen_ms = self.seen_ms * ARM_MEMORY + step_ms
        self.foreseen_ms = self.foreseen_ms * ARM_MEMORY + foreseen_ms

    @property
    def factor(self) -> float:
        # With little seen yet it is near one.
        return (self.seen_ms + OPTIMISM_PRIOR_MS) / (self.foreseen_ms + OPTIMISM_PRIOR_MS)


_UNTRIED = Arm()


class AutoPlanner(Planner):
    """Chooses among drafter sets by measured value; one instance serves all answers of a loaded set."""

    def __init__(
        self,
        names: Sequence[str],
        cost: CostModel,
        acceptance: AcceptanceModel,
        look_ahead: LookAhead,
        *,
        runs_apart: bool,
        may_branch: bool,
    ) -> None:
        """Args:
        names: All model drafters.
        look_ahead: Whether running ahead is a choice, the only one, or none.
        may_branch: Whether token trees are a choice.
        runs_apart: Whether drafters have a processor of their own, so that running ahead is likely to pay.
        """
        self._cost = cost
        self._acceptance = acceptance
        self._runs_apart = runs_apart
        self._names = frozenset(names)
        self._choices = [NO_MODEL, *_choices(names, look_ahead, runs_apart=runs_apart, may_branch=may_branch)]
        self._arms: dict[tuple[Choice, int], Arm] = {}
        self._chosen: dict[int, Choice] = {}
        self._foreseen: dict[tuple[Choice, int], _Foreseen] = {}
        self._blended: dict[tuple[Choice, int], tuple[Arm, int]] = {}
        """What `_arm` found, and at which step."""
        self._optimism: dict[int, Optimism] = {}
        self._hearing = Budget(HEARING_SHARE, MOST_HEARING_CREDIT_MS)
        self._hearing_slices = dict.fromkeys(names, MOST_HEARING_SLICES)
        """For each drafter, how many more slices it may read only to be heard."""
        self._paying: dict[tuple[str, ...], tuple[bool, int]] = {}
        """What `_might_pay` found, and at which step."""
        self._trials = trial_budget()
        self._steps = 0
        self._latest = self._most_promising()
        """What a situation begins with whose kind was not met before; at first the drafter foreseen to be best."""
        self._plain_passes = 0
        self._plain_step = 0
        """How many passes of one token had been seen, and the step at which the last of them was."""

    def plan(self, situation: Situation) -> Plan:
        self._steps += 1
        bucket = self._bucket(situation.hint)
        ready, late = _by_readiness(situation)
        unready = self._names.difference(ready)
        available = [choice for choice in self._choices if unready.isdisjoint(choice.drafters)]
        arms = {choice: self._arm(choice, bucket, situation.context_tokens) for choice in available}
        best = self._best(arms, bucket)
        pace = max(self._seen_pace(arms, best, bucket), self._plain_pace(situation.context_tokens))
        length = min(LONGEST_DRAFT, situation.room_tokens)
        catch_up: tuple[str, ...] = ()
        if situation.emitted_tokens:
            catch_up = (
                self._worth_catching_up(situation, late, pace)
                or self._to_be_heard(situation, late)
                or self._read_for_trial(situation, late, arms[best])
            )
        charged_ms = self._plain_trial_ms(situation.context_tokens, pace)
        if charged_ms is not None:
            reason = "on trial: plain decoding"
            return Plan((), 0, False, catch_up, reason, bucket=bucket, charged_ms=charged_ms, pace=pace)
        choice, charged_ms = self._probe(arms, best, situation) or (best, None)
        return Plan(
            drafters=choice.drafters if length else (),
            length=length,
            look_ahead=choice.look_ahead and length > 0,
            catch_up=catch_up,
            reason=self._reason(choice.drafters, is_probe=charged_ms is not None),
            branches=choice.branches,
            bucket=bucket,
            charged_ms=charged_ms,
            pace=pace,
        )

    def _best(self, arms: Mapping[Choice, Arm], bucket: int) -> Choice:
        """The fastest of those that were tried here; what was not is believed in only as far as a trial goes."""
        usual = self._chosen.get(bucket, self._latest)
        known = [
            choice
            for choice, arm in arms.items()
            if arm.last_tried or choice in (usual, NO_MODEL) or self._is_heard(choice)
        ]
        best = best_or_usual(arms, known, usual)
        self._chosen[bucket] = best
        if best.drafters:
            self._latest = best
        return best

    def _seen_pace(self, arms: Mapping[Choice, Arm], best: Choice, bucket: int) -> float:
        """The rate of the best choice, as it was seen where it was used enough."""
        own = self._arms.get((best, bucket), _UNTRIED)
        return own.tokens_per_ms if own.steps >= SEEN_STEPS else arms[best].tokens_per_ms

    def _is_heard(self, choice: Choice) -> bool:
        """Whether it is known well enough without a trial: a single drafter that was heard on enough text."""
        if len(choice.drafters) != 1 or choice.look_ahead or choice.branches:
            return False
        return self._acceptance.heard_tokens(choice.drafters[0]) >= HEARD_TOKENS / 2

    def _most_promising(self) -> Choice:
        singles = [choice for choice in self._choices if len(choice.drafters) == 1 and not choice.branches]
        arms = {choice: self._arm(choice, 0, 0) for choice in singles}
        return max(singles, key=lambda choice: arms[choice].tokens_per_ms, default=NO_MODEL)

    def _plain_pace(self, context_tokens: int) -> float:
        return 1 / (self._cost.verify_ms(1, context_tokens) + self._cost.overhead_ms)

    def _plain_trial_ms(self, context_tokens: int, pace: float) -> float | None:
        """What is charged for timing plain decoding, which all choices are weighed against, where that was not done for
        long and can be now."""
        passes = self._cost.passes_seen(1)
        if passes != self._plain_passes:
            self._plain_passes, self._plain_step = passes, self._steps
        loss_ms = max(1 / self._plain_pace(context_tokens) - 1 / pace, LEAST_LOSS_MS)
        if self._steps - self._plain_step < STALE_STEPS or not self._trials.allows(loss_ms):
            return None
        self._trials.charge(loss_ms)
        self._plain_step = self._steps
        return loss_ms

    def learn(self, plan: Plan, emitted: int, step_ms: float) -> None:
        self._trials.earn(step_ms)
        self._hearing.earn(step_ms)
        if plan.charged_ms is not None:
            self._trials.settle(plan.charged_ms, step_ms - emitted / plan.pace)
        if plan.length:
            choice = Choice(plan.drafters, plan.look_ahead, plan.branches)
            foreseen = self._foreseen.get((choice, plan.bucket))
            if foreseen is not None and choice.drafters:
                self._optimism.setdefault(plan.bucket, Optimism()).learn(step_ms, emitted / foreseen.tokens_per_ms)
            self._arms.setdefault((choice, plan.bucket), Arm()).learn(emitted, step_ms, self._steps)
            self._blended.pop((choice, plan.bucket), None)

    def _bucket(self, hint: VotedDraft) -> int:
        """How promising the free draft is: 0 nothing, 1 something, 2 several tokens likely."""
        expected, survival = 0.0, 1.0
        for probability in self._acceptance.voted(hint):
            survival *= probability
            expected += survival
        return 0 if expected < 0.4 else 1 if expected < 2 else 2

    def _arm(self, choice: Choice, bucket: int, context_tokens: int) -> Arm:
        """What steps with this choice brought, what is foreseen of it among them."""
        blended = self._blended.get((choice, bucket))
        if blended is not None and self._steps - blended[1] < BLENDED_STEPS:
            return blended[0]
        foreseen = self._foreseen.get((choice, bucket))
        if foreseen is None or self._steps - foreseen.step >= FORESEEN_STEPS:
            mean = self._acceptance.general(choice.drafters) if choice.drafters else 0.0
            tokens, elapsed_ms = self._foresee(choice, bucket, context_tokens, mean)
            foreseen = self._foreseen[choice, bucket] = _Foreseen(tokens, elapsed_ms, self._steps)
        own = self._arms.get((choice, bucket), _UNTRIED)
        prior_steps = ARM_PRIOR_STEPS if choice.drafters and not choice.branches else FREE_PRIOR_STEPS
        weight = prior_steps**2 / (prior_steps + own.steps)
        optimism = self._optimism[bucket].factor if choice.drafters and bucket in self._optimism else 1.0
        arm = Arm(
            own.steps + weight,
            own.tokens + weight * foreseen.tokens,
            own.time_ms + weight * foreseen.time_ms * optimism,
            own.last_tried,
        )
        self._blended[choice, bucket] = arm, self._steps
        return arm

    def _foresee(self, choice: Choice, bucket: int, context_tokens: int, mean: float) -> tuple[float, float]:
        """Tokens and time of a step nobody has tried yet, from cost curves and the mean acceptance of its drafters."""
        names = choice.drafters
        verify = self._cost.curve(context_tokens, LONGEST_DRAFT + 1)
        free_tokens = (0.0, 0.8, 3.0)[bucket]
        # Hidden behind the pass when the processors differ; in each other's way when they are the same.
        hidden = (0.3 if self._runs_apart else 1.5) if choice.look_ahead else 1.0
        best = (1 + free_tokens, verify[round(free_tokens)] + self._cost.overhead_ms)
        drafting = self._cost.drafting_curve(names, LONGEST_DRAFT if names else 0)
        gained, survival = 0.0, 1.0
        for length in range(1, len(drafting)):
            survival *= mean
            gained += survival
            tokens = 1 + max(gained, free_tokens)
            elapsed_ms = verify[length] + hidden * drafting[length] + self._cost.overhead_ms
            if length == 1 or tokens / elapsed_ms > best[0] / best[1]:
                best = (tokens, elapsed_ms)
        tokens, elapsed_ms = best
        return tokens, elapsed_ms * TREE_MARGIN if choice.branches else elapsed_ms

    def _worth_catching_up(self, situation: Situation, late: Sequence[str], pace: float) -> tuple[str, ...]:
        """The late drafter whose reading is repaid soonest, if the rest of the answer repays it at all."""
        remaining = situation.remaining_tokens
        if remaining is None:
            remaining = max(EXPECTED_ANSWER_TOKENS - situation.emitted_tokens, EXPECTED_ANSWER_TOKENS // 4)
        best: tuple[float, tuple[str, ...]] = (0.0, ())
        for name in late:
            arm = self._arm(Choice((name,)), 0, situation.context_tokens)
            saved_ms = remaining * (1 / pace - 1 / arm.tokens_per_ms)
            profit_ms = saved_ms - self._reading_ms(name, situation)
            best = max(best, (profit_ms, (name,)))
        return best[1]

    def _to_be_heard(self, situation: Situation, late: Sequence[str]) -> tuple[str, ...]:
        """A late drafter of which too little is known, when there is a slice of the answer for it to read."""
        heard_tokens = {name: self._acceptance.heard_tokens(name) for name in late}
        for name in sorted(late, key=heard_tokens.__getitem__):
            behind_tokens = situation.behind_tokens[name]
            slice_ms = min(behind_tokens, CATCH_UP_SLICE_TOKENS) * self._cost.read_ms(name)
            if (
                self._hearing_slices[name]
                and self._hearing.allows(slice_ms)
                and heard_tokens[name] < HEARD_TOKENS
                and min(behind_tokens, situation.emitted_tokens) >= HEARING_SLICE_TOKENS
                and behind_tokens - situation.emitted_tokens <= LONGEST_HEARING_PROMPT_TOKENS
                and self._might_pay((name,), situation.context_tokens)
            ):
                self._hearing_slices[name] -= 1
                self._hearing.charge(slice_ms)
                return (name,)
        return ()

    def _might_pay(self, names: tuple[str, ...], context_tokens: int) -> bool:
        """Whether drafters could be the best where look-ups say nothing, were they as good as they may yet turn out."""
        known = self._paying.get(names)
        if known is not None and self._steps - known[1] < FORESEEN_STEPS:
            return known[0]
        tokens, elapsed_ms = self._foresee(Choice(names), 0, context_tokens, self._acceptance.at_best(names))
        usual = self._arm(self._chosen.get(0, NO_MODEL), 0, context_tokens)
        might_pay = tokens / elapsed_ms > SWITCH_MARGIN * usual.tokens_per_ms
        self._paying[names] = might_pay, self._steps
        return might_pay

    def _trial_price(self, names: tuple[str, ...], context_tokens: int) -> float:
        """How much dearer than it is a trial is counted: what cannot be expected to pay is tried seldom, but is tried,
        for the text may change."""
        return 1.0 if self._might_pay(names, context_tokens) else HOPELESS_PRICE

    def _read_for_trial(self, situation: Situation, late: Sequence[str], best: Arm) -> tuple[str, ...]:
        """A late drafter that can be read and tried from what was saved up; otherwise it would never be heard again."""
        arms = {name: self._arm(Choice((name,)), 0, situation.context_tokens) for name in late}
        for name in sorted(late, key=lambda name: arms[name].last_tried):
            reading_ms = self._reading_ms(name, situation)
            price = self._trial_price((name,), situation.context_tokens)
            if self._trials.allows(price * (reading_ms + arms[name].loss_ms(best))):
                slice_share = min(1.0, CATCH_UP_SLICE_TOKENS / situation.behind_tokens[name])
                self._trials.charge(price * reading_ms * slice_share)
                return (name,)
        return ()

    def _reading_ms(self, name: str, situation: Situation) -> float:
        return situation.behind_tokens[name] * self._cost.read_ms(name)

    def _probe(self, arms: Mapping[Choice, Arm], best: Choice, situation: Situation) -> tuple[Choice, float] | None:
        """Another choice whose turn it is to be tried, and what is charged for it, when the saved-up time allows."""
        others = [choice for choice in arms if choice != best and choice.drafters]
        if not others or situation.room_tokens == 0:
            return None
        choice = next_on_trial(arms, others)
        loss_ms = arms[choice].loss_ms(arms[best]) + sum(self._reading_ms(name, situation) for name in choice.drafters)
        loss_ms *= self._trial_price(choice.drafters, situation.context_tokens)
        if not self._trials.allows(loss_ms):
            return None
        self._trials.charge(loss_ms)
        return choice, loss_ms

    def _reason(self, names: Sequence[str], *, is_probe: bool) -> str:
        if is_probe:
            return f"on trial: {', '.join(names)}"
        if names:
            return f"most tokens per second: {', '.join(names)}"
        if len(self._choices) == 1:
            return "only text look-up drafts: no draft model is loaded"
        return "only text look-up drafts: draft models cost more than they save here"


def _choices(names: Sequence[str], look_ahead: LookAhead, *, runs_apart: bool, may_branch: bool) -> Iterator[Choice]:
    """All subsets of up to three drafters; of more, each alone and all together. Trees of one drafter and of all."""
    if len(names) <= 3:
        sets = [subset for size in range(1, len(names) + 1) for subset in itertools.combinations(names, size)]
    else:
        sets = [*((name,) for name in names), tuple(names)]
    runs_ahead = look_ahead is LookAhead.ON
    yield from (Choice(subset, runs_ahead) for subset in sets)
    if look_ahead is LookAhead.AUTO:
        # On shared cores running ahead seldom pays; one drafter is enough to find out whether it does.
        yield from (Choice(subset, look_ahead=True) for subset in (sets if runs_apart else sets[:1]))
    if may_branch:
        yield from (Choice(subset, runs_ahead, branches=True) for subset in sets if len(subset) in (1, len(names)))
