"""What a page has to show at one moment, gathered from the service."""

from __future__ import annotations

from dataclasses import dataclass

from app import compare_view, inside_view, models_view, views
from app.conversations import Entry
from app.service import Service
from app.token_view import token_view
from engine.runtime.devices import list_devices


@dataclass(frozen=True, slots=True)
class PageState:
    """All that a page shows of what is going on, comparable so that only what has changed is sent."""

    messages: list[views.ChatMessage]
    tokens: str
    """Empty where the answers are shown as text."""
    live: str
    status: str
    hint: str
    meter: str
    is_answering: bool
    can_retry: bool
    can_resume: bool
    is_loading: bool
    can_load_again: bool
    is_empty_handed: bool
    """Nothing is loaded and nothing has been tried: the user is to choose."""
    inside: str
    exactness: str
    trace: str
    is_checking: bool
    comparing: str
    is_comparing: bool
    result_id: str
    """Of the comparison that was finished last; empty before."""
    errand: str
    is_on_errand: bool
    entries: tuple[Entry, ...]

    @property
    def is_quiet(self) -> bool:
        return (
            not self.is_answering
            and not self.is_loading
            and not self.is_checking
            and not self.is_comparing
            and not self.is_on_errand
        )


def page_state(service: Service, conversation_id: str, words: str = "", *, shows_tokens: bool = False) -> PageState:
    """What a page that shows this conversation has to show now. Counts as reading its answer.

    Args:
        words: What the list of conversations is searched for.
        shows_tokens: Whether answers are shown token by token.
    """
    load = service.last_load
    run = service.run_of(conversation_id)
    # The answer before the conversation: one that is over has been kept there by then.
    answer = run.read() if run else None
    conversation = service.conversations.get(conversation_id)
    turns = conversation.turns if conversation else ()
    running = None if answer is None or answer.is_over else answer
    ahead = service.jobs_ahead(run) if run and running else ()
    loaded, insight = service.loaded, service.insight
    is_loading = load is not None and not load.is_over
    check = service.last_check
    errand = service.errands.last
    comparison = service.last_comparison
    cards = inside_view.empty()
    if insight is not None:
        cards = inside_view.cards(insight, answer, list_devices())
    return PageState(
        messages=views.transcript(turns, running, ahead),
        tokens=token_view(turns, running) if shows_tokens else "",
        live=views.live_panel(answer),
        status=views.ENDED if service.is_closed else views.status(loaded, load.peek() if load else None),
        hint=views.progress_of(running, ahead) if running else views.hint(loaded is not None, is_loading),
        meter=views.context_meter(answer, loaded.context_tokens if loaded else 0),
        is_answering=running is not None,
        can_retry=bool(turns) and not running,
        can_resume=bool(turns) and not running and bool(turns[-1].answer and turns[-1].note),
        is_loading=is_loading,
        can_load_again=load is not None and not is_loading and loaded is None,
        is_empty_handed=loaded is None and load is None,
        inside=cards,
        exactness=inside_view.exactness(service.exactness, check.peek() if check else None),
        trace=inside_view.WRITING if running else inside_view.trace(service.trace),
        is_checking=check is not None and not check.is_over,
        comparing=compare_view.progress(comparison.peek_comparison() if comparison else None),
        is_comparing=comparison is not None and not comparison.is_over,
        result_id=comparison.result_id if comparison and comparison.is_over else "",
        errand=models_view.errand(errand),
        is_on_errand=errand is not None and not errand.is_over,
        entries=service.conversations.find(words),
    )
