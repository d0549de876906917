"""Loaded sets of the real starter, and how to ask them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from engine.config import GenerationSettings, ModelPlacement, Policy, Sampling, SetConfig, Speculation
from engine.loader import LoadedSet
from engine.session import Session
from engine.types import Finished, GenerationEvent

PLAIN = Speculation(Policy.parse("plain"))
GREEDY = Sampling(temperature=0)
CONTEXT_TOKENS = 3072


@pytest.fixture(scope="session")
def cost_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all tests, so that the machine is measured once."""
    return tmp_path_factory.mktemp("costs") / "costs.json"


@pytest.fixture(scope="module")
def everything(starter: Path, draft_models: dict[str, Path], cost_file: Path) -> Iterator[LoadedSet]:
    """The starter with all drafters there are, on two threads: where exactness is harder to keep than on one."""
    drafters = ("ngram", "suffix", *map(str, draft_models.values()))
    config = SetConfig(starter, drafters, CONTEXT_TOKENS, ModelPlacement(threads=2), cost_file=cost_file)
    loaded = LoadedSet.load(config)
    yield loaded
    loaded.close()


@pytest.fixture
def session(everything: LoadedSet) -> Iterator[Session]:
    """A conversation with all of them."""
    session = Session(everything)
    yield session
    session.close()


SMALL_CONTEXT_TOKENS = 512


@pytest.fixture(scope="module")
def small(starter: Path, draft_models: dict[str, Path], cost_file: Path) -> Iterator[LoadedSet]:
    """The starter with one drafter of each kind and little room, on one thread."""
    drafters = ("ngram", "suffix", str(draft_models["few-bits"]))
    config = SetConfig(starter, drafters, SMALL_CONTEXT_TOKENS, ModelPlacement(threads=1), cost_file=cost_file)
    loaded = LoadedSet.load(config)
    yield loaded
    loaded.close()


def settings(
    speculation: Speculation = PLAIN,
    sampling: Sampling = GREEDY,
    max_tokens: int | None = 24,
    stop_strings: Sequence[str] = (),
) -> GenerationSettings:
    return GenerationSettings(sampling, speculation, max_tokens, tuple(stop_strings))


def answer(events: Iterator[GenerationEvent]) -> Finished:
    """The last event of an answer."""
    *_, last = events
    assert isinstance(last, Finished)
    return last


def never() -> threading.Event:
    """A cancel event that nobody sets."""
    return threading.Event()


def tokens_of(loaded: LoadedSet, text: str) -> list[int]:
    return loaded.model.vocabulary.tokenize(text, adds_special=True)
