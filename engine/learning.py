"""What a loaded set learns while it is used, kept from answer to answer: costs, acceptance, weights, choices."""

from __future__ import annotations

from collections.abc import Sequence

from engine.acceptance import AcceptanceModel
from engine.config import LookAhead, Policy, Shape, Speculation, WeightRule
from engine.cost import CostModel
from engine.length import AutoLength, LengthRule, make_rule
from engine.plan import AutoPlanner, FullPlanner, Planner
from engine.setting import Setting
from engine.vote import Weights, make_weights


class Learning:
    """Owns the learners of one loaded set and hands out those that an answer's settings name."""

    def __init__(
        self,
        cost: CostModel,
        free_drafters: Sequence[str],
        model_drafters: Sequence[str],
        *,
        runs_apart: bool,
        setting: Setting,
    ) -> None:
        """Args:
        runs_apart: Whether drafters have a processor of their own.
        setting: Which passes are as exact as is asked for.
        """
        self.cost = cost
        self.setting = setting
        self.acceptance = AcceptanceModel(free_drafters)
        self._names = (*model_drafters, *free_drafters)
        self._model_drafters = tuple(model_drafters)
        self._runs_apart = runs_apart
        self._weights: dict[WeightRule, Weights] = {}
        self._rules: dict[Policy, LengthRule] = {}
        self._planners: dict[tuple[LookAhead, bool], AutoPlanner] = {}

    def weights(self, rule: WeightRule) -> Weights:
        if rule not in self._weights:
            self._weights[rule] = make_weights(rule, self._names)
        return self._weights[rule]

    def rule(self, policy: Policy) -> LengthRule:
        if policy not in self._rules:
            self._rules[policy] = make_rule(policy, self.cost, self.acceptance)
        return self._rules[policy]

    def planner(self, speculation: Speculation) -> Planner:
        rule = self.rule(speculation.policy)
        if not isinstance(rule, AutoLength):
            return FullPlanner(rule, speculation.look_ahead)
        may_branch = self.may_branch(speculation)
        key = (speculation.look_ahead, may_branch)
        if key not in self._planners:
            self._planners[key] = AutoPlanner(
                self._model_drafters,
                self.cost,
                self.acceptance,
                speculation.look_ahead,
                runs_apart=self._runs_apart,
                may_branch=may_branch,
            )
        return self._planners[key]

    def may_branch(self, speculation: Speculation) -> bool:
        """Whether an answer under these settings may send token trees."""
        return speculation.shape is Shape.AUTO and self.setting.allows_branches
