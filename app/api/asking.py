"""A request's answers while they come: events of all its tickets, and its end when the client goes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from starlette.requests import Request

from app.api.answer import Answer, Delta
from app.api.desk import Desk, Lent
from app.api.errors import Unavailable
from app.api.translate import Asked
from engine.pool import Ticket
from engine.transcript import Piece
from engine.types import Finished, FinishReason, PrefillProgress


class ClientGone(Exception):
    """Nobody reads the answer any more."""


class Asking:
    """Follows the tickets of one request, in the server's loop."""

    def __init__(
        self, desk: Desk, lent: Lent, asked: Sequence[Asked], tickets: Sequence[Ticket], quiet_s: float
    ) -> None:
        """Args:
        quiet_s: Longest time without a word to the client.
        """
        self._desk = desk
        self._lent = lent
        self._asked = asked
        self._tickets = tickets
        self._quiet_s = quiet_s
        self._is_gone = False
        self.answers = [one.answer(index) for index, one in enumerate(asked)]

    def cancel(self) -> None:
        """Give all answers up that are not over. Safe to call at any time."""
        for ticket in self._tickets:
            if not ticket.is_over:
                ticket.cancel()

    async def rounds(self) -> AsyncGenerator[list[tuple[Answer, Delta | PrefillProgress]], None]:
        """What came since the last time, until all answers are over; answers have taken it already.

        Nothing comes where nothing did for a while: whoever waits for a stream can be told that it goes on.

        Raises:
            QuorumError: an answer failed, or the set went away; the others are cancelled.
            ClientGone: there is nobody to tell.
        """
        loop = asyncio.get_running_loop()
        quiet_until = loop.time() + self._quiet_s
        try:
            while any(answer.finished is None for answer in self.answers):
                with self._desk.bell.listening() as rung:
                    found = self._read()
                    if not found:
                        # It rings for the answers of others, too.
                        with contextlib.suppress(asyncio.TimeoutError):
                            await asyncio.wait_for(rung, quiet_until - loop.time())
                if found or loop.time() >= quiet_until:
                    yield found
                    quiet_until = loop.time() + self._quiet_s
        finally:
            self.cancel()

    async def finish(self) -> None:
        """Wait until all answers are over; raises as `rounds`."""
        async with contextlib.aclosing(self.rounds()) as rounds:
            async for _ in rounds:
                pass

    @contextlib.asynccontextmanager
    async def watching(self, request: Request) -> AsyncIterator[None]:
        """Give the answers up when the client goes meanwhile."""
        watch = asyncio.create_task(self._watch(request))
        try:
            yield
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch

    async def _watch(self, request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self._is_gone = True
        self.cancel()

    def _read(self) -> list[tuple[Answer, Delta | PrefillProgress]]:
        found: list[tuple[Answer, Delta | PrefillProgress]] = []
        for ticket, answer, asked in zip(self._tickets, self.answers, self._asked, strict=True):
            while (event := ticket.read(0)) is not None:
                if isinstance(event, Finished):
                    if event.reason is FinishReason.CANCELLED:
                        raise ClientGone if self._is_gone else Unavailable(f"the answer was ended: {self._desk.ended}")
                    self._remember(asked, event)
                found.append((answer, event if isinstance(event, PrefillProgress) else answer.take(event)))
        return found

    def _remember(self, asked: Asked, finished: Finished) -> None:
        """Which tokens the answer is made of, for the client's next question."""
        if asked.transcript is None or not finished.token_ids:
            return
        with contextlib.suppress(Unavailable), self._desk.borrowed() as lent:
            text = lent.loaded.model.vocabulary.text(finished.token_ids)
            if lent is self._lent and finished.text.startswith(text):
                answer = Piece(text, finished.token_ids, is_answer=True)
                lent.recollection.record((*asked.transcript.pieces, answer))
