"""Checks that drafting changes no token: the same prompts answered plainly and with drafts, for terminal and page."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.bench.prompts import Prompt
from app.bench.rounds import prompt_tokens
from app.bench.row import distinct_share
from app.jobs import PhaseReport
from engine.config import Policy, Sampling, Speculation
from engine.loader import LoadedSet
from engine.lossless import (
    CLOSE_MARGIN,
    Divergence,
    PlainAnswer,
    answer_drafted,
    answer_plainly,
    first_divergence,
)
from engine.runtime.template import Message

EARLIER_ANSWER = Message("assistant", "I will come back to that.")
DEFAULT_PROMPTS = 8
DEFAULT_MAX_TOKENS = 64
DEFAULT_SEED = 1
SAMPLED_TEMPERATURE = 0.8
DEFAULT_POLICIES = ("auto", "fixed:3", "fixed:7")
"""The one in use, and two that draft even where it does not pay: what is not drafted proves nothing."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One drafted answer beside the plain one."""

    prompt_id: str
    sampling: str
    policy: str
    prompt_tokens: int
    compared_tokens: int
    verified: int
    """Draft tokens that the target checked."""
    accepted: int
    divergence: Divergence | None


@dataclass(frozen=True, slots=True)
class Verification:
    """All comparisons, and what the plain answers were like."""

    comparisons: tuple[Comparison, ...]
    plain: tuple[PlainAnswer, ...]

    @property
    def divergences(self) -> tuple[Comparison, ...]:
        return tuple(comparison for comparison in self.comparisons if comparison.divergence is not None)

    @property
    def compared_tokens(self) -> int:
        return sum(comparison.compared_tokens for comparison in self.comparisons)

    @property
    def verified(self) -> int:
        return sum(comparison.verified for comparison in self.comparisons)

    @property
    def accepted(self) -> int:
        return sum(comparison.accepted for comparison in self.comparisons)

    @property
    def close_calls(self) -> int:
        """Places of the plain answers at which the target was nearly undecided."""
        return sum(answer.close_calls for answer in self.plain)


def samplings(temperature: float = SAMPLED_TEMPERATURE, seed: int = DEFAULT_SEED) -> dict[str, Sampling]:
    """The two ways of choosing that are compared, by name."""
    return {
        "greedy": Sampling(temperature=0),
        f"temperature {temperature:g}, seed {seed}": Sampling(temperature=temperature, seed=seed),
    }


def speculations(given: Speculation, policies: Sequence[str] = DEFAULT_POLICIES) -> tuple[Speculation, ...]:
    """What is given, under each of some policies.

    Raises:
        SettingError: a policy is unknown.
    """
    return tuple(dataclasses.replace(given, policy=Policy.parse(policy)) for policy in policies)


def spread(prompts: Sequence[Prompt], count: int) -> tuple[Prompt, ...]:
    """So many prompts, taken at equal distances so that every category has its share."""
    count = min(count, len(prompts))
    return tuple(prompts[index * len(prompts) // count] for index in range(count))


def after_earlier_turns(
    prompts: Sequence[Prompt],
    others: Sequence[Prompt],
    lengths: Sequence[int],
    length_of: Callable[[Prompt], int],
) -> tuple[Prompt, ...]:
    """The prompts, by turns behind earlier turns of at least so many tokens, made of other prompts' questions.

    Args:
        prompts: To be lengthened.
        others: Whose questions are used, each conversation beginning with another one.
        lengths: Zero adds nothing.
        length_of: Tokens of a prompt.
    """
    lengthened = []
    for number, prompt in enumerate(prompts):
        questions = [other.messages[-1] for other in others if other.id != prompt.id]
        first = number * len(questions) // len(prompts)
        supply = itertools.cycle([*questions[first:], *questions[:first]])
        earlier: list[Message] = []
        longer = prompt
        while lengths[number % len(lengths)] and length_of(longer) < lengths[number % len(lengths)]:
            earlier = [*earlier, next(supply), EARLIER_ANSWER]
            longer = dataclasses.replace(prompt, messages=(*earlier, *prompt.messages))
        lengthened.append(longer)
    return tuple(lengthened)


def verify(
    loaded: LoadedSet,
    prompts: Sequence[Prompt],
    ways_of_sampling: Mapping[str, Sampling],
    ways_of_drafting: Sequence[Speculation],
    max_tokens: int,
    report: PhaseReport,
    cancel: threading.Event,
    between: Callable[[], object] = lambda: None,
) -> Verification:
    """Compare everything, or what was done when cancelled.

    Args:
        loaded: Its owner thread must call.
        prompts: Each fits into the context with its answer.
        ways_of_sampling: By name.
        ways_of_drafting: Compared with plain decoding.
        max_tokens: Of each answer.
        report: Hears what is done.
        cancel: Set to stop.
        between: Called after each step of an answer.
    """
    comparisons: list[Comparison] = []
    plain: list[PlainAnswer] = []
    total = len(prompts) * len(ways_of_sampling) * (1 + len(ways_of_drafting))
    for prompt in prompts:
        tokens = prompt_tokens(loaded, prompt)
        for name, sampling in ways_of_sampling.items():
            report(f"Answering {prompt.id} plainly", (len(plain) + len(comparisons)) / total)
            answer = answer_plainly(loaded, tokens, sampling, max_tokens, cancel, between)
            if answer is None:
                return Verification(tuple(comparisons), tuple(plain))
            plain.append(answer)
            for way in ways_of_drafting:
                done = len(plain) + len(comparisons)
                report(f"Answering {prompt.id} with {way.policy}", done / total)
                drafted = answer_drafted(loaded, tokens, sampling, way, max_tokens, cancel, between)
                if drafted is None:
                    return Verification(tuple(comparisons), tuple(plain))
                comparisons.append(
                    Comparison(
                        prompt_id=prompt.id,
                        sampling=name,
                        policy=str(way.policy),
                        prompt_tokens=len(tokens),
                        compared_tokens=len(answer.tokens),
                        verified=drafted.metrics.verified,
                        accepted=drafted.metrics.accepted,
                        divergence=first_divergence(answer, drafted.token_ids),
                    )
                )
    return Verification(tuple(comparisons), tuple(plain))


def document(loaded: LoadedSet, verification: Verification) -> dict[str, Any]:
    """The outcome as plain data."""
    comparisons = verification.comparisons
    return {
        "identical": not verification.divergences,
        "target": str(loaded.config.target),
        "drafters": list(loaded.panel.names),
        "kv_type": loaded.context.settings.kv_type.name,
        "threads": loaded.context.settings.threads,
        "exactness": loaded.setting.document(),
        "answers": len(comparisons),
        "compared_tokens": verification.compared_tokens,
        "verified": verification.verified,
        "accepted": verification.accepted,
        "close_margin": CLOSE_MARGIN,
        "close_calls": verification.close_calls,
        "longest_position": max((one.prompt_tokens + one.compared_tokens for one in comparisons), default=0),
        "distinct_4gram": [round(distinct_share(answer.tokens), 3) for answer in verification.plain],
        "plain_digest": _digest(verification.plain),
        "divergences": [dataclasses.asdict(comparison) for comparison in verification.divergences],
        "comparisons": [dataclasses.asdict(comparison) for comparison in comparisons],
    }


def _digest(answers: Sequence[PlainAnswer]) -> str:
    """The same for two runs whose plain answers, token for token, are the same."""
    return hashlib.sha256(repr([answer.tokens for answer in answers]).encode()).hexdigest()


def sentences(loaded: LoadedSet, verification: Verification) -> Iterator[str]:
    """The outcome for people, a line each; the first is the verdict."""
    comparisons = verification.comparisons
    if not comparisons:
        yield "Nothing was compared."
        return
    if verification.divergences:
        yield f"DIFFERENT: {len(verification.divergences)} of {len(comparisons)} drafted answers are not the plain one."
    else:
        yield f"Identical: {len(comparisons)} drafted answers are the plain ones, token for token."
    yield (
        f"{verification.compared_tokens} tokens compared; {verification.accepted} of {verification.verified} draft "
        "tokens accepted by the target."
    )
    yield (
        f"At {verification.close_calls} places the target's two best tokens were closer than {CLOSE_MARGIN:g}, "
        "in logits."
    )
    if not verification.verified:
        yield "Nothing was drafted, so this shows nothing: load drafters, or choose --policy fixed:3."
    for comparison in verification.divergences:
        assert comparison.divergence is not None
        yield _sentence(loaded, comparison, comparison.divergence)


def _sentence(loaded: LoadedSet, comparison: Comparison, divergence: Divergence) -> str:
    def said(token: int | None) -> str:
        return "the end" if token is None else repr(loaded.model.vocabulary.text([token]))

    return (
        f"  {comparison.prompt_id}, {comparison.sampling}, {comparison.policy}: differs first at token "
        f"{divergence.position + 1} ({said(divergence.plain_token)} plain, {said(divergence.drafted_token)} drafted), "
        f"where the target's two best tokens were {divergence.margin:.3g} apart."
    )
