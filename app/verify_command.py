"""`launch.py verify-lossless`: the same prompts with drafters on and off, compared token by token."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.bench.prompts import SHIPPED_PROMPTS, Prompt, read_prompts
from app.bench.rounds import check_prompts, prompt_tokens
from app.bench.row import distinct_share
from app.choices import preparation
from app.options import positive, set_choice, speculation
from app.terminal import EXIT_INTERRUPTED, ProgressLine, interrupt_event
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

EXIT_DIVERGED = 1
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


def add_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser
) -> None:
    """Add `verify-lossless` to the program's parser."""
    parser = subparsers.add_parser(
        "verify-lossless",
        parents=[common],
        help="check that drafting changes no token",
        description="Answers prompts with drafters off and on, at temperature 0 and with a seed, and compares every "
        "token. Exit code 0: identical; 1: an answer differs.",
        allow_abbrev=False,
    )
    parser.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help="default: those that come with the program")
    parser.add_argument(
        "--count", type=positive, default=DEFAULT_PROMPTS, metavar="N", help="how many of them; default: 8"
    )
    parser.add_argument("--max-tokens", type=positive, default=DEFAULT_MAX_TOKENS, metavar="N", help="default: 64")
    parser.add_argument("--temperature", type=float, default=SAMPLED_TEMPERATURE, metavar="T", help="default: 0.8")
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED, metavar="N", help="default: 1")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Compare, print the outcome and return the exit code.

    Raises:
        QuorumError: something the user can mend.
    """
    prompts = spread(read_prompts(args.prompts or SHIPPED_PROMPTS), args.count)
    samplings = {
        "greedy": Sampling(temperature=0),
        f"temperature {args.temperature:g}, seed {args.seed}": Sampling(temperature=args.temperature, seed=args.seed),
    }
    given = speculation(args)
    policies = [args.policy] if args.policy else DEFAULT_POLICIES
    speculations = [dataclasses.replace(given, policy=Policy.parse(policy)) for policy in policies]
    progress = ProgressLine()
    with interrupt_event() as cancel, contextlib.ExitStack() as resources:
        resources.callback(progress.clear)
        config = preparation(set_choice(args))(progress.show, cancel)
        loaded = LoadedSet.load(config, progress.show, cancel)
        resources.callback(loaded.close)
        check_prompts(loaded, prompts, args.max_tokens)
        verification = _verify(loaded, prompts, samplings, speculations, args.max_tokens, progress, cancel)
        document = _document(loaded, verification)
        text = render(loaded, verification)
    print(json.dumps(document) if args.json else text)
    if verification.divergences:
        return EXIT_DIVERGED
    return EXIT_INTERRUPTED if cancel.is_set() else 0


def spread(prompts: Sequence[Prompt], count: int) -> tuple[Prompt, ...]:
    """So many prompts, taken at equal distances so that every category has its share."""
    count = min(count, len(prompts))
    return tuple(prompts[index * len(prompts) // count] for index in range(count))


def _verify(
    loaded: LoadedSet,
    prompts: Sequence[Prompt],
    samplings: dict[str, Sampling],
    speculations: Sequence[Speculation],
    max_tokens: int,
    progress: ProgressLine,
    cancel: threading.Event,
) -> Verification:
    """Everything, or what was done when cancelled."""
    comparisons: list[Comparison] = []
    plain: list[PlainAnswer] = []
    total = len(prompts) * len(samplings) * (1 + len(speculations))
    for prompt in prompts:
        tokens = prompt_tokens(loaded, prompt)
        for name, sampling in samplings.items():
            progress.show(f"Answering {prompt.id} plainly", (len(plain) + len(comparisons)) / total)
            answer = answer_plainly(loaded, tokens, sampling, max_tokens, cancel)
            if answer is None:
                return Verification(tuple(comparisons), tuple(plain))
            plain.append(answer)
            for way in speculations:
                done = len(plain) + len(comparisons)
                progress.show(f"Answering {prompt.id} with {way.policy}", done / total)
                drafted = answer_drafted(loaded, tokens, sampling, way, max_tokens, cancel)
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


def _document(loaded: LoadedSet, verification: Verification) -> dict[str, Any]:
    comparisons = verification.comparisons
    return {
        "identical": not verification.divergences,
        "target": str(loaded.config.target),
        "drafters": list(loaded.panel.names),
        "kv_type": loaded.context.settings.kv_type.name,
        "threads": loaded.context.settings.threads,
        "answers": len(comparisons),
        "compared_tokens": sum(comparison.compared_tokens for comparison in comparisons),
        "verified": sum(comparison.verified for comparison in comparisons),
        "accepted": sum(comparison.accepted for comparison in comparisons),
        "close_margin": CLOSE_MARGIN,
        "close_calls": sum(answer.close_calls for answer in verification.plain),
        "distinct_4gram": [round(distinct_share(answer.tokens), 3) for answer in verification.plain],
        "divergences": [dataclasses.asdict(comparison) for comparison in verification.divergences],
        "comparisons": [dataclasses.asdict(comparison) for comparison in comparisons],
    }


def render(loaded: LoadedSet, verification: Verification) -> str:
    """The outcome for people."""
    return "\n".join(_lines(loaded, verification))


def _lines(loaded: LoadedSet, verification: Verification) -> Iterator[str]:
    comparisons = verification.comparisons
    tokens = sum(comparison.compared_tokens for comparison in comparisons)
    accepted = sum(comparison.accepted for comparison in comparisons)
    verified = sum(comparison.verified for comparison in comparisons)
    close = sum(answer.close_calls for answer in verification.plain)
    if not comparisons:
        yield "Nothing was compared."
        return
    if verification.divergences:
        yield f"DIFFERENT: {len(verification.divergences)} of {len(comparisons)} drafted answers are not the plain one."
    else:
        yield f"Identical: {len(comparisons)} drafted answers are the plain ones, token for token."
    yield f"{tokens} tokens compared; {accepted} of {verified} draft tokens accepted by the target."
    yield f"At {close} places the target's two best tokens were closer than {CLOSE_MARGIN:g}, in logits."
    if not verified:
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
