"""How often a drafter would foresee the target, measured on text that the target wrote, and what its passes cost.

The target answers a few prompts of different kinds, sampled, because greedy answers of small models run in circles and
flatter every drafter. At each position of the answers its own greedy choice is noted; a drafter agrees where its greedy
choice is the same.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.config import KvType, default_threads
from engine.runtime.context import Context, ContextSettings, FloatRows, Run
from engine.runtime.model import Model
from engine.runtime.template import ChatTemplate, Message
from models.progress import Progress, Report, no_report, stop_if_asked

PROMPTS = (
    "Write the beginning of a story about a lighthouse keeper who finds a letter.",
    "Explain how a bicycle stays upright.",
    "Write a Python function that returns the primes below n, and say how it works.",
    "Give five tips for cooking rice.",
    "What changed in daily life when electric light came?",
    "Make this more formal: hey, can you send me that file, the one from last week, before lunch?",
)
_TEMPERATURE = 0.8
_SEED = 576
_BATCH_TOKENS = 64
_PROMPT_TOKENS = 192
_TIMED_PASSES = 15
_SOME_TOKEN = 10


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt with its answer, and what the target would have chosen at each position of the answer."""

    tokens: tuple[int, ...]
    choices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Agreement:
    """A model's choices against those noted in a text."""

    agreed_tokens: int
    compared_tokens: int

    @property
    def share(self) -> float:
        return self.agreed_tokens / self.compared_tokens


def write_text(
    target: Path,
    tokens_each: int,
    seconds: float,
    report: Report = no_report,
    cancel: threading.Event | None = None,
) -> tuple[Answer, ...]:
    """Let the target answer the prompts, at most `tokens_each` long, and no longer than about `seconds`."""
    deadline = time.monotonic() + seconds
    random = np.random.default_rng(_SEED)
    with _opened(target, len(PROMPTS) * (_PROMPT_TOKENS + tokens_each)) as (model, context):
        writers = [_Writer(prompt, context) for prompt in _prompt_tokens(model)]
        for writer in writers:
            writer.take(_fed(context, writer.sequence, writer.tokens, outputs=1)[0], random)
        for written in range(1, tokens_each):
            stop_if_asked(cancel, f"measuring {target.name}")
            active = [writer for writer in writers if writer.tokens[-1] not in model.vocabulary.end_tokens]
            if not active or time.monotonic() > deadline:
                break
            report(Progress(f"{target.stem} writes text to compare with", done_share=written / tokens_each))
            context.decode([Run(writer.sequence, writer.tokens[-1:], 1) for writer in active])
            for writer, row in zip(active, context.logits(), strict=True):
                writer.take(row, random)
    return tuple(Answer(tuple(writer.tokens), tuple(writer.choices)) for writer in writers)


def agreement(model_path: Path, text: Sequence[Answer], cancel: threading.Event | None = None) -> Agreement:
    """How often the model's choices are the ones noted in `text`."""
    agreed = compared = 0
    with _opened(model_path, sum(len(answer.tokens) for answer in text)) as (_, context):
        for answer in text:
            stop_if_asked(cancel, f"measuring {model_path.name}")
            sequence = context.allocate()
            rows = _fed(context, sequence, answer.tokens[:-1], outputs=len(answer.choices))
            agreed += int((rows.argmax(axis=1) == np.array(answer.choices)).sum())
            compared += len(answer.choices)
            context.free(sequence)
    return Agreement(agreed, compared)


def pass_times_ms(model_paths: Sequence[Path]) -> tuple[float, ...]:
    """What one token costs in each model. They take turns, so that a busy machine slows them all alike."""
    times: list[list[float]] = [[] for _ in model_paths]
    with contextlib.ExitStack() as stack:
        contexts = [stack.enter_context(_opened(path, _TIMED_PASSES))[1] for path in model_paths]
        sequences = [context.allocate() for context in contexts]
        for _ in range(_TIMED_PASSES):
            for context, sequence, taken in zip(contexts, sequences, times, strict=True):
                began = time.perf_counter()
                context.decode([Run(sequence, [_SOME_TOKEN], 1)])
                taken.append(1000 * (time.perf_counter() - began))
    return tuple(map(statistics.median, times))


class _Writer:
    """One answer in the making."""

    def __init__(self, prompt: list[int], context: Context) -> None:
        self.tokens = prompt
        self.choices: list[int] = []
        self.sequence = context.allocate()

    def take(self, row: FloatRows, random: np.random.Generator) -> None:
        """Note the target's choice and go on with a sample."""
        scaled = (row.astype(np.float64) - row.max()) / _TEMPERATURE
        weights = np.exp(scaled)
        self.choices.append(int(row.argmax()))
        self.tokens.append(int(random.choice(len(weights), p=weights / weights.sum())))


@contextlib.contextmanager
def _opened(path: Path, context_tokens: int) -> Iterator[tuple[Model, Context]]:
    with contextlib.closing(Model(path, gpu_layers=-1)) as model:
        settings = ContextSettings(
            context_tokens=context_tokens,
            kv_type=KvType.F16,
            threads=default_threads(),
            max_outputs=_BATCH_TOKENS,
            max_sequences=len(PROMPTS) + 1,
            batch_tokens=_BATCH_TOKENS,
        )
        yield model, Context(model, settings)


def _prompt_tokens(model: Model) -> list[list[int]]:
    template = ChatTemplate(model)
    prompts = []
    for prompt in PROMPTS:
        text = template.render([Message("user", prompt)])
        tokens = model.vocabulary.tokenize(text, adds_special=not template.starts_with_bos(text))
        prompts.append(tokens[-_PROMPT_TOKENS:])
    return prompts


def _fed(context: Context, sequence: int, tokens: Sequence[int], outputs: int) -> FloatRows:
    """Rows of the last `outputs` tokens."""
    first_output = len(tokens) - outputs
    rows = []
    for start in range(0, len(tokens), _BATCH_TOKENS):
        chunk = tokens[start : start + _BATCH_TOKENS]
        wanted = min(len(chunk), max(0, start + len(chunk) - first_output))
        context.decode([Run(sequence, chunk, wanted)])
        if wanted:
            rows.append(context.logits().copy())
    return np.concatenate(rows)
