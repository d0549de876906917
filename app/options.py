"""The options that every command shares, and the settings they become."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from app.choices import SetChoice
from engine.config import (
    Acceptance,
    Exactness,
    GenerationSettings,
    KvType,
    LookAhead,
    Policy,
    Sampling,
    Shape,
    Speculation,
    VoteMode,
    WeightRule,
)
from engine.errors import SettingError
from engine.loader import FREE_DRAFTERS
from engine.runtime.grammar import grammar_of_schema
from models.library import STARTER_NAME, resolve

DEFAULT_CONTEXT_TOKENS = 4096

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def common_options(*, with_defaults: bool) -> argparse.ArgumentParser:
    """Options understood before and after a command's name.

    Args:
        with_defaults: For the program itself; a command's own copy sets only what was given.
    """
    parser = argparse.ArgumentParser(
        add_help=False, argument_default=None if with_defaults else argparse.SUPPRESS, allow_abbrev=False
    )
    models = parser.add_argument_group("models")
    models.add_argument("--target", metavar="MODEL", help="GGUF file or installed name; default: the starter")
    models.add_argument(
        "--drafters",
        metavar="LIST",
        help="comma list of GGUF files, installed names, ngram, suffix; empty for none; default: all that fit",
    )
    models.add_argument(
        "--ctx", type=int, metavar="TOKENS", help=f"context size ({DEFAULT_CONTEXT_TOKENS}); 0: model's"
    )
    models.add_argument("--threads", type=int, metavar="N", help="CPU threads; default: physical cores")
    models.add_argument(
        "--gpu-layers", type=int, metavar="N", help="layers on the GPU; -1: all, 0: none; default: all that find room"
    )
    models.add_argument(
        "--drafter-gpu-layers",
        metavar="NAME=N,...",
        help="layers on the GPU for single drafters; default: as --gpu-layers, or what is chosen",
    )
    models.add_argument(
        "--drafter-threads", metavar="NAME=N,...", help="CPU threads of single drafters; default: as --threads"
    )
    models.add_argument(
        "--kv-type",
        choices=[kind.name.lower() for kind in KvType],
        help="number format of the target's cache; default: what is exact here; q8_0 takes half the memory",
    )
    models.add_argument(
        "--translate",
        action="store_true",
        help="allow drafters of other vocabularies: text goes between them and the target, at some cost",
    )
    speculation = parser.add_argument_group("speculation")
    speculation.add_argument("--policy", metavar="RULE", help="auto (default), minions, adaedl, fixed:N, off or plain")
    speculation.add_argument("--weights", choices=[rule.value for rule in WeightRule], help="hedge (default), minions")
    speculation.add_argument("--vote", choices=[mode.value for mode in VoteMode], help="tree (default), collective")
    speculation.add_argument(
        "--shape", choices=[shape.value for shape in Shape], help="auto (default): token trees where they pay, or chain"
    )
    speculation.add_argument(
        "--acceptance",
        choices=[way.value for way in Acceptance],
        help="match (default): the very tokens; residual: draft models draw, and only the distribution is kept",
    )
    speculation.add_argument("--look-ahead", choices=[way.value for way in LookAhead], help="auto (default), on or off")
    speculation.add_argument(
        "--exactness",
        choices=[way.value for way in Exactness],
        help="exact (default): bit-equal where the backend can; fast: faster prompts, rare differences",
    )
    parser.add_argument(
        "--port", type=int, metavar="N", help="port of the page (7860) or of serve (8080); the next free one if taken"
    )
    return parser


def set_choice(args: argparse.Namespace) -> SetChoice:
    """The set the options name.

    Raises:
        QuorumError: a value is out of range or names nothing.
    """
    drafters = None
    if args.drafters is not None:
        drafters = tuple(_drafter(name.strip()) for name in args.drafters.split(",") if name.strip())
    return SetChoice(
        target=STARTER_NAME if args.target is None else str(resolve(args.target)),
        drafters=drafters,
        context_tokens=DEFAULT_CONTEXT_TOKENS if args.ctx is None else args.ctx,
        threads=args.threads,
        gpu_layers=args.gpu_layers,
        exactness=Exactness(args.exactness or Exactness.EXACT.value),
        drafter_gpu_layers=_for_drafters(args.drafter_gpu_layers, "--drafter-gpu-layers", "from -1 (all)"),
        drafter_threads=_for_drafters(args.drafter_threads, "--drafter-threads", "from 1"),
        translates=bool(args.translate),
        kv_type=KvType[args.kv_type.upper()] if args.kv_type else None,
    )


def _for_drafters(text: str | None, option: str, range_text: str) -> tuple[tuple[str, int], ...]:
    """What an option says for single drafters; whether the numbers make sense is seen when they are used."""
    found = []
    for entry in filter(None, map(str.strip, (text or "").split(","))):
        name, _, number = entry.rpartition("=")
        if not name or not re.fullmatch(r"-?\d{1,4}", number):
            raise SettingError(f"{option} takes NAME=N with N {range_text}, found {entry!r}")
        found.append((str(resolve(name)), int(number)))
    return tuple(found)


def _drafter(name: str) -> str:
    return name if name in FREE_DRAFTERS else str(resolve(name))


def speculation(args: argparse.Namespace) -> Speculation:
    """How to draft.

    Raises:
        SettingError: the policy is unknown.
    """
    return Speculation(
        policy=Policy.parse(args.policy or "auto"),
        weights=WeightRule(args.weights or WeightRule.HEDGE.value),
        vote=VoteMode(args.vote or VoteMode.TREE.value),
        look_ahead=LookAhead(args.look_ahead or LookAhead.AUTO.value),
        shape=Shape(args.shape or Shape.AUTO.value),
        acceptance=Acceptance(args.acceptance or Acceptance.MATCH.value),
    )


def positive(text: str) -> int:
    """An option's whole number from 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, found {text}")
    return number


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Options about one answer."""
    defaults = Sampling()
    group = parser.add_argument_group("answer")
    group.add_argument("--max-tokens", type=int, default=None, metavar="N", help="default: until the model stops")
    group.add_argument("--temperature", type=float, default=defaults.temperature, metavar="T", help="default: 0.7")
    group.add_argument("--top-k", type=int, default=defaults.top_k, metavar="K", help="default: 40; 0: off")
    group.add_argument("--top-p", type=float, default=defaults.top_p, metavar="P", help="default: 0.95")
    group.add_argument("--min-p", type=float, default=defaults.min_p, metavar="P", help="default: 0.05")
    group.add_argument("--repeat-penalty", type=float, default=defaults.repeat_penalty, metavar="R", help="default: 1")
    group.add_argument("--seed", type=int, default=None, metavar="N", help="default: drawn, and reported")
    group.add_argument(
        "--logit-bias",
        type=_bias,
        action="append",
        default=[],
        metavar="TOKEN=BIAS",
        help="add to the logit of a token, given by its number; -inf forbids it; may be given again",
    )
    form = group.add_mutually_exclusive_group()
    form.add_argument("--grammar", type=Path, metavar="FILE", help="GBNF grammar that the answer follows")
    form.add_argument("--json-schema", type=Path, metavar="FILE", help="JSON schema that the answer follows")


def _bias(text: str) -> tuple[int, float]:
    token, separator, bias = text.partition("=")
    if not separator or not token.strip().isdecimal():
        raise argparse.ArgumentTypeError(f"must be TOKEN=BIAS with the token's number, found {text!r}")
    return int(token), float(bias)


def _grammar(args: argparse.Namespace) -> str:
    path = args.grammar or args.json_schema
    if path is None:
        return ""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"cannot read {path}: {error}") from error
    if not text.strip():
        raise SettingError(f"{path} is empty")
    return text if args.grammar else grammar_of_schema(text)


def generation_settings(args: argparse.Namespace) -> GenerationSettings:
    """Settings of one answer.

    Raises:
        SettingError: a value is out of range.
    """
    return GenerationSettings(
        sampling=Sampling(
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            repeat_penalty=args.repeat_penalty,
            seed=args.seed,
            logit_bias=tuple(args.logit_bias),
            grammar=_grammar(args),
        ),
        speculation=speculation(args),
        max_tokens=args.max_tokens,
    )
