"""What a page has to show at one moment, gathered from the service."""

from __future__ import annotations

from dataclasses import dataclass

from app import compare_view, inside_view, models_view, views
from app.conversations import LISTED_AT_FIRST, Conversation, Listing, Turn
from app.run import RunSnapshot
from app.service import Service
from app.token_view import token_view
from app.trace import TracedStep
from engine.insight import Insight
from engine.runtime.devices import list_devices
from engine.types import FinishReason

TURNS_AT_FIRST = 20
"""Turns that a page shows of a conversation before it is asked for more."""


@dataclass(frozen=True, slots=True)
class PageState:
    """All that a page shows of what is going on, comparable so that only what has changed is sent."""

    conversation_id: str
    messages: list[views.ChatMessage]
    """Of the latest turns: a page that made hundreds anew with every token would be busy with nothing else."""
    earlier_turns: int
    """How many turns come before those shown."""
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
    can_unload: bool
    can_load_again: bool
    can_switch_thinking: bool
    is_empty_handed: bool
    """Nothing is loaded and nothing has been tried: the user is to choose."""
    inside: str
    exactness: str
    trace: str
    is_checking: bool
    verification: str
    is_verifying: bool
    comparing: str
    is_comparing: bool
    errand: str
    is_on_errand: bool
    listing: Listing

    @property
    def is_quiet(self) -> bool:
        return (
            not self.is_answering
            and not self.is_loading
            and not self.is_checking
            and not self.is_verifying
            and not self.is_comparing
            and not self.is_on_errand
        )


class PageWatch:
    """Looks at the service for one page, several times a second; what is costly is made anew only when it changed."""

    def __init__(
        self,
        service: Service,
        conversation_id: str,
        words: str = "",
        *,
        shows_tokens: bool = False,
        most_turns: int = TURNS_AT_FIRST,
        most_listed: int = LISTED_AT_FIRST,
    ) -> None:
        """Args:
        service: Is looked at.
        conversation_id: The conversation that the page shows.
        words: What the list of conversations is searched for.
        shows_tokens: Whether answers are shown token by token.
        most_turns: How many of the latest turns are shown.
        most_listed: How many of the newest conversations are listed.
        """
        self._most_turns = most_turns
        self._most_listed = most_listed
        self._service = service
        self._conversation_id = conversation_id
        self._words = words
        self._shows_tokens = shows_tokens
        self._devices = list_devices()
        self._revision: int | None = None
        self._listing = Listing()
        self._insight: Insight | None = None
        self._cards = inside_view.empty()
        self._traced: tuple[TracedStep, ...] = ()
        self._trace = inside_view.trace(())

    def look(self) -> PageState:
        """What the page has to show now. Counts as reading its answer."""
        service = self._service
        load = service.last_load
        run = service.run_of(self._conversation_id)
        # The answer before the conversation: one that is over has been kept there by then.
        answer = run.read() if run else None
        conversation = service.conversations.get(self._conversation_id)
        turns = conversation.turns if conversation else ()
        running = None if answer is None or answer.is_over else answer
        ahead = service.jobs_ahead(run) if run and running else ()
        loaded = service.loaded
        limit = loaded.context_tokens if loaded else 0
        is_loading = load is not None and not load.is_over
        check = service.last_check
        verification = service.last_verification
        errand = service.errands.last
        comparison = service.last_comparison
        return PageState(
            conversation_id=self._conversation_id,
            messages=views.transcript(turns[-self._most_turns :], running, ahead),
            earlier_turns=max(0, len(turns) - self._most_turns),
            tokens=token_view(turns, running) if self._shows_tokens else "",
            live=views.live_panel(answer),
            status=views.ENDED if service.is_closed else views.status(loaded, load.peek() if load else None),
            hint=views.progress_of(running, ahead) if running else views.hint(loaded is not None, is_loading),
            meter=views.context_meter(answer, limit, _next_to_go(answer, conversation, limit)),
            is_answering=running is not None,
            can_retry=bool(turns) and not running,
            can_resume=bool(turns) and not running and _is_unfinished(turns[-1]),
            is_loading=is_loading,
            can_unload=loaded is not None,
            can_load_again=load is not None and not is_loading and loaded is None,
            can_switch_thinking=loaded is not None and loaded.has_thinking_switch,
            is_empty_handed=loaded is None and load is None,
            inside=self._inside(answer),
            exactness=inside_view.exactness(service.exactness, check.peek() if check else None),
            trace=inside_view.WRITING if running else self._last_steps(),
            is_checking=check is not None and not check.is_over,
            verification=inside_view.verification(verification),
            is_verifying=verification is not None and not verification.is_over,
            comparing=compare_view.progress(comparison.peek_comparison() if comparison else None),
            is_comparing=comparison is not None and not comparison.is_over,
            errand=models_view.errand(errand),
            is_on_errand=errand is not None and not errand.is_over,
            listing=self._listed(),
        )

    def _listed(self) -> Listing:
        revision = self._service.conversations.revision
        if revision != self._revision:
            # The number before the list: what changes in between is seen the next time.
            self._revision = revision
            self._listing = self._service.conversations.find(self._words, self._most_listed)
        return self._listing

    def _inside(self, answer: RunSnapshot | None) -> str:
        insight = self._service.insight
        if insight is not self._insight:
            self._insight = insight
            self._cards = inside_view.empty() if insight is None else inside_view.cards(insight, answer, self._devices)
        return self._cards

    def _last_steps(self) -> str:
        traced = self._service.trace
        if traced is not self._traced:
            self._traced = traced
            self._trace = inside_view.trace(traced)
        return self._trace


def _next_to_go(answer: RunSnapshot | None, conversation: Conversation | None, limit: int) -> str:
    """The oldest question that the model still sees, where the next one pushes it out; empty where it does not."""
    if answer is None or conversation is None or not answer.is_over or not views.is_nearly_full(answer, limit):
        return ""
    messages = conversation.messages(len(conversation.turns) - 1)
    asked = [message for message in messages if message.role != "system"]
    return asked[answer.dropped_messages].content if answer.dropped_messages < len(asked) - 1 else ""


def _is_unfinished(turn: Turn) -> bool:
    """Whether there is an answer that the model did not end itself."""
    return bool(turn.answer) and turn.finish_reason is not FinishReason.STOP
