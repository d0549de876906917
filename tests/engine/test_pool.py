"""Several requests at once: each says what it says alone, whoever comes, goes or is refused meanwhile."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from engine.config import (
    MAX_DRAFT_TOKENS,
    GenerationSettings,
    LookAhead,
    ModelPlacement,
    Policy,
    Sampling,
    SetConfig,
    Speculation,
)
from engine.drafters.base import DraftRequest, always
from engine.drafters.model import ModelDrafter
from engine.drafters.pooled import Order, PooledDrafter
from engine.errors import DecodeError, PoolClosed, PoolFull, PromptError, SettingError
from engine.invariants import CHECKS_VARIABLE
from engine.loader import LoadedSet
from engine.pool import Pool, PoolRequest, PoolSettings, Ticket
from engine.pool_drafting import READING_SLICE_TOKENS
from engine.prefix import shared_prefix
from engine.runtime.context import Run
from engine.runtime.state import StateBytes
from engine.session import Session
from engine.types import Finished, FinishReason, GenerationEvent, PrefillProgress, StepDone
from tests.engine.conftest import GREEDY, PLAIN, answer, never
from tests.engine.making import TINY_TOKENS, write_tiny_gemma3, write_tiny_hybrid, write_tiny_llama
from tests.engine.scripted import check_sums

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
    return [end_of(ticket) for ticket in tickets]


def end_of(ticket: Ticket) -> Finished:
    *_, last = events_of(ticket)
    assert isinstance(last, Finished)
    return last


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


def drafted(policy: str) -> Speculation:
    return Speculation(Policy.parse(policy))


@pytest.mark.parametrize("overlap", [LookAhead.OFF, LookAhead.ON])
@pytest.mark.parametrize("policy", ["auto", "fixed:1", "fixed:4", "minions", "adaedl"])
def test_drafted_requests_say_what_they_say_alone(tiny: LoadedSet, policy: str, overlap: LookAhead) -> None:
    chance = random.Random(6)
    requests = [
        PoolRequest(random_tokens(chance, 10 + 20 * number), GenerationSettings(sampling, drafted(policy), 60))
        for number, sampling in enumerate((*SAMPLINGS, ENDLESS, ENDLESS))
    ]
    pool = Pool(tiny, PoolSettings(most_active=4, context_tokens=2048, overlap=overlap))
    try:
        found = run(pool, *[pool.submit(request) for request in requests])
        statistics = pool.statistics
    finally:
        pool.close()
    for request, one in zip(requests, found, strict=True):
        assert is_same(one, alone(tiny, request))
        check_sums(one.metrics)
    assert statistics.verified == sum(one.metrics.verified for one in found)
    assert statistics.accepted == sum(one.metrics.accepted for one in found)
    if policy != "auto":  # which drafts where that is the faster way
        assert statistics.accepted > 20
        assert statistics.verified > statistics.accepted
        assert (statistics.overlapped > 10) == (overlap is LookAhead.ON)


@pytest.mark.parametrize("overlap", [LookAhead.OFF, LookAhead.ON])
def test_drafters_read_once_what_requests_begin_with(
    tiny: LoadedSet, monkeypatch: pytest.MonkeyPatch, overlap: LookAhead
) -> None:
    """So equal requests are drafted for alike, in a cache that could not hold each of them apart."""
    prompt = random_tokens(random.Random(20), 240)
    request = PoolRequest(prompt, GenerationSettings(ENDLESS, drafted("fixed:3"), 60))
    pool = Pool(tiny, PoolSettings(most_active=6, overlap=overlap))
    read: Counter[str] = Counter()
    for name, drafter in pool._drafting._drafters.items():
        assert drafter._context.context_tokens < 6 * len(prompt)

        def count(runs: Sequence[Run], name: str = name, decode: Callable[..., None] = drafter._context.decode) -> None:
            read[name] += sum(len(run.tokens) for run in runs if len(run.tokens) > MAX_DRAFT_TOKENS)
            decode(runs)

        monkeypatch.setattr(drafter._context, "decode", count)
    try:
        found = run(pool, *[pool.submit(request) for _ in range(6)])
    finally:
        pool.close()
    expected = alone(tiny, request)
    assert all(is_same(one, expected) for one in found)
    passes = [one.metrics.verify_steps + one.metrics.plain_steps for one in found]
    assert max(passes) - min(passes) <= 3
    verified = [one.metrics.verified for one in found]
    assert min(verified) > 0.7 * max(verified) > 20
    for tokens in read.values():
        assert len(prompt) <= tokens < len(prompt) + READING_SLICE_TOKENS


class Move(NamedTuple):
    """What happens before a round."""

    kind: str
    """`submit`, `cancel` or nothing."""
    prompt: tuple[int, ...]
    begins_as: int
    """The prompt goes on from the one of so many requests ago; 0: from none."""
    kept: float
    policy: str
    sampling: Sampling
    max_tokens: int | None
    picked: int
    """Which open request is cancelled."""


def random_move(chance: random.Random) -> Move:
    limit = chance.choice((1, 5, 20, 60, 60, 200, None))
    sampling = ENDLESS if limit is None else chance.choice((*SAMPLINGS, ENDLESS, ENDLESS))
    return Move(
        kind=chance.choices(("submit", "cancel", ""), (0.06, 0.01, 1.0))[0],
        prompt=random_tokens(chance, chance.choice((1, 8, 40, 150))),
        begins_as=chance.choice((0, 0, 1, 3)),
        kept=chance.choice((0.5, 1.0)),
        policy=chance.choice(("auto", "auto", "off", "fixed:1", "fixed:5", "minions", "adaedl")),
        sampling=sampling,
        max_tokens=limit,
        picked=chance.randrange(8),
    )


def test_no_order_of_arrivals_and_cancels_changes_a_token(tiny: LoadedSet) -> None:
    """Thousands of rounds in a cache that is too small, with the invariants checked after each."""
    tally = {"compared": 0, "rounds": 0, "gathered": 0, "put aside": 0, "reused": 0, "accepted": 0, "cancelled": 0}
    for seed in range(3):
        chance = random.Random(seed)
        overlap = tuple(LookAhead)[seed]
        settings = PoolSettings(most_active=5, most_waiting=12, context_tokens=1024, most_kept=3, overlap=overlap)
        pool = Pool(tiny, settings)
        asked: list[tuple[PoolRequest, Ticket, list[GenerationEvent]]] = []
        try:
            for _ in range(500):
                move = random_move(chance)
                if move.kind == "submit":
                    earlier = asked[-move.begins_as][0].prompt if 0 < move.begins_as <= len(asked) else ()
                    prompt = (*earlier[: int(move.kept * len(earlier))], *move.prompt)[-700:]
                    request = PoolRequest(
                        prompt, GenerationSettings(move.sampling, drafted(move.policy), move.max_tokens)
                    )
                    with contextlib.suppress(PoolFull):
                        asked.append((request, pool.submit(request), []))
                elif move.kind == "cancel" and asked:
                    asked[-1 - move.picked % min(len(asked), 8)][1].cancel()
                pool.step()
                tally["put aside"] = max(tally["put aside"], pool.statistics.put_aside)
            while pool.step():
                tally["put aside"] = max(tally["put aside"], pool.statistics.put_aside)
            statistics = pool.statistics
        finally:
            pool.close()
        for request, ticket, events in asked:
            events += events_of(ticket)
            *steps, last = events
            assert isinstance(last, Finished)
            said = tuple(token.id for event in steps if isinstance(event, StepDone) for token in event.tokens)
            assert said[: len(last.token_ids)] == last.token_ids
            expected = alone(tiny, request)
            if last.reason is FinishReason.CANCELLED:
                assert last.token_ids == expected.token_ids[: len(last.token_ids)]
            else:
                assert is_same(last, expected)
            tally["compared"] += len(said)
        assert statistics.done + statistics.cancelled == len(asked)
        assert statistics.failed == 0
        tally["rounds"] += statistics.rounds
        tally["gathered"] += statistics.gathered
        tally["reused"] += statistics.reused_tokens
        tally["accepted"] += statistics.accepted
        tally["cancelled"] += statistics.cancelled
    print(f"\n{tally}")
    assert tally["rounds"] > 3000
    assert tally["compared"] > 5000
    assert min(tally.values()) > 0


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
    pool = Pool(tiny, PoolSettings(most_active=1, most_waiting=1))
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


def test_a_closed_pool_does_nothing(tiny: LoadedSet) -> None:
    pool = Pool(tiny, PoolSettings(most_active=1))
    settings = GenerationSettings(ENDLESS, PLAIN, 20)
    tickets = [pool.submit(PoolRequest((5, 6, 7), settings)) for _ in range(2)]
    pool.step()
    pool.close()
    after = pool.statistics
    assert (after.active, after.waiting, after.cancelled) == (0, 0, 2)
    pool.wait(0)  # requests had woken the owner
    assert not pool.wait(0)
    assert not pool.step()
    tickets[0].cancel()
    assert pool.wait()
    assert not pool.step()
    assert pool.statistics == after
    assert [end_of(ticket).reason for ticket in tickets] == [FinishReason.CANCELLED] * 2


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


def test_slices_are_larger_while_others_wait_to_be_read(tiny: LoadedSet) -> None:
    chance = random.Random(15)
    settings = GenerationSettings(ENDLESS, PLAIN, 30)
    requests = [PoolRequest(random_tokens(chance, 200), settings) for _ in range(4)]
    pool = Pool(tiny, PoolSettings(most_active=4, context_tokens=2048))
    try:
        tickets = [pool.submit(request) for request in requests]
        while pool.step():
            pass
    finally:
        pool.close()
    read = []
    for request, ticket in zip(requests, tickets, strict=True):
        events = events_of(ticket)
        read.append([event.done_tokens for event in events if isinstance(event, PrefillProgress)])
        assert isinstance(events[-1], Finished)
        assert is_same(events[-1], alone(tiny, request))
    assert read == [
        [0, 128, 199],
        [0, 96, 192, 199],
        [0, 64, 128, 192, 199],
        [0, 32, 64, 96, 128, 160, 192, 199],
    ]


@pytest.mark.parametrize("writer", [write_tiny_gemma3, write_tiny_hybrid])
def test_models_of_other_kinds_say_what_they_say_alone(writer: Callable[[Path], Path], tmp_path: Path) -> None:
    """One that sees no further than a window in some layers, and one that cannot take tokens back."""
    config = SetConfig(writer(tmp_path / "model.gguf"), ("ngram", "suffix"), 256, ModelPlacement(threads=1))
    loaded = LoadedSet.load(config)
    chance = random.Random(8)
    requests = [
        PoolRequest(
            random_tokens(chance, 10 + 15 * number),
            GenerationSettings((ENDLESS, GREEDY)[number % 2], drafted("fixed:3"), 60),
        )
        for number in range(7)
    ]
    try:
        pool = Pool(loaded, PoolSettings(most_active=3))
        try:
            found = run(pool, *[pool.submit(request) for request in requests])
            if loaded.model.can_roll_back:
                assert pool.statistics.gathered > 0
                assert pool.statistics.accepted > 0
            else:
                assert pool.statistics.mean_batch == 1
        finally:
            pool.close()
        for request, one in zip(requests, found, strict=True):
            assert is_same(one, alone(loaded, request))
    finally:
        loaded.close()


def test_a_pool_drafts_as_each_drafter_does_alone(tiny: LoadedSet) -> None:
    """For several requests in one pass, after a rejection and after being behind, as for one conversation."""
    drafter = next(one for one in tiny.panel.models if one.name == "near")
    assert isinstance(drafter, ModelDrafter)
    pooled = PooledDrafter(drafter, ModelPlacement(threads=1), 4, 1024)
    chance = random.Random(9)
    texts = {number: list(random_tokens(chance, 20 + 10 * number)) for number in range(4)}
    same = 0
    try:
        for number, text in texts.items():
            pooled.open(number, text)
        for _ in range(6):
            orders = [Order(number, text, 3 + number, always) for number, text in texts.items()]
            drafts = pooled.start(orders, 1).result()
            assert pooled.last_passes <= 7
            for order, draft in zip(orders, drafts, strict=True):
                drafter.begin(order.tokens)
                expected = drafter.start(DraftRequest((), order.max_tokens, always, threading.Event())).result()
                assert len(draft) == len(expected) == order.max_tokens
                at = shared_prefix(draft.tokens, expected.tokens)
                same += at == len(draft)
                if at < len(draft):
                    # A drafter's cache is as fast as can be, not exact: of two that are as likely, either is drafted.
                    second, probability = expected.seconds[at]
                    assert draft.tokens[at] == second
                    assert expected.probabilities[at] - probability < 0.03
            pooled.check(texts)
            for number, draft in enumerate(drafts):
                texts[number] += draft.tokens[: chance.randrange(len(draft) + 1)]
                texts[number] += random_tokens(chance, 1)
        pooled.drop(2)
        del texts[2]
        pooled.check(texts)
        assert same > 12
    finally:
        pooled.close()
        drafter.forget()


def test_a_mirror_goes_on_from_what_another_one_read(tiny: LoadedSet) -> None:
    drafter = next(one for one in tiny.panel.models if one.name == "near")
    assert isinstance(drafter, ModelDrafter)
    pooled = PooledDrafter(drafter, ModelPlacement(threads=1), 3, 256)
    chance = random.Random(21)
    beginning = list(random_tokens(chance, 300))
    texts = {number: beginning + list(random_tokens(chance, 5)) for number in range(3)}
    try:
        for number, text in texts.items():
            pooled.open(number, text)
        assert pooled.start_reading(1, texts, 120, 1).result() == 120
        assert [pooled.behind_tokens(number, text) for number, text in texts.items()] == [185, 185, 185]
        assert pooled.start_reading(0, texts, 200, 1).result() == 185
        assert [pooled.behind_tokens(number, text) for number, text in texts.items()] == [0, 5, 5]
        pooled.check(texts)
        pooled.drop(0)
        del texts[0]
        pooled.check(texts)
        drafts = pooled.start([Order(number, text, 4, always) for number, text in texts.items()], 1).result()
        assert [len(draft) for draft in drafts] == [4, 4]
        pooled.check(texts)
        # What several hold counts once: there is room for another such request, and none for a different one.
        texts[3] = [*beginning, 5, 6]
        pooled.open(3, texts[3])
        assert pooled.start_reading(3, texts, 200, 1).result() == 2
        pooled.drop(1)
        del texts[1]
        texts[4] = list(random_tokens(chance, 300))
        pooled.open(4, texts[4])
        assert pooled.start_reading(4, texts, 300, 1).result() is None
        pooled.check(texts)
    finally:
        pooled.close()


def refuse(pool: Pool, monkeypatch: pytest.MonkeyPatch, is_refused: Callable[[Sequence[Run]], bool]) -> list[int]:
    """Let the pool's cache refuse some passes; how many sequences each of these had, as it goes on."""
    refused: list[int] = []
    decode = pool._context.decode

    def decode_some(runs: Sequence[Run], cancel: threading.Event | None = None) -> None:
        if is_refused(runs):
            refused.append(len(runs))
            raise DecodeError("the cache has no room")
        decode(runs, cancel)

    monkeypatch.setattr(pool._context, "decode", decode_some)
    return refused


@pytest.mark.parametrize("overlap", [LookAhead.OFF, LookAhead.ON])
@pytest.mark.parametrize("policy", ["off", "fixed:3"])
def test_a_pass_that_finds_no_room_costs_nobody_the_answer(
    tiny: LoadedSet, monkeypatch: pytest.MonkeyPatch, policy: str, overlap: LookAhead
) -> None:
    """Every fifth pass is refused, whoever is in it, and those of three and more always."""
    chance = random.Random(10)
    settings = GenerationSettings(ENDLESS, drafted(policy), 25)
    requests = [PoolRequest(random_tokens(chance, 30 + number), settings) for number in range(4)]
    pool = Pool(tiny, PoolSettings(most_active=4, overlap=overlap))
    passes = itertools.count(1)
    refused = refuse(pool, monkeypatch, lambda runs: next(passes) % 5 == 0 or len(runs) > 2)
    try:
        found = run(pool, *[pool.submit(request) for request in requests])
        assert pool.statistics.failed == 0
        assert pool.statistics.gathered > 0
    finally:
        pool.close()
    assert max(refused) > 2
    assert min(refused) <= 2
    for request, one in zip(requests, found, strict=True):
        assert is_same(one, alone(tiny, request))


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_request_that_no_pass_can_carry_fails_alone(
    tiny: LoadedSet, monkeypatch: pytest.MonkeyPatch, culprit: int
) -> None:
    chance = random.Random(11)
    settings = GenerationSettings(ENDLESS, PLAIN, 20)
    requests = [PoolRequest(random_tokens(chance, 30), settings) for _ in range(3)]
    pool = Pool(tiny, PoolSettings(most_active=3))

    def has_culprit(runs: Sequence[Run]) -> bool:
        own = [one.sequence for one in pool._active if one.ticket is tickets[culprit] and len(one.tokens) > 35]
        return any(run.sequence in own for run in runs)

    refused = refuse(pool, monkeypatch, has_culprit)
    try:
        tickets = [pool.submit(request) for request in requests]
        while pool.step():
            pass
        assert (pool.statistics.failed, pool.statistics.done) == (1, 2)
    finally:
        pool.close()
    assert refused[-1] == 1
    for number, (request, ticket) in enumerate(zip(requests, tickets, strict=True)):
        if number == culprit:
            with pytest.raises(DecodeError, match="no room"):
                events_of(ticket)
        else:
            assert is_same(end_of(ticket), alone(tiny, request))


def test_a_request_that_does_not_come_back_from_gathering_fails_alone(
    tiny: LoadedSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(12)
    settings = GenerationSettings(ENDLESS, PLAIN, 30)
    requests = [PoolRequest(random_tokens(chance, 30), settings) for _ in range(3)]
    pool = Pool(tiny, PoolSettings(most_active=3))
    put = pool._context._put
    try:
        tickets = [pool.submit(request) for request in requests]
        while pool.statistics.tokens < 20:
            pool.step()
        lost = next(one for one in pool._active if one.ticket is tickets[1]).sequence

        def put_others(sequence: int, state: StateBytes, tokens: int) -> None:
            if sequence == lost:
                raise DecodeError("refused")
            put(sequence, state, tokens)

        monkeypatch.setattr(pool._context, "_put", put_others)
        pool._room.gather()
        monkeypatch.setattr(pool._context, "_put", put)
        while pool.step():
            pass
        assert (pool.statistics.failed, pool.statistics.done) == (1, 2)
    finally:
        pool.close()
    with pytest.raises(DecodeError, match="ask again"):
        events_of(tickets[1])
    for number in (0, 2):
        assert is_same(end_of(tickets[number]), alone(tiny, requests[number]))


def test_a_prompt_that_is_read_alone_takes_no_more_than_is_free(tiny: LoadedSet) -> None:
    """What ended requests left fills the cache to every degree when the next one comes."""
    chance = random.Random(13)
    settings = GenerationSettings(ENDLESS, PLAIN, 3)
    pool = Pool(tiny, PoolSettings(most_active=2, context_tokens=512))
    try:
        for _ in range(60):
            [one] = run(pool, pool.submit(PoolRequest(random_tokens(chance, chance.randrange(20, 120)), settings)))
            assert one.reason is FinishReason.LENGTH
        assert pool.statistics.gathered > 3
    finally:
        pool.close()


def test_whatever_fails_when_a_pool_is_closed_everybody_is_told(
    tiny: LoadedSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = GenerationSettings(ENDLESS, PLAIN, 20)
    pool = Pool(tiny, PoolSettings(most_active=3))
    tickets = [pool.submit(PoolRequest((5, 6, 7 + number), settings)) for number in range(4)]
    while pool.statistics.active < 3:
        pool.step()

    def fail(_reason: FinishReason) -> Finished:
        raise AssertionError("scripted")

    for active in pool._active[:2]:
        monkeypatch.setattr(active.answer, "finish", fail)
    with pytest.raises(AssertionError, match="scripted"):
        pool.close()
    for ticket in tickets[:2]:
        with pytest.raises(PoolClosed, match="ask again"):
            events_of(ticket)
    assert [end_of(ticket).reason for ticket in tickets[2:]] == [FinishReason.CANCELLED] * 2
    assert len(tiny.model.dependants) == 1


def test_a_request_that_ends_the_pool_by_its_beginning_is_told(
    tiny: LoadedSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(tiny)
    ticket = pool.submit(PoolRequest((5, 6, 7)))

    def fail() -> int:
        raise AssertionError("scripted")

    monkeypatch.setattr(pool._context, "allocate", fail)
    with pytest.raises(AssertionError, match="scripted"):
        pool.step()
    pool.close()
    assert end_of(ticket).reason is FinishReason.CANCELLED
