"""Several requests at once: each says what it says alone, whoever comes, goes or is refused meanwhile."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Iterator

import pytest

from engine.config import GenerationSettings, ModelPlacement, Sampling, SetConfig
from engine.errors import PoolClosed, PoolFull, PromptError, SettingError
from engine.invariants import CHECKS_VARIABLE
from engine.loader import LoadedSet
from engine.pool import Pool, PoolRequest, PoolSettings, Ticket
from engine.session import Session
from engine.types import Finished, FinishReason, GenerationEvent, PrefillProgress, StepDone
from tests.engine.conftest import GREEDY, PLAIN, answer, never
from tests.engine.making import TINY_TOKENS, write_tiny_llama

TINY_CONTEXT_TOKENS = 768
SAMPLINGS = (
    GREEDY,
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.8, seed=2, repeat_penalty=1.2),
    Sampling(temperature=0, grammar="root ::= ([0-9] | [A-F])*"),
)
ENDLESS = Sampling(temperature=1.0, seed=4, logit_bias=((1, -math.inf),))
"""The end token is forbidden."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedSet]:
    """A random target on two threads, with every kind of drafter."""
    folder = tmp_path_factory.mktemp("tiny")
    target = write_tiny_llama(folder / "target.gguf")
    near, far = (write_tiny_llama(folder / f"{name}.gguf", noise) for name, noise in (("near", 0.1), ("far", 0.6)))
    drafters = ("ngram", "suffix", str(near), str(far))
    loaded = LoadedSet.load(SetConfig(target, drafters, TINY_CONTEXT_TOKENS, ModelPlacement(threads=2)))
    yield loaded
    loaded.close()


@pytest.fixture(autouse=True)
def _checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHECKS_VARIABLE, "1")


def events_of(ticket: Ticket) -> list[GenerationEvent]:
    """What there is to read."""
    events: list[GenerationEvent] = []
    while (event := ticket.read(0)) is not None:
        events.append(event)
    return events


def run(pool: Pool, *tickets: Ticket) -> list[Finished]:
    """Step until nothing is left to do; the last event of each ticket."""
    while pool.step():
        pass
    finished = []
    for ticket in tickets:
        *_, last = events_of(ticket)
        assert isinstance(last, Finished)
        finished.append(last)
    return finished


def alone(loaded: LoadedSet, request: PoolRequest) -> Finished:
    """What a session says without drafts."""
    session = Session(loaded)
    settings = request.settings
    plain = GenerationSettings(settings.sampling, PLAIN, settings.max_tokens, settings.stop_strings)
    try:
        return answer(session.generate(request.prompt, plain, never()))
    finally:
        session.close()


def random_tokens(chance: random.Random, count: int) -> tuple[int, ...]:
    return tuple(chance.randrange(2, TINY_TOKENS) for _ in range(count))


def is_same(found: Finished, expected: Finished) -> bool:
    return (found.token_ids, found.text, found.reason) == (expected.token_ids, expected.text, expected.reason)


def test_requests_say_what_they_say_alone(tiny: LoadedSet) -> None:
    chance = random.Random(1)
    requests = [
        PoolRequest(random_tokens(chance, 10 + 37 * number), GenerationSettings(SAMPLINGS[number % 4], PLAIN, 40))
        for number in range(9)
    ]
    pool = Pool(tiny, PoolSettings(most_active=5, context_tokens=2048))
    try:
        found = run(pool, *[pool.submit(request) for request in requests])
    finally:
        pool.close()
    for request, one in zip(requests, found, strict=True):
        assert is_same(one, alone(tiny, request))
    statistics = pool.statistics
    assert statistics.done == 9
    assert statistics.mean_batch is not None
    assert statistics.mean_batch > 1.5
    assert statistics.tokens == sum(len(one.token_ids) for one in found)
    assert statistics.active == statistics.waiting == 0


def test_requests_with_the_same_beginning_read_it_once(tiny: LoadedSet) -> None:
    prompt = random_tokens(random.Random(2), 100)
    requests = [
        PoolRequest(prompt, GenerationSettings(Sampling(temperature=1.0, seed=seed), PLAIN, 20)) for seed in range(4)
    ]
    longer = PoolRequest((*prompt, 5, 6, 7), GenerationSettings(GREEDY, PLAIN, 20))
    pool = Pool(tiny)
    try:
        found = run(pool, *[pool.submit(request) for request in requests])
        assert [one.metrics.reused_tokens for one in found] == [0, 99, 99, 99]
        # Of an ended request too.
        (last,) = run(pool, pool.submit(longer))
        assert last.metrics.reused_tokens == 100
    finally:
        pool.close()
    for request, one in zip((*requests, longer), (*found, last), strict=True):
        assert is_same(one, alone(tiny, request))


def test_a_request_that_is_cancelled_leaves_the_others_alone(tiny: LoadedSet) -> None:
    chance = random.Random(3)
    settings = GenerationSettings(ENDLESS, PLAIN, 60)
    kept, cancelled = (PoolRequest(random_tokens(chance, 30), settings) for _ in range(2))
    pool = Pool(tiny)
    try:
        tickets = [pool.submit(kept), pool.submit(cancelled)]
        passes = 0
        while sum(isinstance(event, StepDone) for event in events_of(tickets[1])) == 0:
            pool.step()
        tickets[1].cancel()
        passes = pool.statistics.passes
        pool.step()
        (last,) = events_of(tickets[1])
        assert isinstance(last, Finished)
        assert last.reason is FinishReason.CANCELLED
        assert pool.statistics.passes == passes + 1
        assert pool.statistics.cancelled == 1
        (found,) = run(pool, tickets[0])
    finally:
        pool.close()
    expected = alone(tiny, cancelled).token_ids
    assert last.token_ids == expected[: len(last.token_ids)]
    assert is_same(found, alone(tiny, kept))


def test_a_request_that_waits_can_be_cancelled(tiny: LoadedSet) -> None:
    pool = Pool(tiny, PoolSettings(most_active=1))
    try:
        settings = GenerationSettings(ENDLESS, PLAIN, 20)
        first, second = (pool.submit(PoolRequest((5, 6, 7), settings)) for _ in range(2))
        pool.step()
        assert pool.statistics.waiting == 1
        second.cancel()
        pool.step()
        (event,) = events_of(second)
        assert isinstance(event, Finished)
        assert (event.reason, event.token_ids) == (FinishReason.CANCELLED, ())
        run(pool, first)
    finally:
        pool.close()


def test_what_cannot_be_answered_is_refused(tiny: LoadedSet) -> None:
    pool = Pool(tiny, PoolSettings(most_active=1, most_waiting=2))
    try:
        with pytest.raises(PromptError, match="empty"):
            pool.submit(PoolRequest(()))
        with pytest.raises(PromptError, match=f"has {TINY_CONTEXT_TOKENS} tokens"):
            pool.submit(PoolRequest((5,) * TINY_CONTEXT_TOKENS))
        bad = GenerationSettings(Sampling(temperature=0, grammar="root ::= ("), PLAIN, 20)
        tickets = [
            pool.submit(PoolRequest((5, 6), settings)) for settings in (bad, GenerationSettings(GREEDY, PLAIN, 5))
        ]
        with pytest.raises(PoolFull, match="2 requests are waiting"):
            pool.submit(PoolRequest((5, 6)))
        pool.step()
        with pytest.raises(SettingError):
            tickets[0].read(0)
        assert isinstance(tickets[0].error, SettingError)
        assert tickets[0].read(0) is None
        assert tickets[0].is_over
        run(pool, tickets[1])
        assert (pool.statistics.failed, pool.statistics.done) == (1, 1)
    finally:
        pool.close()


def test_closing_ends_every_request(tiny: LoadedSet) -> None:
    pool = Pool(tiny, PoolSettings(most_active=1))
    settings = GenerationSettings(ENDLESS, PLAIN, 20)
    tickets = [pool.submit(PoolRequest((5, 6, 7), settings)) for _ in range(2)]
    pool.step()
    pool.close()
    pool.close()
    for ticket in tickets:
        *_, last = events_of(ticket)
        assert isinstance(last, Finished)
        assert last.reason is FinishReason.CANCELLED
        assert ticket.read() is None
    with pytest.raises(PoolClosed):
        pool.submit(PoolRequest((5, 6, 7)))
    assert len(tiny.model.dependants) == 1


def test_the_owner_is_woken_by_requests_and_cancels(tiny: LoadedSet) -> None:
    woken = threading.Semaphore(0)
    pool = Pool(tiny, wake=woken.release)
    try:
        assert not pool.step()
        assert not pool.wait(0)
        other = threading.Thread(target=lambda: pool.submit(PoolRequest((5, 6, 7))).cancel())
        other.start()
        assert pool.wait()
        other.join()
        assert woken.acquire(timeout=0)
        assert woken.acquire(timeout=0)
        while pool.step():
            pass
        assert pool.statistics.cancelled == 1
    finally:
        pool.close()


def test_answers_find_room_by_turns_where_all_have_too_little(tiny: LoadedSet) -> None:
    """No answer ends, and together they need several times the cache."""
    chance = random.Random(4)
    settings = GenerationSettings(ENDLESS, PLAIN)
    requests = [PoolRequest(random_tokens(chance, 40), settings) for _ in range(4)]
    pool = Pool(tiny, PoolSettings(most_active=4))
    try:
        tickets = [pool.submit(request) for request in requests]
        put_aside = 0
        while pool.step():
            put_aside = max(put_aside, pool.statistics.put_aside)
        found = run(pool, *tickets)
        assert pool.statistics.gathered > 0
    finally:
        pool.close()
    assert put_aside > 0
    for request, one in zip(requests, found, strict=True):
        assert one.reason is FinishReason.CONTEXT
        assert is_same(one, alone(tiny, request))


def test_a_long_prompt_is_read_as_a_session_reads_it(tiny: LoadedSet) -> None:
    assert tiny.reader.carries
    chance = random.Random(5)
    long = random_tokens(chance, 640)
    settings = GenerationSettings(Sampling(temperature=1.0, seed=3), PLAIN, 30)
    requests = [PoolRequest(random_tokens(chance, 20), GenerationSettings(ENDLESS, PLAIN, 60))]
    requests += [PoolRequest(long, settings), PoolRequest(long, settings)]
    pool = Pool(tiny, PoolSettings(context_tokens=2048))
    try:
        tickets = [pool.submit(request) for request in requests]
        while pool.step():
            pass
        reading = [event.done_tokens for event in events_of(tickets[1]) if isinstance(event, PrefillProgress)]
        assert reading == [0, 128, 256, 384, 512, 639]
        found = [run(pool, pool.submit(request))[0] for request in requests]
        assert [one.metrics.reused_tokens for one in found] == [19, 639, 639]
    finally:
        pool.close()
    for request, one in zip(requests, found, strict=True):
        assert is_same(one, alone(tiny, request))
