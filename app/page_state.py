"""What a page has to show at one moment, gathered from the service."""

from __future__ import annotations

from dataclasses import dataclass

from app import views
from app.service import Service


@dataclass(frozen=True, slots=True)
class PageState:
    """All that a page shows of what is going on, comparable so that only what has changed is sent."""

    messages: list[views.ChatMessage]
    live: str
    status: str
    hint: str
    is_answering: bool
    can_retry: bool
    is_loading: bool
    can_load_again: bool

    @property
    def is_quiet(self) -> bool:
        return not self.is_answering and not self.is_loading


def page_state(service: Service, conversation_id: str) -> PageState:
    """What a page that shows this conversation has to show now. Counts as reading its answer."""
    load = service.last_load
    run = service.run_of(conversation_id)
    # The answer before the conversation: one that is over has been kept there by then.
    answer = run.read() if run else None
    conversation = service.conversations.get(conversation_id)
    turns = conversation.turns if conversation else ()
    running = None if answer is None or answer.is_over else answer
    ahead = service.jobs_ahead(run) if run and running else ()
    is_loaded = service.loaded is not None
    is_loading = load is not None and not load.is_over
    return PageState(
        messages=views.transcript(turns, running, ahead),
        live=views.live_panel(answer),
        status=views.ENDED if service.is_closed else views.status(service.loaded, load.peek() if load else None),
        hint=views.progress_of(running, ahead) if running else views.hint(is_loaded, is_loading),
        is_answering=running is not None,
        can_retry=bool(turns) and not running,
        is_loading=is_loading,
        can_load_again=load is not None and not is_loading and not is_loaded,
    )
