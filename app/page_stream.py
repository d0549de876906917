"""What an open page is sent: all that it shows, as it changes, until all is quiet.

The stream stands beside Gradio's own, which makes every component anew with each update: on a laptop that takes the
answer a good part of its speed. The page's script hands what comes over to Gradio's components in the browser.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr
from fastapi import APIRouter
from fastapi.responses import StreamingResponse

from app import views
from app.chats import list_update, older_update
from app.layout import TOKEN_VIEW, Layout
from app.page_state import PageState, PageWatch
from app.service import Service

PATH = "/page/state"
UPDATE_INTERVAL_S = 0.125
"""Eight updates per second are smooth to the eye."""
LONGEST_INTERVAL_S = 0.4
UPDATE_SHARE = 0.02
"""Updates may take so much of a processor core before they come less often: the machine is also computing the answer,
and its other cores wait for that one."""
COST_MEMORY = 0.3
SHORTEST_PAUSE_S = 0.03


@dataclass(frozen=True, slots=True)
class Shown:
    """A component, and what it is to hold: a value, or an update of its properties."""

    component: gr.blocks.Block
    value: Callable[[PageState], Any]


def shown_in(layout: Layout) -> tuple[Shown, ...]:
    """All that the stream writes but the chat itself."""
    return (
        Shown(layout.tokens, lambda state: state.tokens),
        Shown(layout.live, lambda state: state.live),
        Shown(layout.hint, lambda state: state.hint),
        Shown(layout.meter, lambda state: state.meter),
        Shown(layout.inside, lambda state: state.inside),
        Shown(
            layout.earlier,
            lambda state: gr.update(visible=state.earlier_turns > 0, value=views.earlier(state.earlier_turns)),
        ),
        Shown(layout.status, lambda state: state.status),
        Shown(layout.send, lambda state: gr.update(visible=not state.is_answering)),
        Shown(layout.stop, lambda state: gr.update(visible=state.is_answering)),
        Shown(layout.retry, lambda state: gr.update(visible=state.can_retry)),
        Shown(layout.resume, lambda state: gr.update(visible=state.can_resume)),
        Shown(layout.models.sets.cancel, lambda state: gr.update(visible=state.is_loading)),
        Shown(layout.models.unload, lambda state: gr.update(visible=state.can_unload)),
        Shown(layout.load_again, lambda state: gr.update(visible=state.can_load_again)),
        Shown(layout.answers.thinking, lambda state: gr.update(visible=state.can_switch_thinking)),
        Shown(layout.welcome, lambda state: gr.update(visible=state.is_empty_handed)),
        Shown(layout.exactness, lambda state: state.exactness),
        Shown(layout.verification, lambda state: state.verification),
        Shown(layout.verify, lambda state: gr.update(visible=not state.is_verifying)),
        Shown(layout.stop_verifying, lambda state: gr.update(visible=state.is_verifying)),
        Shown(layout.trace, lambda state: state.trace),
        Shown(layout.chats.entries, lambda state: list_update(state.listing, state.conversation_id)),
        Shown(layout.chats.older, lambda state: older_update(state.listing.older)),
        Shown(layout.compare.progress, lambda state: state.comparing),
        Shown(layout.compare.start, lambda state: gr.update(visible=not state.is_comparing)),
        Shown(layout.compare.cancel, lambda state: gr.update(visible=state.is_comparing)),
        Shown(layout.models.errand, lambda state: state.errand),
        Shown(layout.models.cancel, lambda state: gr.update(visible=state.is_on_errand)),
    )


def stream_route(service: Service, chat: gr.Chatbot, shown: Sequence[Shown]) -> APIRouter:
    """The route of the stream, for the application to include.

    Each of its events holds the values that changed, by their place in `shown`, and of the chat's messages all from
    the first one that changed. Its last event is named `end`.
    """
    router = APIRouter()

    @router.get(PATH)
    async def state(conversation: str, words: str, view: str, turns: int, listed: int) -> StreamingResponse:
        watch = PageWatch(
            service, conversation, words, shows_tokens=view == TOKEN_VIEW, most_turns=turns, most_listed=listed
        )
        changes = _events(service, watch, _Transcript(chat), shown)
        return StreamingResponse(changes, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    return router


async def _events(
    service: Service, watch: PageWatch, transcript: _Transcript, shown: Sequence[Shown]
) -> AsyncIterator[str]:
    pace = _Pace()
    sent: list[Any] = [None] * len(shown)
    while True:
        began_at = time.monotonic()
        state = watch.look()
        values = [one.value(state) for one in shown]
        changed = {place: value for place, value in enumerate(values) if value != sent[place]}
        chat = transcript.changes(state.messages)
        sent = values
        if changed or chat:
            yield f"data: {json.dumps({'values': changed, 'chat': chat}, ensure_ascii=False)}\n\n"
        if state.is_quiet or service.is_closed:
            yield "event: end\ndata:\n\n"
            return
        # Making and sending an update happened while this waited to be resumed; they count.
        await asyncio.sleep(max(SHORTEST_PAUSE_S, began_at + pace.interval_s() - time.monotonic()))


class _Transcript:
    """The chat's messages as Gradio's chatbot draws them, made anew only where they changed."""

    def __init__(self, chat: gr.Chatbot) -> None:
        self._chat = chat
        self._messages: list[views.ChatMessage] | None = None
        self._drawn: list[list[Any]] = []
        """What is drawn for each message: a thought stands apart from its answer."""

    def changes(self, messages: list[views.ChatMessage]) -> dict[str, Any] | None:
        """How many drawn messages still stand, and those that follow them; None if all do."""
        if messages == self._messages:
            return None
        before = self._messages or []
        pairs = zip(before, messages, strict=False)
        same = next((index for index, (old, new) in enumerate(pairs) if old != new), min(len(before), len(messages)))
        more = [self._chat.postprocess([message]).model_dump() for message in messages[same:]]
        self._drawn[same:] = more
        self._messages = messages
        return {"kept": sum(map(len, self._drawn[:same])), "more": [part for parts in more for part in parts]}


class _Pace:
    """How often a page is updated, by what its updates cost."""

    def __init__(self) -> None:
        self._busy_s = time.thread_time()
        self._cost_s = 0.0

    def interval_s(self) -> float:
        """How long an update is to last, by what the thread that makes them had to do since the last one."""
        busy_s = time.thread_time()
        self._cost_s += COST_MEMORY * (busy_s - self._busy_s - self._cost_s)
        self._busy_s = busy_s
        return min(max(UPDATE_INTERVAL_S, self._cost_s / UPDATE_SHARE), LONGEST_INTERVAL_S)
