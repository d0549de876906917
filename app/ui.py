"""The page's events and what they ask of the service.

A command only asks for something; what comes of it is shown by the page's stream, which the command opens anew and
which ends when all is quiet. Handlers translate. No component holds more than text and numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import gradio as gr
from fastapi import APIRouter

from app import compare_view, views
from app.chats import export_links
from app.choices import SetChoice, as_it_is, preparation
from app.compare_tab import set_choices
from app.comparison import kept_results, read_result
from app.conversations import LISTED_AT_FIRST
from app.layout import MODELS_TAB, TOKEN_VIEW, Layout, lay_out
from app.models_events import ModelsEvents, connect_models
from app.notices import attempt
from app.page_state import TURNS_AT_FIRST
from app.page_stream import Shown, shown_in, stream_route
from app.placements import Placements
from app.preset_controls import NO_PRESET, forget_update, known_presets, preset_update
from app.presets import forget, keep, name_of
from app.service import Service
from engine.config import GenerationSettings, SetConfig
from engine.errors import QuorumError
from models.library import STARTER_NAME

WATCHED_S = 2.0
"""A running answer that was read so lately is being watched by another page."""

READ_STORED_IDS = """() => [sessionStorage.getItem("quorum-conversation") ?? "",
                          localStorage.getItem("quorum-conversation") ?? ""]"""
STORE_ID = """(id) => { sessionStorage.setItem("quorum-conversation", id);
                         localStorage.setItem("quorum-conversation", id); }"""
KEEP_CHOSEN = "(chosen, opened) => chosen || opened"
"""A question may have been asked, in a conversation of its own, before the page heard which one it opens."""

WATCH = "(...page) => quorum.watch(...page)"
"""Open the page's stream anew; over when the stream is, or when a newer one has taken over from it."""
TAKE = "() => quorum.take()"
"""What came over the stream since this was last asked."""

SHOW_MORE = f"(shown) => String(Number(shown) + {2 * TURNS_AT_FIRST})"
OPEN_LISTED = "(listed) => [listed, '']"
LIST_MORE = f"(listed) => String(Number(listed) + {LISTED_AT_FIRST})"
RECALL_UNSENT = "(typed) => typed || quorum.recall()"
ASK_FIRST = "() => quorum.visible(false, true, true)"
"""Instead of the button that deletes, those for a second thought."""
ASK_NO_MORE = "() => quorum.visible(true, false, false)"
SHOW_FIRST = f"() => '{TURNS_AT_FIRST}'"

Values = Mapping[Any, Any]
"""What the components hold when an event happens."""


def build_page(service: Service, base: SetChoice, defaults: GenerationSettings) -> tuple[gr.Blocks, APIRouter]:
    """The page, and the route of its stream.

    Args:
        service: Does what the page asks for.
        base: What the set controls do not say about a set to be loaded.
        defaults: Where the answer controls stand at first.
    """
    with gr.Blocks(title="Quorum", analytics_enabled=False, fill_width=True) as page:
        layout = lay_out(base, defaults)
        placements = Placements(base)
        handlers = _Handlers(service, layout, base, placements)
        shown = shown_in(layout)
        _connect(page, layout, shown, handlers, ModelsEvents(service, layout, base, placements))
        _keep_what_is_typed(page)
    return page, stream_route(service, layout.chat, shown)


def _keep_what_is_typed(page: gr.Blocks) -> None:
    """Let what is typed in a tab or section that was just opened stand.

    Gradio makes its controls when it is first opened, and a frame later gives those their first values again whose
    being visible it had put off until then. Controls that were told to be visible before are left alone.
    """
    controls = [
        block
        for block in page.blocks.values()
        if isinstance(block, gr.components.FormComponent) and block.visible is True
    ]
    tells = f"() => Array({len(controls)}).fill({{ __type__: 'update', visible: true }})"
    page.load(None, None, controls, js=tells, show_progress="hidden", api_visibility="private")


def _connect(
    page: gr.Blocks, layout: Layout, shown: Sequence[Shown], handlers: _Handlers, models: ModelsEvents
) -> None:
    """Tie events to handlers."""

    def command(event: Any, handler: Any, inputs: Any, outputs: Any, js: str | None = None) -> Any:
        return event(handler, inputs, outputs, js=js, queue=False, show_progress="hidden", api_visibility="private")

    def in_browser(event: Any, inputs: Any, outputs: Any, js: str) -> Any:
        # Gradio leaves out what is asked for while the same goes on, unless it is told otherwise.
        return event(
            None,
            inputs,
            outputs,
            js=js,
            trigger_mode="multiple",
            show_progress="hidden",
            api_visibility="private",
        )

    watched = [layout.conversation, layout.chats.search, layout.view, layout.most_turns, layout.chats.most_listed]

    def followed(event: Any) -> Any:
        return in_browser(event.then, watched, None, WATCH)

    in_browser(layout.take.click, None, [layout.chat, *(one.component for one in shown)], TAKE)
    sets = layout.models.sets
    asking = {layout.conversation, layout.question, layout.chat, *layout.answers.all()}

    stored = [layout.conversation, layout.last_conversation]
    opened = command(page.load, handlers.open_conversation, stored, layout.last_conversation, READ_STORED_IDS)
    settled = command(opened.then, None, stored, layout.conversation, KEEP_CHOSEN)
    offered = command(settled.then, models.offer_targets, None, sets.target)
    command(followed(offered).then, models.offer_targets, None, sets.target)
    layout.conversation.change(None, layout.conversation, None, js=STORE_ID, api_visibility="private")
    followed(command(layout.refresh.click, lambda: None, None, None))
    followed(command(layout.view.change, handlers.show_view, layout.view, [layout.chat, layout.tokens]))
    command(page.load, handlers.offer_presets, None, layout.answers.presets.preset)
    command(page.load, None, layout.question, layout.question, RECALL_UNSENT)
    followed(command(layout.earlier.click, None, layout.most_turns, layout.most_turns, SHOW_MORE))
    layout.conversation.change(None, None, layout.most_turns, js=SHOW_FIRST, api_visibility="private")
    _connect_presets(layout, handlers, command)
    _connect_chats(layout, handlers, command, followed)
    _connect_compare(layout, handlers, command, followed)
    connect_models(layout, models, command, followed)

    for event in (layout.question.submit, layout.send.click):
        followed(command(event, handlers.ask, asking, [layout.conversation, layout.question, layout.notice]))
    noticed = [layout.conversation, layout.notice]
    followed(command(layout.chat.example_select, handlers.ask_example, asking, noticed))
    followed(command(layout.chat.edit, handlers.ask_instead, asking, layout.notice))
    followed(command(layout.retry.click, handlers.ask_again, asking, layout.notice))
    followed(command(layout.resume.click, handlers.go_on, asking, layout.notice))
    followed(command(layout.check.click, handlers.check, None, layout.notice))
    followed(command(layout.verify.click, handlers.verify, None, layout.notice))
    command(layout.stop_verifying.click, handlers.stop_verifying, None, None)
    command(layout.stop.click, handlers.stop, layout.conversation, None)

    for asked in (
        command(sets.load.click, handlers.load, sets.inputs(), layout.models_notice),
        command(layout.load_again.click, handlers.load_again, None, layout.notice),
        command(layout.starter.click, handlers.load_starter, None, layout.notice),
    ):
        offered = command(followed(asked).then, models.offer_targets, None, sets.target)
        command(offered.then, models.list_installed, None, layout.models.listed())
    for choice in (layout.recommended, layout.own_file):
        command(choice.click, lambda: gr.Tabs(selected=MODELS_TAB), None, layout.tabs)
    command(sets.cancel.click, handlers.cancel_load, None, None)


def _on_any(events: Sequence[Any], handler: Any, inputs: Any, outputs: Any) -> None:
    """Answer controls that change together: what they say in the end counts."""
    gr.on(
        list(events),
        handler,
        inputs,
        outputs,
        queue=False,
        show_progress="hidden",
        trigger_mode="always_last",
        api_visibility="private",
    )


def _connect_presets(layout: Layout, handlers: _Handlers, command: Any) -> None:
    """Tie the events of the sampling presets."""
    presets, sampled = layout.answers.presets, layout.answers.sampled
    command(presets.preset.input, handlers.fill_preset, presets.preset, sampled)
    changed = [presets.preset.change, *(control.change for control in sampled)]
    _on_any(changed, handlers.name_preset, {presets.preset, *sampled}, [presets.preset, presets.forget])
    kept = [presets.preset, presets.name, presets.forget, layout.notice]
    command(presets.keep.click, handlers.keep_preset, {presets.name, *sampled}, kept)
    command(presets.forget.click, handlers.forget_preset, presets.preset, kept)


def _connect_chats(layout: Layout, handlers: _Handlers, command: Any, followed: Any) -> None:
    """Tie the events of the list of conversations."""
    chats = layout.chats
    opened = [layout.conversation, layout.notice]
    followed(command(chats.new.click, handlers.new_chat, layout.conversation, opened))
    followed(command(chats.entries.input, None, chats.entries, opened, OPEN_LISTED))
    followed(command(chats.search.change, lambda: None, None, None))
    followed(command(chats.older.click, None, chats.most_listed, chats.most_listed, LIST_MORE))
    described = [chats.title, chats.export, layout.answers.system_prompt]
    command(layout.conversation.change, handlers.describe, layout.conversation, described)
    followed(command(chats.rename.click, handlers.rename, [layout.conversation, chats.title], layout.notice))
    asked = [chats.delete, chats.keep, chats.really_delete]
    command(chats.delete.click, None, None, asked, ASK_FIRST)
    command(chats.keep.click, None, None, asked, ASK_NO_MORE)
    command(layout.conversation.change, None, None, asked, ASK_NO_MORE)
    followed(command(chats.really_delete.click, handlers.delete, layout.conversation, opened))


def _connect_compare(layout: Layout, handlers: _Handlers, command: Any, followed: Any) -> None:
    """Tie the events of the comparison."""
    compare = layout.compare
    shown = [compare.result, compare.use]
    results = [compare.history, compare.other]
    sets = [compare.drafter_sets, compare.unfit]
    selected = command(layout.compare_tab.select, handlers.offer_sets, None, sets)
    command(selected.then, handlers.offer_results, None, results)
    started = command(compare.start.click, handlers.compare, {layout.conversation, *compare.inputs()}, compare.notice)
    command(followed(started).then, handlers.offer_results, None, results)
    command(compare.cancel.click, handlers.cancel_comparison, None, None)
    _on_any([compare.history.change, compare.other.change], handlers.show_result, results, shown)
    used = command(compare.use.click, handlers.use_best, compare.history, [compare.notice, layout.answers.policy])
    command(followed(used).then, handlers.offer_sets, None, sets)


class _Handlers:
    """From a page's events to the service and back."""

    def __init__(self, service: Service, layout: Layout, base: SetChoice, placements: Placements) -> None:
        self._service = service
        self._layout = layout
        self._base = base
        self._placements = placements

    def open_conversation(self, of_tab: str, last: str) -> str:
        """The tab's own conversation; for a new tab the last one, unless another page is watching its answer."""
        conversations = self._service.conversations
        if conversations.get(of_tab) is not None:
            return of_tab
        run = self._service.run_of(last)
        is_watched = run is not None and not run.is_over and run.unread_s < WATCHED_S
        if conversations.get(last) is not None and not is_watched:
            return last
        return conversations.create().id

    def ask(self, values: Values) -> tuple[str, str, str]:
        """Returns the conversation, what is to stand in the message box, and what stood in the way."""
        question = values[self._layout.question]
        if not question.strip():
            return values[self._layout.conversation], "", ""  # a key pressed twice is no mistake to be told of
        conversation_id, problem = self._ask(values, question)
        return conversation_id, question if problem else "", problem

    def ask_example(self, values: Values, example: gr.SelectData) -> tuple[str, str]:
        """Returns the conversation, and what stood in the way."""
        return self._ask(values, example.value["text"])

    def ask_again(self, values: Values) -> str:
        return attempt(
            lambda: self._service.retry(
                values[self._layout.conversation],
                self._layout.answers.settings(values),
                self._layout.answers.said_before(values),
            )
        )

    def stop(self, conversation_id: str) -> None:
        self._service.stop(conversation_id)

    def ask_instead(self, values: Values, edited: gr.EditData) -> str:
        """Ask an earlier question in other words."""
        questions = [index for index, message in enumerate(values[self._layout.chat]) if message["role"] == "user"]
        conversation = self._service.conversations.get(values[self._layout.conversation])
        before = len(conversation.turns) - len(questions) if conversation else 0
        return attempt(
            lambda: self._service.edit(
                values[self._layout.conversation],
                before + questions.index(edited.index),
                views.unwritten(edited.value),
                self._layout.answers.settings(values),
                self._layout.answers.said_before(values),
            )
        )

    def go_on(self, values: Values) -> str:
        return attempt(
            lambda: self._service.resume(values[self._layout.conversation], self._layout.answers.settings(values))
        )

    def new_chat(self, conversation_id: str) -> tuple[str, str]:
        """Returns an empty conversation, the one at hand if it is, and an empty notice."""
        conversation = self._service.conversations.get(conversation_id)
        if conversation is not None and not conversation.turns:
            return conversation_id, ""
        return self._service.conversations.create().id, ""

    def describe(self, conversation_id: str) -> tuple[str, str, Any]:
        """Returns the title, the download links and the system prompt of a conversation; a new one has none yet."""
        conversation = self._service.conversations.get(conversation_id)
        links = export_links(conversation_id)
        if conversation is None or not conversation.turns:
            return "", links, gr.skip()
        return conversation.title, links, conversation.system_prompt

    def offer_presets(self) -> Any:
        return preset_update()

    def fill_preset(self, name: str) -> tuple[Any, ...]:
        """Returns what the sampling controls are to hold."""
        answers = self._layout.answers
        sampling = known_presets().get(name)
        return tuple(gr.skip() for _ in answers.sampled) if sampling is None else answers.filled(sampling)

    def name_preset(self, values: Values) -> tuple[str, Any]:
        """Returns the preset that says what the sampling controls say, and whether it can be forgotten."""
        answers = self._layout.answers
        try:
            name = name_of(answers.sampling(values), known_presets(), values[answers.presets.preset])
        except QuorumError:
            name = ""  # asking says what is wrong with a value
        return name or NO_PRESET, forget_update(name)

    def keep_preset(self, values: Values) -> tuple[Any, ...]:
        """Returns the presets with the one kept chosen, its name no more, whether it can be forgotten, and a notice."""
        name = values[self._layout.answers.presets.name]
        try:
            kept = keep(name or "", self._layout.answers.sampling(values))
        except QuorumError as error:
            return gr.skip(), gr.skip(), gr.skip(), views.alert(str(error))
        return preset_update(kept), "", forget_update(kept), ""

    def forget_preset(self, name: str) -> tuple[Any, ...]:
        """Returns as `keep_preset`."""
        problem = attempt(lambda: forget(name))
        return preset_update(NO_PRESET), gr.skip(), gr.update(visible=False), problem

    def rename(self, conversation_id: str, title: str) -> str:
        self._service.conversations.rename(conversation_id, title)
        return ""

    def delete(self, conversation_id: str) -> tuple[str, str]:
        """Returns the conversation to show instead, and an empty notice."""
        self._service.forget(conversation_id)
        return self._service.conversations.create().id, ""

    def show_view(self, view: str) -> tuple[Any, Any]:
        shows_tokens = view == TOKEN_VIEW
        return gr.update(visible=not shows_tokens), gr.update(visible=shows_tokens)

    def offer_sets(self) -> tuple[Any, str]:
        """Returns the drafter sets, and why others are not among them."""
        return set_choices(self._service.loaded)

    def offer_results(self) -> tuple[Any, Any]:
        """Returns the results to choose from, and those to show beside it."""
        choices = [(result.name, result.id) for result in kept_results()]
        newest = choices[0][1] if choices else None
        return gr.update(choices=choices, value=newest), gr.update(choices=[("nothing", ""), *choices], value="")

    def compare(self, values: Values) -> str:
        conversation = self._service.conversations.get(values[self._layout.conversation])
        return attempt(lambda: self._service.compare(self._layout.compare.request(values, conversation)))

    def cancel_comparison(self) -> None:
        if self._service.last_comparison is not None:
            self._service.last_comparison.cancel()

    def show_result(self, result_id: str | None, other_id: str | None) -> tuple[str, Any]:
        result = read_result(result_id or "")
        if result is None:
            return compare_view.empty(), gr.update(visible=False)
        other = read_result(other_id or "")
        return compare_view.result_view(result, other), gr.update(visible=bool(result.best))

    def use_best(self, result_id: str) -> tuple[str, Any]:
        """Load the best set of a result, and take its policy over; returns what stood in the way, and the policy."""
        result = read_result(result_id or "")
        if result is None or not result.best:
            return "", gr.skip()
        choice = replace(
            self._base, target=result.document["target"], drafters=tuple(result.document["specs"][result.best])
        )
        policy = result.document["policies"][result.best].partition(":")[0]
        return self._load(choice, self._placements.placed), policy

    def check(self) -> str:
        return attempt(self._service.check)

    def verify(self) -> str:
        return attempt(self._service.verify)

    def stop_verifying(self) -> None:
        verification = self._service.last_verification
        if verification is not None:
            verification.cancel()

    def load_starter(self) -> str:
        return self._load(replace(self._base, target=STARTER_NAME), self._placements.placed)

    def load(self, values: Values) -> str:
        try:
            choice = self._layout.models.sets.choice(values, self._base, self._placements)
        except QuorumError as error:
            return views.alert(str(error))
        return self._load(choice, as_it_is)

    def _load(self, choice: SetChoice, placing: Callable[[SetChoice], SetChoice]) -> str:
        return attempt(lambda: self._service.load(preparation(choice, self._loaded_config(), placing)))

    def _loaded_config(self) -> SetConfig | None:
        return self._service.loaded.config if self._service.loaded else None

    def load_again(self) -> str:
        load = self._service.last_load
        return attempt(lambda: self._service.load(load.prepare)) if load else ""

    def cancel_load(self) -> None:
        if self._service.last_load is not None:
            self._service.last_load.cancel()

    def _ask(self, values: Values, question: str) -> tuple[str, str]:
        conversation_id = values[self._layout.conversation]
        if self._service.conversations.get(conversation_id) is None:
            # Asked before the page had its conversation, or the program was started anew under an open page.
            conversation_id = self._service.conversations.create().id
        problem = attempt(
            lambda: self._service.ask(
                conversation_id,
                question,
                self._layout.answers.settings(values),
                self._layout.answers.said_before(values),
            )
        )
        return conversation_id, problem
