"""Models that forget: sliding windows, which drafts must not get in the way of, and such as take no token back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from engine.config import LookAhead, ModelPlacement, Policy, Sampling, SetConfig, Speculation
from engine.errors import IncompatibleDrafter
from engine.loader import LoadedSet
from engine.prefill import LEAST_CARRIED_TOKENS
from engine.runtime.context import FloatRows
from engine.runtime.devices import has_gpu
from engine.session import Session
from engine.types import Finished
from tests.engine.conftest import GREEDY, PLAIN, answer, never, settings
from tests.engine.making import (
    TINY_TOKENS,
    WINDOW_TOKENS,
    write_tiny_gemma3,
    write_tiny_hybrid,
    write_tiny_llama,
    write_tiny_mamba,
)

ANSWER_TOKENS = 80
SPECULATIONS = {
    "fixed": Speculation(Policy.parse("fixed:5")),
    "run ahead": Speculation(Policy.parse("fixed:3"), look_ahead=LookAhead.ON),
    "auto": Speculation(),
}
SAMPLINGS = {"greedy": GREEDY, "seeded": Sampling(temperature=0.8, seed=3)}


def tokens(count: int, seed: int) -> list[int]:
    """A text of several periods, in which look-up drafters find something now and then."""
    random = np.random.default_rng(seed)
    period = random.integers(2, TINY_TOKENS, 23).tolist()
    noise = random.integers(2, TINY_TOKENS, count).tolist()
    return [noise[place] if place % 11 == 0 else period[place % 23] for place in range(count)]


def say(session: Session, prompt: Sequence[int], speculation: Speculation, sampling: Sampling = GREEDY) -> Finished:
    return answer(session.generate(prompt, settings(speculation, sampling, ANSWER_TOKENS), never()))


def fresh(loaded: LoadedSet, prompt: Sequence[int], sampling: Sampling = GREEDY) -> tuple[tuple[int, ...], FloatRows]:
    """What plain decoding says, and the last logits it said it from."""
    session = Session(loaded)
    said = say(session, prompt, PLAIN, sampling).token_ids
    row: FloatRows = loaded.context.logits()[-1].copy()
    session.close()
    return said, row


def load(target: Path, *drafters: Path | str) -> LoadedSet:
    return LoadedSet.load(SetConfig(target, tuple(map(str, drafters)), 2048, ModelPlacement(threads=2)))


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedSet]:
    """A target with sliding windows, a drafter with such, and one without."""
    folder = tmp_path_factory.mktemp("windowed")
    near = write_tiny_gemma3(folder / "near.gguf", noise=0.1)
    other = write_tiny_llama(folder / "other.gguf")
    loaded = load(write_tiny_gemma3(folder / "target.gguf"), "ngram", near, other)
    assert loaded.model.window_tokens == WINDOW_TOKENS
    yield loaded
    loaded.close()


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_drafts_change_no_token_however_far_beyond_the_window(windowed: LoadedSet, sampling: Sampling) -> None:
    compared = accepted = rejected = 0
    for length in (5, WINDOW_TOKENS, 150, 500):
        prompt = tokens(length, length)
        plain, _ = fresh(windowed, prompt, sampling)
        for speculation in SPECULATIONS.values():
            session = Session(windowed)
            drafted = say(session, prompt, speculation, sampling)
            assert drafted.token_ids == plain
            compared += len(plain)
            accepted += drafted.metrics.accepted
            rejected += drafted.metrics.rejected
            session.close()
    assert compared > 300
    assert accepted > 20
    assert rejected > 100, "many tokens were taken back"


@pytest.mark.skipif(has_gpu(), reason="a CPU's setting")
def test_a_windowed_model_measures_exact(windowed: LoadedSet) -> None:
    assert windowed.setting.is_exact


def test_a_conversation_that_was_put_aside_looks_back_on_nothing_that_is_lost(windowed: LoadedSet) -> None:
    """The state of a sequence holds one window; cut shorter, the layers with windows would miss what was before."""
    first, second = Session(windowed), Session(windowed)
    prompt = tokens(200, 1)
    one = say(first, prompt, SPECULATIONS["fixed"])
    say(second, tokens(120, 2), SPECULATIONS["fixed"])
    for cut in (len(prompt), 150, 60, 10):
        said = say(first, prompt[:cut], SPECULATIONS["fixed"])
        row = windowed.context.logits()[-1].copy()
        plain, plain_row = fresh(windowed, prompt[:cut])
        assert said.token_ids == plain
        if said.metrics.verified == 0:
            assert np.array_equal(row, plain_row)
        say(second, tokens(130, 2), PLAIN)
    again = say(first, prompt, PLAIN)
    assert again.token_ids == one.token_ids
    followed = [*first.tokens, *prompt[:30]]
    said = say(first, followed, PLAIN)
    assert said.metrics.reused_tokens > len(prompt), "what goes on where it was needs nothing read again"
    assert np.array_equal(windowed.context.logits()[-1], fresh(windowed, followed)[1])
    first.close()
    second.close()


@pytest.mark.skipif(has_gpu(), reason="a GPU's cache is F16")
def test_a_long_prompt_of_a_windowed_model_is_carried(windowed: LoadedSet) -> None:
    assert windowed.reader.carries
    prompt = tokens(LEAST_CARRIED_TOKENS + 100, 7)
    session = Session(windowed)
    plain = say(session, prompt, PLAIN)
    assert windowed.reader.carries
    retried = say(session, prompt, SPECULATIONS["fixed"])
    assert retried.token_ids == plain.token_ids
    assert retried.metrics.reused_tokens == len(prompt) - 1
    assert fresh(windowed, prompt)[0] == plain.token_ids
    session.close()


# What takes no token back


def mamba(starter: Path, folder: Path) -> Path:
    return write_tiny_mamba(starter, folder / "mamba.gguf")


def hybrid(_starter: Path, folder: Path) -> Path:
    return write_tiny_hybrid(folder / "hybrid.gguf")


@pytest.mark.parametrize("make", [mamba, hybrid])
def test_recurrent_and_hybrid_targets_run_plain_and_say_why(
    starter: Path, tmp_path: Path, make: Callable[[Path, Path], Path]
) -> None:
    loaded = load(make(starter, tmp_path), "ngram", "suffix")
    assert not loaded.model.can_roll_back
    assert not loaded.reader.carries
    sessions = [Session(loaded) for _ in range(2)]
    prompts = [tokens(60, 1), tokens(45, 2)]
    plain = [fresh(loaded, prompt)[0] for prompt in prompts]
    for session, prompt, said in zip(sessions, prompts, plain, strict=True):
        for speculation in (SPECULATIONS["fixed"], SPECULATIONS["auto"]):
            finished = say(session, prompt, speculation)
            assert finished.token_ids == said
            assert (finished.metrics.verified, finished.metrics.plain) == (0, len(said))
            assert finished.state.reason == "off: this model cannot take back rejected tokens"
    # By turns: each waits in memory while the other computes.
    for session, prompt in zip(sessions, prompts, strict=True):
        longer = [*session.tokens, *prompt[:9]]
        assert say(session, longer, SPECULATIONS["auto"]).token_ids == fresh(loaded, longer)[0]
    cancel = threading.Event()
    cancel.set()
    answer(sessions[0].generate([*prompts[0], *prompts[1]], settings(), cancel))
    assert say(sessions[0], prompts[0], PLAIN).token_ids == plain[0]
    loaded.close()


def test_a_hybrid_drafter_is_declined_with_the_reason(tmp_path: Path) -> None:
    target = write_tiny_llama(tmp_path / "target.gguf")
    with pytest.raises(IncompatibleDrafter, match=r"hybrid cannot draft: it is a recurrent model"):
        load(target, write_tiny_hybrid(tmp_path / "hybrid.gguf"))
