"""The chat page: its layout, and what its events ask of the service.

A command only asks for something; what comes of it is shown by `follow`, which streams the page's state while
anything is going on and ends when all is quiet. One page has one stream: a newer one takes over from the older.
Handlers translate. No component holds more than text and numbers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gradio as gr

from app import views
from app.choices import SetChoice, preparation
from app.controls import build_answer_controls
from app.service import Service
from app.set_controls import build_set_controls, drafter_updates, target_update
from engine.config import GenerationSettings
from engine.errors import QuorumError

UPDATE_INTERVAL_S = 0.14
"""Seven updates per second: smooth to the eye and cheap for the machine that is also computing the answer."""
WATCHED_S = 2.0
"""A running answer that was read so lately is being watched by another page."""

EXAMPLES = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that reverses a linked list, and explain it.",
    "Give me five tips for sleeping better.",
)

READ_STORED_IDS = """() => [sessionStorage.getItem("quorum-conversation") ?? "",
                          localStorage.getItem("quorum-conversation") ?? ""]"""
STORE_ID = """(id) => { sessionStorage.setItem("quorum-conversation", id);
                         localStorage.setItem("quorum-conversation", id); }"""


@dataclass(frozen=True, slots=True)
class PageState:
    """All that `follow` shows, comparable so that only what has changed is sent."""

    messages: list[views.ChatMessage]
    live: str
    status: str
    hint: str
    is_answering: bool
    can_retry: bool
    is_loading: bool

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
    is_answering = answer is not None and not answer.is_over
    ahead = service.jobs_ahead(run) if run and is_answering else ()
    is_loading = load is not None and not load.is_over
    turns = conversation.turns if conversation else ()
    return PageState(
        messages=views.transcript(turns, answer if is_answering else None, ahead),
        live=views.live_panel(answer),
        status=views.status(service.loaded, load.peek() if load else None),
        hint=views.progress_of(answer, ahead) if answer and is_answering else views.KEYS_HINT,
        is_answering=is_answering,
        can_retry=bool(turns) and not is_answering,
        is_loading=is_loading,
    )


class Streams:
    """Which stream of each page is the newest."""

    def __init__(self) -> None:
        self._newest: dict[str, object] = {}

    def begin(self, page: str) -> object:
        mark = object()
        self._newest[page] = mark
        return mark

    def is_newest(self, page: str, mark: object) -> bool:
        return self._newest.get(page) is mark

    def end(self, page: str, mark: object) -> None:
        if self.is_newest(page, mark):
            del self._newest[page]


def attempt(action: Callable[[], object]) -> str:
    """Do it; what stood in the way, to be shown, or nothing."""
    try:
        action()
    except QuorumError as error:
        return views.alert(str(error))
    return ""


def build_page(service: Service, base: SetChoice, defaults: GenerationSettings) -> gr.Blocks:
    """The page.

    Args:
        service: Does what the page asks for.
        base: What the set controls do not say about a set to be loaded.
        defaults: Where the answer controls stand at first.
    """
    streams = Streams()
    with gr.Blocks(title="Quorum", analytics_enabled=False, fill_width=True) as page:
        conversation = gr.Textbox(visible="hidden", elem_id="conversation", label="Conversation")
        last_conversation = gr.Textbox(visible="hidden", label="Last conversation")
        with gr.Row(elem_id="head"):
            gr.HTML("<h1>Quorum</h1>", elem_id="brand", apply_default_css=False)
            status = gr.HTML(elem_id="status", apply_default_css=False)
        with gr.Row(elem_id="main"):
            with gr.Column(scale=5, min_width=320, elem_id="chat-column"):
                chat = gr.Chatbot(
                    label="Conversation",
                    show_label=False,
                    elem_id="chat",
                    height=None,
                    buttons=["copy"],
                    feedback_options=None,
                    layout="bubble",
                    placeholder=views.GREETING,
                    examples=[{"text": text} for text in EXAMPLES],
                    reasoning_tags=[("<think>", "</think>")],
                    allow_file_downloads=False,
                )
                notice = gr.HTML(elem_id="notice", apply_default_css=False)
                with gr.Row(elem_id="composer", equal_height=True):
                    question = gr.Textbox(
                        label="Message",
                        show_label=False,
                        container=False,
                        placeholder="Write a message",
                        lines=1,
                        max_lines=8,
                        autofocus=True,
                        elem_id="message",
                        scale=8,
                        html_attributes=gr.InputHTMLAttributes(enterkeyhint="send"),
                    )
                    send = gr.Button("Send", variant="primary", elem_id="send", scale=0, min_width=88)
                    stop = gr.Button("Stop", variant="stop", elem_id="stop", scale=0, min_width=88, visible=False)
                with gr.Row(elem_id="under"):
                    hint = gr.HTML(views.KEYS_HINT, elem_id="hint", apply_default_css=False)
                    retry = gr.Button("Retry", size="sm", elem_id="retry", scale=0, min_width=72, visible=False)
                    clear = gr.Button("Clear", size="sm", elem_id="clear", scale=0, min_width=72)
            with gr.Column(scale=3, min_width=320, elem_id="side-column"):
                live = gr.HTML(views.live_panel(None), elem_id="live", apply_default_css=False)
                sets = build_set_controls(base.context_tokens)
                answers = build_answer_controls(defaults)
        refresh = gr.Button("Refresh", elem_id="refresh", visible="hidden")

        shown = [chat, live, status, hint, send, stop, retry, sets.cancel]

        async def follow(conversation_id: str, request: gr.Request) -> AsyncIterator[tuple[Any, ...]]:
            mark = streams.begin(request.session_hash)
            before: tuple[Any, ...] = ()
            try:
                while True:
                    state = page_state(service, conversation_id)
                    now = _component_values(state)
                    if now != before:
                        yield _changes(before, now)
                        before = now
                    if state.is_quiet or service.is_closed or not streams.is_newest(request.session_hash, mark):
                        return
                    await asyncio.sleep(UPDATE_INTERVAL_S)
            finally:
                streams.end(request.session_hash, mark)

        def open_conversation(of_tab: str, last: str) -> str:
            if service.conversations.get(of_tab) is not None:
                return of_tab
            run = service.run_of(last)
            is_watched = run is not None and not run.is_over and run.unread_s < WATCHED_S
            if service.conversations.get(last) is not None and not is_watched:
                return last
            return service.conversations.create().id

        def ask(values: Mapping[Any, Any]) -> tuple[str, str]:
            text = values[question]
            problem = attempt(
                lambda: service.ask(
                    values[conversation], text, answers.settings(values), values[answers.system_prompt] or ""
                )
            )
            return (text if problem else "", problem)

        def ask_example(values: Mapping[Any, Any], example: gr.SelectData) -> str:
            text = example.value["text"]
            return attempt(
                lambda: service.ask(
                    values[conversation], text, answers.settings(values), values[answers.system_prompt] or ""
                )
            )

        def ask_again(values: Mapping[Any, Any]) -> str:
            return attempt(
                lambda: service.retry(
                    values[conversation], answers.settings(values), values[answers.system_prompt] or ""
                )
            )

        def clear_chat(conversation_id: str) -> tuple[str, str]:
            service.forget(conversation_id)
            return service.conversations.create().id, ""

        def load_set(values: Mapping[Any, Any]) -> str:
            return attempt(lambda: service.load(preparation(sets.choice(values, base))))

        def cancel_load() -> None:
            if service.last_load is not None:
                service.last_load.cancel()

        def offer_drafters(target: str) -> tuple[Any, str]:
            return drafter_updates(target, service.loaded.config if service.loaded else None)

        def offer_targets() -> Any:
            return target_update(service.loaded)

        def command(event: Any, handler: Any, inputs: Any, outputs: Any, js: str | None = None) -> Any:
            return event(handler, inputs, outputs, js=js, queue=False, show_progress="hidden", api_visibility="private")

        def following(event: Any) -> Any:
            return event.then(
                follow,
                conversation,
                shown,
                concurrency_limit=None,
                show_progress="hidden",
                api_visibility="private",
            )

        asking = {conversation, question, *answers.all()}
        opened = command(page.load, open_conversation, [conversation, last_conversation], conversation, READ_STORED_IDS)
        command(
            following(command(opened.then, offer_targets, None, sets.target)).then, offer_targets, None, sets.target
        )
        conversation.change(None, conversation, None, js=STORE_ID, api_visibility="private")
        for event in (question.submit, send.click):
            following(command(event, ask, asking, [question, notice]))
        following(command(chat.example_select, ask_example, asking, notice))
        following(command(retry.click, ask_again, asking, notice))
        following(command(clear.click, clear_chat, conversation, [conversation, notice]))
        command(stop.click, service.stop, conversation, None)
        loading = following(command(sets.load.click, load_set, sets.inputs(), notice))
        command(loading.then, offer_targets, None, sets.target)
        command(sets.cancel.click, cancel_load, None, None)
        command(sets.target.change, offer_drafters, sets.target, [sets.drafters, sets.unfit])
        following(command(refresh.click, lambda: None, None, None))
    return page


def _component_values(state: PageState) -> tuple[Any, ...]:
    return (
        state.messages,
        state.live,
        state.status,
        state.hint,
        gr.update(visible=not state.is_answering),
        gr.update(visible=state.is_answering),
        gr.update(visible=state.can_retry),
        gr.update(visible=state.is_loading),
    )


def _changes(before: tuple[Any, ...], now: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values that differ; the others are left as they are in the page."""
    if not before:
        return now
    return tuple(new if new != old else gr.skip() for old, new in zip(before, now, strict=True))
