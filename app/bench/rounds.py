"""Answers every prompt with every configuration, round by round, and measures.

What differs between two runs of a prompt must be the configuration alone: they follow each other at once, in an order
that rotates, each in a session of its own with drafters that have forgotten all text. What a configuration has learnt
(acceptance, weights, choices) stays with it from answer to answer, as it does for a user; a warm-up that counts in no
figure precedes the first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from app.bench.configuration import Configuration
from app.bench.machine import peak_memory_bytes
from app.bench.prompts import Prompt
from app.bench.row import Row, measured
from engine.config import GenerationSettings, Sampling
from engine.errors import PromptError
from engine.loader import LoadedSet
from engine.runtime.template import Message
from engine.session import Session
from engine.types import Finished, FinishReason, StepDone, StepTimes

WARM_UP = Prompt("warm-up", "warm-up", (Message("user", "Describe a walk through a market on a summer morning."),))
SEED_LIMIT = 2**32 - 1

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Contestant:
    """A configuration and the part of the loaded set it answers with."""

    configuration: Configuration
    loaded: LoadedSet

    @property
    def name(self) -> str:
        return self.configuration.name


@dataclass(frozen=True, slots=True)
class Task:
    """One answer to measure."""

    prompt: Prompt
    contestant: Contestant
    round: int


def schedule_round(prompts: Sequence[Prompt], contestants: Sequence[Contestant], round_number: int) -> Iterator[Task]:
    """The tasks of one round: for each prompt all contestants in turn, another one first each time."""
    for index, prompt in enumerate(prompts):
        for contestant in rotated(contestants, round_number - 1 + index):
            yield Task(prompt, contestant, round_number)


def schedule_first_round(
    prompts: Sequence[Prompt],
    limit_per_category: int,
    contestants: Sequence[Contestant],
    is_loop: Callable[[Prompt], bool],
) -> Iterator[Task]:
    """The tasks of round 1 where each category has places for so many prompts, filled in the order of their file.

    The baseline answers first. A prompt on which it runs in a loop takes no place, and no other contestant answers it.

    Args:
        contestants: The baseline and the others.
        is_loop: Asked after the baseline's task was measured.
    """
    baseline, *others = contestants
    places = dict.fromkeys((prompt.category for prompt in prompts), limit_per_category)
    for index, prompt in enumerate(prompts):
        if not places[prompt.category]:
            continue
        yield Task(prompt, baseline, 1)
        if is_loop(prompt):
            continue
        places[prompt.category] -= 1
        for contestant in rotated(others, index):
            yield Task(prompt, contestant, 1)


def rotated(items: Sequence[Item], by: int) -> list[Item]:
    """The items beginning with the one at place `by`, counted around."""
    start = by % max(1, len(items))
    return [*items[start:], *items[:start]]


def sampling_for(sampling: Sampling, round_number: int) -> Sampling:
    """Every round draws other random numbers, all contestants the same ones."""
    assert sampling.seed is not None
    return replace(sampling, seed=(sampling.seed + round_number) % SEED_LIMIT)


def prompt_tokens(loaded: LoadedSet, prompt: Prompt) -> list[int]:
    """The prompt as the target reads it."""
    text = loaded.template.render(prompt.messages)
    return loaded.model.vocabulary.tokenize(text, adds_special=not loaded.template.starts_with_bos(text))


def check_prompts(loaded: LoadedSet, prompts: Sequence[Prompt], max_tokens: int) -> None:
    """Refuse prompts whose answers would not fit, before anything is measured.

    Raises:
        PromptError: with the prompt's id and its length.
    """
    room = loaded.context.context_tokens - max_tokens
    for prompt in prompts:
        length = len(prompt_tokens(loaded, prompt))
        if length > room:
            raise PromptError(
                f"prompt {prompt.id} has {length} tokens and a context of {loaded.context.context_tokens} leaves room "
                f"for {room} beside the answer; choose a larger one with --ctx"
            )


def measure(task: Task, sampling: Sampling, max_tokens: int, cancel: threading.Event) -> Row | None:
    """Answer and measure; None when cancelled."""
    loaded, configuration = task.contestant.loaded, task.contestant.configuration
    tokens = prompt_tokens(loaded, task.prompt)
    settings = GenerationSettings(sampling_for(sampling, task.round), configuration.speculation, max_tokens)
    loaded.panel.forget()
    session = Session(loaded)
    times: list[StepTimes] = []
    started = time.perf_counter()
    try:
        for event in session.generate(tokens, settings, cancel):
            if isinstance(event, StepDone):
                times.append(event.step.times)
    finally:
        session.close()
    assert isinstance(event, Finished)
    if event.reason is FinishReason.CANCELLED:
        return None
    return measured(
        task.prompt.id,
        task.prompt.category,
        configuration.name,
        configuration.baseline.name,
        task.round,
        event,
        times,
        time.perf_counter() - started,
        peak_memory_bytes(),
    )


def warm_up(
    contestants: Sequence[Contestant], sampling: Sampling, max_tokens: int, cancel: threading.Event
) -> Iterator[Row]:
    """One answer of each contestant, before it counts."""
    for contestant in contestants:
        row = measure(Task(WARM_UP, contestant, 0), sampling, max_tokens, cancel)
        if row is None:
            return
        yield row


def run_round(
    tasks: Iterator[Task],
    is_done: Callable[[Task], bool],
    sampling: Sampling,
    max_tokens: int,
    cancel: threading.Event,
) -> Iterator[Row]:
    """Measure what is not done yet, until cancelled."""
    for task in tasks:
        if is_done(task):
            continue
        row = measure(task, sampling, max_tokens, cancel)
        if row is None:
            return
        yield row
