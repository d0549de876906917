"""The pool on the real starter: what it says of prompts that people write, deep in a shared cache, is a session's."""

from __future__ import annotations

import pytest

from engine.config import GenerationSettings, LookAhead, Policy, Sampling, Speculation
from engine.invariants import CHECKS_VARIABLE
from engine.loader import LoadedSet
from engine.pool import Pool, PoolRequest, PoolSettings
from engine.session import Session
from engine.types import Finished, StepDone
from tests.engine.conftest import GREEDY, PLAIN, answer, never, tokens_of

TEXTS = (
    "Name a few birds and say where they live.",
    "Once upon a time there was a miller who",
    "def mean(values):",
    "The three most common mistakes when baking bread are",
    "The harbour was quiet when the first boats came in. " * 50,  # more than one stretch is carried from
    "The capital of France is",
)
SAMPLED = Sampling(temperature=0.8, seed=7)


@pytest.fixture(autouse=True)
def _checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHECKS_VARIABLE, "1")


@pytest.mark.parametrize(
    ("policy", "overlap"), [("off", LookAhead.OFF), ("fixed:3", LookAhead.ON), ("auto", LookAhead.AUTO)]
)
def test_requests_say_what_sessions_say(everything: LoadedSet, policy: str, overlap: LookAhead) -> None:
    speculation = Speculation(Policy.parse(policy))
    requests = [
        PoolRequest(
            tuple(tokens_of(everything, text)),
            GenerationSettings((GREEDY, SAMPLED)[number % 2], speculation, 32, top_log_probabilities=2),
        )
        for number, text in enumerate(TEXTS)
    ]
    pool = Pool(everything, PoolSettings(most_active=4, overlap=overlap))
    try:
        tickets = [pool.submit(request) for request in requests]
        while pool.step():
            pass
        assert pool.statistics.mean_batch is not None
        assert pool.statistics.mean_batch > 1.2  # overlapped, half of them at a time
        assert pool.statistics.exactness.startswith("exact")
    finally:
        pool.close()
    cells = 0
    for request, ticket in zip(requests, tickets, strict=True):
        events = []
        while (event := ticket.read(0)) is not None:
            events.append(event)
        last = events[-1]
        assert isinstance(last, Finished)
        session = Session(everything)
        plain = GenerationSettings(request.settings.sampling, PLAIN, 32, top_log_probabilities=2)
        expected = list(session.generate(request.prompt, plain, never()))
        session.close()
        alone = expected[-1]
        assert isinstance(alone, Finished)
        assert (last.token_ids, last.text, last.reason) == (alone.token_ids, alone.text, alone.reason)
        # The very numbers, not only the choices.
        assert [
            token.log_probabilities for event in events if isinstance(event, StepDone) for token in event.tokens
        ] == [token.log_probabilities for event in expected if isinstance(event, StepDone) for token in event.tokens]
        cells += len(request.prompt) + len(last.token_ids)
    assert cells > 512


def test_stop_strings_and_limits_are_a_sessions(everything: LoadedSet) -> None:
    settings = GenerationSettings(GREEDY, Speculation(Policy.parse("fixed:3")), 64, (".", "\n"))
    requests = [PoolRequest(tuple(tokens_of(everything, text)), settings) for text in TEXTS[:4]]
    pool = Pool(everything)
    try:
        tickets = [pool.submit(request) for request in requests]
        while pool.step():
            pass
    finally:
        pool.close()
    for request, ticket in zip(requests, tickets, strict=True):
        last = None
        while (event := ticket.read(0)) is not None:
            last = event
        session = Session(everything)
        alone = answer(session.generate(request.prompt, GenerationSettings(GREEDY, PLAIN, 64, (".", "\n")), never()))
        session.close()
        assert isinstance(last, Finished)
        assert (last.token_ids, last.text, last.reason) == (alone.token_ids, alone.text, alone.reason)
