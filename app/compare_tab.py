"""The controls of a comparison, and their reading as a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from app import compare_view, views
from app.bench.prompts import Half, Prompt, read_prompts
from app.choices import whole_number
from app.comparison import ComparisonRequest, drafter_name
from app.conversations import Conversation
from app.worker import LoadedFacts
from engine.errors import QuorumError, SettingError
from engine.runtime.template import Message
from models.pairing import pairings

SEPARATOR = "|"
POLICIES = (("Auto", "auto"), ("Minions", "minions"), ("AdaEDL", "adaedl"), ("Fixed: 3", "fixed:3"))
THIS_CHAT = "this conversation"
MOST_OF_A_CHAT = 6
NO_TARGET = '<p class="q-small">Drafter sets depend on the target: load a model first, under Models.</p>'
MOST_COMBINED = 3
"""Draft models that are offered together with look-up; more would seldom be faster, and fill the page."""


@dataclass(frozen=True)
class CompareTab:
    """Components, in the order in which they appear."""

    drafter_sets: gr.CheckboxGroup
    unfit: gr.HTML
    policies: gr.CheckboxGroup
    prompts: gr.CheckboxGroup
    own_text: gr.Textbox
    per_category: gr.Slider
    rounds: gr.Slider
    max_tokens: gr.Textbox
    start: gr.Button
    cancel: gr.Button
    notice: gr.HTML
    progress: gr.HTML
    history: gr.Dropdown
    other: gr.Dropdown
    use: gr.Button
    result: gr.HTML

    def inputs(self) -> set[Any]:
        return {
            self.drafter_sets,
            self.policies,
            self.prompts,
            self.own_text,
            self.per_category,
            self.rounds,
            self.max_tokens,
        }

    def request(self, values: Mapping[Any, Any], conversation: Conversation | None) -> ComparisonRequest:
        """What the controls say.

        Raises:
            SettingError: a number is none, or a chosen source of prompts is empty.
        """
        chosen = values[self.prompts]
        prompts = [
            prompt
            for category in chosen
            for prompt in [own for own in shipped_prompts() if own.category == category][: values[self.per_category]]
        ]
        text = (values[self.own_text] or "").strip()
        if text:
            prompts.append(Prompt("own", "own", (Message("user", text),)))
        if THIS_CHAT in chosen:
            prompts += chat_prompts(conversation)
        return ComparisonRequest(
            drafter_sets=tuple(tuple(value.split(SEPARATOR)) for value in values[self.drafter_sets]),
            policies=tuple(values[self.policies]),
            prompts=tuple(prompts),
            rounds=int(values[self.rounds]),
            max_tokens=whole_number(values[self.max_tokens], self.max_tokens.label) or 160,
        )


def shipped_prompts() -> tuple[Prompt, ...]:
    """The half of the shipped prompts that is meant for figures."""
    return tuple(prompt for prompt in read_prompts() if prompt.half is Half.REPORT)


def chat_prompts(conversation: Conversation | None) -> list[Prompt]:
    """The last questions of a conversation, each with what came before it.

    Raises:
        SettingError: there are none.
    """
    if conversation is None or not conversation.turns:
        raise SettingError("this conversation has no question yet; ask one, or choose other prompts")
    numbers = range(len(conversation.turns))[-MOST_OF_A_CHAT:]
    return [Prompt(f"chat-{number + 1}", "chat", conversation.messages(number)) for number in numbers]


def build_compare_tab() -> CompareTab:
    """Lay the components out, in the Gradio context at hand."""
    categories = list(dict.fromkeys(prompt.category for prompt in shipped_prompts()))
    with gr.Row(elem_id="compare"):
        with gr.Column(scale=2, min_width=300, elem_id="compare-controls"):
            drafter_sets = gr.CheckboxGroup([], label="Drafter sets", elem_id="compare-sets")
            unfit = gr.HTML(elem_id="compare-unfit", apply_default_css=False)
            policies = gr.CheckboxGroup(
                list(POLICIES), value=["auto"], label="Policies: how far to draft", elem_id="compare-policies"
            )
            prompts = gr.CheckboxGroup(
                [*categories, THIS_CHAT], value=categories[:2], label="Prompts", elem_id="compare-prompts"
            )
            own_text = gr.Textbox(
                label="A prompt of your own, if you like", lines=2, max_lines=6, elem_id="compare-own"
            )
            per_category = gr.Slider(1, 6, value=2, step=1, label="Prompts of each category", elem_id="compare-limit")
            rounds = gr.Slider(1, 5, value=1, step=1, label="Rounds", elem_id="compare-rounds")
            max_tokens = gr.Textbox("120", label="Tokens an answer", max_lines=1, elem_id="compare-tokens")
            with gr.Row():
                start = gr.Button("Compare", variant="primary", elem_id="compare-start", min_width=120)
                cancel = gr.Button("Stop comparing", variant="stop", visible=False, elem_id="compare-cancel")
            # Beside the button that brings them about, which on a small screen is all that is in view.
            notice = gr.HTML(elem_id="compare-notice", apply_default_css=False)
            progress = gr.HTML(elem_id="compare-progress", apply_default_css=False)
        with gr.Column(scale=5, min_width=320, elem_id="compare-results"):
            with gr.Row(elem_id="compare-history"):
                history = gr.Dropdown([], label="Result", elem_id="compare-result", scale=3, min_width=200)
                other = gr.Dropdown([], label="Beside it", elem_id="compare-other", scale=3, min_width=200)
                use = gr.Button("Use this set", elem_id="compare-use", scale=1, min_width=120, visible=False)
            result = gr.HTML(compare_view.empty(), elem_id="compare-view", apply_default_css=False)
    return CompareTab(
        drafter_sets,
        unfit,
        policies,
        prompts,
        own_text,
        per_category,
        rounds,
        max_tokens,
        start,
        cancel,
        notice,
        progress,
        history,
        other,
        use,
        result,
    )


def set_choices(facts: LoadedFacts | None) -> tuple[Any, str]:
    """The drafter sets to choose from for the loaded target, and why other models are not among them."""
    if facts is None:
        return gr.update(choices=[], value=[]), NO_TARGET
    target = facts.config.target
    try:
        verdicts = [verdict for verdict in pairings(target) if verdict.path.resolve() != target.resolve()]
    except QuorumError as error:
        return gr.update(choices=[], value=[]), views.alert(str(error))
    paths = [str(verdict.path) for verdict in verdicts if verdict.is_worth_choosing]
    sets: list[tuple[str, ...]] = [("ngram", "suffix")]
    sets += [(path,) for path in paths]
    sets += [("ngram", "suffix", path) for path in paths[:MOST_COMBINED]]
    if len(paths) > 1:
        sets.append(("ngram", "suffix", *paths[:MOST_COMBINED]))
    if facts.config.drafters and facts.config.drafters not in sets:
        sets.insert(0, facts.config.drafters)
    choices = [(_set_name(drafters), SEPARATOR.join(drafters)) for drafters in sets]
    loaded = SEPARATOR.join(facts.config.drafters)
    return gr.update(choices=choices, value=[loaded or choices[0][1]]), views.pairing_notes(verdicts)


def _set_name(drafters: Sequence[str]) -> str:
    return " + ".join(drafter_name(spec) if not Path(spec).suffix else Path(spec).stem for spec in drafters)
