"""A cache that sequences share: whatever is cut, ended and gathered, each has the rows that it has alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from engine.config import KvType
from engine.errors import DecodeError
from engine.runtime.context import Context, ContextSettings, FloatRows, Run
from engine.runtime.model import Model
from engine.runtime.shared import SharedContext
from tests.engine.making import TINY_TOKENS, write_tiny_gemma3, write_tiny_llama

SETTINGS = ContextSettings(context_tokens=768, kv_type=KvType.BF16, threads=2, max_outputs=64, max_sequences=8)
WRITERS = {"llama": write_tiny_llama, "gemma3": write_tiny_gemma3}


@pytest.fixture(scope="module", params=WRITERS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path: Path = tmp_path_factory.mktemp("shared") / f"{request.param}.gguf"
    model = Model(WRITERS[request.param](path))
    yield model
    model.close()


@pytest.fixture
def context(model: Model) -> Iterator[SharedContext]:
    context = SharedContext(model, SETTINGS)
    yield context
    context.close()


def rows_alone(model: Model, tokens: Sequence[int]) -> FloatRows:
    """The logits after each token, of a context that holds nothing else."""
    alone = Context(model, SETTINGS)
    sequence = alone.allocate()
    rows = []
    for token in tokens:
        alone.decode([Run(sequence, (token,), 1)])
        rows.append(alone.logits()[0].copy())
    alone.close()
    return np.array(rows)


def test_random_lives_of_sequences_leave_every_row_as_it_is_alone(model: Model, context: SharedContext) -> None:
    chance = random.Random(1)
    held: dict[int, list[int]] = {}
    seen: list[tuple[tuple[int, ...], FloatRows]] = []
    gathered = forks = 0
    for _ in range(400):
        context.check()
        action = chance.random()
        if action < 0.1 and len(held) < 5:
            held[context.allocate()] = []
        elif action < 0.18 and held and len(held) < 5:
            source = chance.choice(list(held))
            length = chance.randint(0, len(held[source]))
            if context.sees_back_from(source, length):
                held[context.copy(source, length)] = held[source][:length]
                forks += 1
        elif action < 0.24 and held:
            gone = chance.choice(list(held))
            context.free(gone)
            del held[gone]
        elif action < 0.27:
            gathered += context.has_gaps
            context.gather()
        else:
            runs = []
            for sequence in held:
                tokens = [chance.randrange(2, TINY_TOKENS) for _ in range(chance.choice((0, 1, 1, 4, 7)))]
                if tokens and len(held[sequence]) < 120:
                    runs.append(Run(sequence, tokens, len(tokens)))
            entering = sum(len(run.tokens) for run in runs)
            if not runs or entering > SETTINGS.max_outputs:
                continue
            if context.free_cells < entering:
                gathered += 1
                context.gather()
            context.decode(runs)
            rows = context.logits().copy()
            for run in runs:
                held[run.sequence] += run.tokens
                seen.append((tuple(held[run.sequence]), rows[: len(run.tokens)]))
                rows = rows[len(run.tokens) :]
                kept = len(held[run.sequence]) - chance.choice((0, 0, 1, 3)) % len(run.tokens)
                context.truncate(run.sequence, kept)
                del held[run.sequence][kept:]
    assert gathered > 3
    assert forks > 5
    for text, rows in chance.sample(seen, 60):
        assert np.array_equal(rows, rows_alone(model, text)[-len(rows) :])


def test_what_lies_at_the_end_is_free_again_when_cut(context: SharedContext) -> None:
    one, two = context.allocate(), context.allocate()
    context.decode([Run(one, (5, 6, 7), 1), Run(two, (8, 9, 10), 1)])
    free = context.free_cells
    context.truncate(two, 1)
    assert context.free_cells == free + 2
    context.truncate(one, 1)
    assert context.free_cells == free + 2
    assert context.has_gaps
    context.gather()
    assert context.free_cells == context.context_tokens - 2
    context.check()


def test_shared_cells_stay_shared_when_gathered(model: Model, context: SharedContext) -> None:
    one = context.allocate()
    context.decode([Run(one, (5, 6, 7, 8), 1)])
    two = context.copy(one, 3)
    context.decode([Run(two, (9,), 1), Run(one, (10,), 1)])
    context.truncate(one, 4)
    gone = context.copy(two)
    context.free(gone)
    foreseen = context.live_cells
    context.gather()
    context.check()
    assert context.live_cells == context.context_tokens - context.free_cells == foreseen
    assert foreseen == (8 if model.window_tokens else 5)
    assert context.cells_of([two]) == 4


def test_a_state_that_finds_no_room_leaves_the_sequence_as_it_was(context: SharedContext) -> None:
    one, two = context.allocate(), context.allocate()
    tokens = [2 + number % 90 for number in range(500)]
    for start in range(0, 500, 100):
        context.decode([Run(one, tokens[start : start + 100], 1)])
    state = context.state(one)
    with pytest.raises(DecodeError):
        context.append(two, state, 500)
    context.check()
    assert (context.length(one), context.length(two)) == (500, 0)
