"""What every draft model would draft at every position of the target's own text, so that policies can be replayed.

A recording holds greedy chains, not just next-token guesses: what a drafter believes after its own mistake decides when
it stops and how the vote goes, so it is recorded too.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from app.bench.prompts import Prompt
from app.bench.row import LOOP_SHARE, distinct_share
from app.bench.step_costs import StepCosts
from engine.config import GenerationSettings, KvType, Policy, PolicyKind, Sampling, Speculation
from engine.drafters.model import predict
from engine.errors import SettingError
from engine.length import LONGEST_DRAFT
from engine.loader import LoadedSet
from engine.runtime.context import Context, ContextSettings, Run
from engine.runtime.model import Model
from engine.session import Session
from engine.types import Finished, FinishReason
from models.atomic import replacing
from models.progress import stop_if_asked

CHAIN_TOKENS = LONGEST_DRAFT
"""Longest recorded chain; a replayed drafter stops there."""
BRANCHES = 15
"""Positions whose chains are recorded in one batch."""

RecordProgress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Chain:
    """A drafter's greedy draft from one position."""

    tokens: tuple[int, ...]
    probabilities: tuple[float, ...]
    entropies: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """One prompt, the target's answer, and each drafter's chain before each answer token."""

    prompt_id: str
    category: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    chains: dict[str, tuple[Chain, ...]]


@dataclass(frozen=True, slots=True)
class Recording:
    """All that a replay needs."""

    about: Mapping[str, Any]
    """Machine, models, settings and prompts, as a report tells them."""
    drafters: tuple[str, ...]
    """Names of those that were recorded, and of the free ones."""
    costs: StepCosts
    answers: tuple[RecordedAnswer, ...]


def record_answers(
    loaded: LoadedSet,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    max_tokens: int,
    progress: RecordProgress,
    cancel: threading.Event,
    limit_per_category: int | None = None,
) -> list[RecordedAnswer]:
    """The target's own plain answers, without chains yet; loops are left out.

    Raises:
        Cancelled: `cancel` was set.
    """
    settings = GenerationSettings(sampling, Speculation(Policy(PolicyKind.OFF)), max_tokens)
    answers: list[RecordedAnswer] = []
    for index, prompt in enumerate(prompts):
        if limit_per_category == Counter(answer.category for answer in answers)[prompt.category]:
            continue
        progress(f"Answering {prompt.id}", index / len(prompts))
        session = Session(loaded)
        try:
            for event in session.chat(prompt.messages, settings, cancel):
                if isinstance(event, Finished) and event.reason is not FinishReason.CANCELLED:
                    length = len(session.tokens) - len(event.token_ids)
                    answer = RecordedAnswer(prompt.id, prompt.category, session.tokens[:length], event.token_ids, {})
                    if distinct_share(answer.answer) >= LOOP_SHARE:
                        answers.append(answer)
        finally:
            session.close()
        stop_if_asked(cancel, "recording")
    return answers


def record_chains(
    path: Path,
    answers: Sequence[RecordedAnswer],
    threads: int,
    progress: RecordProgress,
    cancel: threading.Event,
) -> None:
    """Add the chains of one draft model to every answer.

    Raises:
        Cancelled: `cancel` was set.
    """
    model = Model(path)
    try:
        longest = max(len(answer.prompt) + len(answer.answer) for answer in answers)
        context = Context(
            model,
            ContextSettings(
                context_tokens=longest + BRANCHES * CHAIN_TOKENS + 64,
                kv_type=KvType.F16,
                threads=threads,
                max_outputs=BRANCHES + 1,
                max_sequences=BRANCHES + 1,
            ),
        )
        for index, answer in enumerate(answers):
            stop_if_asked(cancel, "recording")
            progress(f"Recording {path.stem} on {answer.prompt_id}", index / len(answers))
            answer.chains[path.stem] = _chains(context, answer)
    finally:
        model.close()


def _chains(context: Context, answer: RecordedAnswer) -> tuple[Chain, ...]:
    tokens = (*answer.prompt, *answer.answer)
    first = len(answer.prompt)
    main = context.allocate()
    size = context.settings.batch_tokens
    for start in range(0, first - 1, size):
        context.decode([Run(main, tokens[start : min(start + size, first - 1)], 0)])
    chains: list[Chain] = []
    for start in range(first, len(tokens), BRANCHES):
        block = range(start, min(start + BRANCHES, len(tokens)))
        context.decode([Run(main, tokens[start - 1 : block.stop - 1], len(block))])
        guesses = [[predict(row)] for row in context.logits()]
        branches = []
        for position in block:
            branch = context.copy(main)
            context.truncate(branch, position)
            branches.append(branch)
        for _ in range(CHAIN_TOKENS - 1):
            context.decode([Run(branch, [chain[-1].token], 1) for branch, chain in zip(branches, guesses, strict=True)])
            for chain, row in zip(guesses, context.logits(), strict=True):
                chain.append(predict(row))
        for branch in branches:
            context.free(branch)
        chains.extend(
            Chain(
                tuple(guess.token for guess in chain),
                tuple(guess.probability for guess in chain),
                tuple(guess.entropy for guess in chain),
            )
            for chain in guesses
        )
    context.free(main)
    return tuple(chains)


def save(path: Path, recording: Recording) -> None:
    """Write a recording."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(asdict(recording)), encoding="utf-8")


def load(path: Path) -> Recording:
    """Read a recording.

    Raises:
        SettingError: the file cannot be read, or is no recording.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        costs = dict(data["costs"])
        costs["pass_ms"] = {int(size): float(ms) for size, ms in costs["pass_ms"].items()}
        answers = tuple(_answer(own) for own in data["answers"])
        return Recording(data["about"], tuple(data["drafters"]), StepCosts(**costs), answers)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingError(f"{path} is no recording of this program: {error}") from error


def _answer(data: Mapping[str, Any]) -> RecordedAnswer:
    chains = {
        name: tuple(
            Chain(tuple(chain["tokens"]), tuple(chain["probabilities"]), tuple(chain["entropies"]))
            for chain in recorded
        )
        for name, recorded in data["chains"].items()
    }
    return RecordedAnswer(data["prompt_id"], data["category"], tuple(data["prompt"]), tuple(data["answer"]), chains)
