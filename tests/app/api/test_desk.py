"""The desk with a scripted pool: who is told what when pools fail, and that nobody waits in vain."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from app.api import desk as desk_module
from app.api.desk import IS_EXCHANGED, NOTHING_LOADED, SHUTS_DOWN, Desk
from app.api.documents import on_one_line
from app.api.errors import Unavailable
from engine.errors import DecodeError, MemoryShortage, PoolFull, QuorumError
from engine.loader import LoadedSet
from engine.pool import PoolRequest, PoolSettings, PoolStatistics, Ticket

LOADED = cast(LoadedSet, object())
REQUEST = PoolRequest((1,))


class ScriptedPool:
    """Takes two requests; a step does what it was told to."""

    def __init__(self, _loaded: LoadedSet, settings: PoolSettings, wake: Callable[[], None]) -> None:
        self.settings = settings
        self.tickets: list[Ticket] = []
        self.outcome: Exception | bool = False
        self.is_closed = False
        self._wake = wake

    @property
    def statistics(self) -> PoolStatistics:
        return PoolStatistics("exact", waiting=len(self.tickets), tokens=3)

    def submit(self, request: PoolRequest) -> Ticket:
        if len(self.tickets) == 2:
            raise PoolFull("two are waiting")
        self.tickets.append(Ticket(request, self._wake))
        return self.tickets[-1]

    def step(self) -> bool:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[ScriptedPool]:
    pools: list[ScriptedPool] = []

    def make(*arguments: Any) -> ScriptedPool:
        pools.append(ScriptedPool(*arguments))
        return pools[-1]

    monkeypatch.setattr(desk_module, "Pool", make)
    return pools


def opened(desk: Desk) -> None:
    """Waits for a pool while another thread attends to the desk, as a server and its worker do."""
    is_over = threading.Event()

    def work() -> None:
        while not is_over.is_set():
            desk.attend()

    worker = threading.Thread(target=work)
    worker.start()
    try:
        asyncio.run(asyncio.wait_for(desk.wait_for_pool(), 60))
    finally:
        is_over.set()
        worker.join()


def refusal_of(call: Callable[[], object]) -> str:
    with pytest.raises(QuorumError) as raised:
        call()
    return str(raised.value)


def test_the_pool_is_made_when_somebody_asks(made: list[ScriptedPool]) -> None:
    desk = Desk(PoolSettings(), lambda: None)
    assert refusal_of(lambda: opened(desk)) == NOTHING_LOADED
    desk.open(LOADED)
    assert not desk.attend()
    assert made == []
    opened(desk)
    opened(desk)
    assert len(made) == 1
    assert len(desk.submit([REQUEST, REQUEST])) == 2


def test_requests_are_taken_together_or_not_at_all(made: list[ScriptedPool]) -> None:
    desk = Desk(PoolSettings(), lambda: None)
    desk.open(LOADED)
    opened(desk)
    with pytest.raises(PoolFull):
        desk.submit([REQUEST] * 3)
    assert [ticket.cancelled.is_set() for ticket in made[0].tickets] == [True, True]


def test_a_pool_that_fails_is_put_away_and_made_anew(made: list[ScriptedPool]) -> None:
    desk = Desk(PoolSettings(), lambda: None)
    desk.open(LOADED)
    for outcome in (DecodeError("no room"), ZeroDivisionError("ours")):
        opened(desk)
        made[-1].outcome = outcome
        assert not desk.attend()
        assert made[-1].is_closed
        assert str(outcome) in desk.ended
        assert refusal_of(lambda: desk.submit([REQUEST])) == IS_EXCHANGED
    assert len(made) == 2
    assert desk.counts["tokens"] == 6
    assert "failed" in desk.counts, "what never happened counts as well"


@pytest.mark.parametrize("problem", [MemoryShortage("too little memory"), ZeroDivisionError("ours")])
def test_whoever_waits_hears_why_there_is_no_pool(monkeypatch: pytest.MonkeyPatch, problem: Exception) -> None:
    def fail(*_arguments: Any) -> None:
        raise problem

    monkeypatch.setattr(desk_module, "Pool", fail)
    desk = Desk(PoolSettings(), lambda: None)
    desk.open(LOADED)
    assert str(problem) in refusal_of(lambda: opened(desk))
    assert str(problem) in refusal_of(lambda: opened(desk))


def test_whoever_waits_hears_that_the_set_goes(made: list[ScriptedPool]) -> None:
    desk = Desk(PoolSettings(), lambda: None)
    desk.open(LOADED)

    async def wait() -> None:
        waiting = asyncio.ensure_future(desk.wait_for_pool())
        await asyncio.sleep(0)
        await asyncio.to_thread(desk.close)
        await asyncio.wait_for(waiting, 60)

    assert refusal_of(lambda: asyncio.run(wait())) == IS_EXCHANGED


def test_a_lent_set_is_not_taken_away(made: list[ScriptedPool]) -> None:
    desk = Desk(PoolSettings(), lambda: None)
    desk.open(LOADED)
    closing = threading.Thread(target=desk.close)
    with desk.borrowed():
        closing.start()
        closing.join(0.05)
        assert closing.is_alive()
    closing.join()
    with pytest.raises(Unavailable, match="exchanged"), desk.borrowed():
        pass


def test_nothing_is_taken_once_it_shuts_down(made: list[ScriptedPool]) -> None:
    desk = Desk(PoolSettings(), lambda: None)
    desk.open(LOADED)
    opened(desk)
    desk.refuse(SHUTS_DOWN)
    desk.open(LOADED)
    assert refusal_of(lambda: desk.submit([REQUEST])) == SHUTS_DOWN
    with desk.borrowed() as lent:
        assert lent.loaded is LOADED, "running answers are told to their end"


def test_documents_have_one_line_for_every_reader() -> None:
    text = on_one_line({"a": "one\ntwo\x85\u2028\u2029\x0b\x1cé"})
    assert len(text.splitlines()) == 1
    assert "é" in text
