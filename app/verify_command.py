"""`launch.py verify-lossless`: the same prompts with drafters on and off, compared token by token."""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path

from app.bench.prompts import SHIPPED_PROMPTS, read_prompts
from app.bench.rounds import check_prompts, prompt_tokens
from app.choices import preparation
from app.options import positive, set_choice, speculation
from app.terminal import EXIT_INTERRUPTED, ProgressLine, interrupt_event
from app.verification import (
    DEFAULT_MAX_TOKENS,
    DEFAULT_POLICIES,
    DEFAULT_PROMPTS,
    DEFAULT_SEED,
    SAMPLED_TEMPERATURE,
    after_earlier_turns,
    document,
    samplings,
    sentences,
    speculations,
    spread,
    verify,
)
from engine.config import Acceptance
from engine.errors import SettingError
from engine.loader import LoadedSet
from engine.setting import SAME_DISTRIBUTION

EXIT_DIVERGED = 1


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
    parser.add_argument(
        "--after",
        type=_lengths,
        default=(0,),
        metavar="TOKENS,...",
        help="by turns, let questions come after earlier turns of at least so many tokens; default: 0",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def _lengths(text: str) -> tuple[int, ...]:
    numbers = text.split(",")
    if not all(number.strip().isdecimal() for number in numbers):
        raise argparse.ArgumentTypeError(f"must be numbers of tokens with commas between them, found {text!r}")
    return tuple(map(int, numbers))


def run(args: argparse.Namespace) -> int:
    """Compare, print the outcome and return the exit code.

    Raises:
        QuorumError: something the user can mend.
    """
    known = read_prompts(args.prompts or SHIPPED_PROMPTS)
    ways_of_drafting = speculations(speculation(args), [args.policy] if args.policy else DEFAULT_POLICIES)
    if ways_of_drafting[0].acceptance is not Acceptance.MATCH:
        raise SettingError(
            f"with --acceptance residual answers have the {SAME_DISTRIBUTION}; only --acceptance match can be verified"
        )
    progress = ProgressLine()
    with interrupt_event() as cancel, contextlib.ExitStack() as resources:
        resources.callback(progress.clear)
        config = preparation(set_choice(args))(progress.show, cancel)
        loaded = LoadedSet.load(config, progress.show, cancel)
        resources.callback(loaded.close)
        prompts = after_earlier_turns(
            spread(known, args.count), known, args.after, lambda prompt: len(prompt_tokens(loaded, prompt))
        )
        check_prompts(loaded, prompts, args.max_tokens)
        ways_of_sampling = samplings(args.temperature, args.seed)
        verification = verify(
            loaded, prompts, ways_of_sampling, ways_of_drafting, args.max_tokens, progress.show, cancel
        )
        outcome = (
            json.dumps(document(loaded, verification)) if args.json else "\n".join(sentences(loaded, verification))
        )
    print(outcome)
    if verification.divergences:
        return EXIT_DIVERGED
    return EXIT_INTERRUPTED if cancel.is_set() else 0
