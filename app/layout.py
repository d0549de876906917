"""Where things are on the page: four tabs under one head, and in each its components."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gradio as gr

from app import inside_view, views
from app.chats import ChatList, build_chat_list
from app.choices import SetChoice
from app.compare_tab import CompareTab, build_compare_tab
from app.controls import AnswerControls, build_answer_controls
from app.models_tab import ModelsTab, build_models_tab
from app.page_state import TURNS_AT_FIRST
from engine.config import GenerationSettings

EXAMPLES = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that reverses a linked list, and explain it.",
    "Give me five tips for sleeping better.",
)


@dataclass(frozen=True)
class Layout:
    """The components that events read and write."""

    conversation: gr.Textbox
    """Identity of the conversation that the page shows; never seen."""
    last_conversation: gr.Textbox
    """The one that a page opens with; never seen."""
    status: gr.HTML
    load_again: gr.Button
    tabs: gr.Tabs
    chats: ChatList
    earlier: gr.Button
    """Shows turns that come before those shown."""
    most_turns: gr.Textbox
    """How many of the latest turns are shown; never seen."""
    chat: gr.Chatbot
    welcome: gr.Column
    starter: gr.Button
    recommended: gr.Button
    own_file: gr.Button
    view: gr.Radio
    """Whether answers are shown as text or token by token."""
    tokens: gr.HTML
    notice: gr.HTML
    question: gr.Textbox
    send: gr.Button
    stop: gr.Button
    hint: gr.HTML
    meter: gr.HTML
    resume: gr.Button
    retry: gr.Button
    live: gr.HTML
    refresh: gr.Button
    """Pressed by the page itself when it comes back into view; never seen."""
    take: gr.Button
    """Pressed by the page itself when its stream brought something; never seen."""
    compare_tab: gr.Tab
    compare: CompareTab
    models_tab: gr.Tab
    models_notice: gr.HTML
    models: ModelsTab
    answers: AnswerControls
    inside: gr.HTML
    exactness: gr.HTML
    check: gr.Button
    verification: gr.HTML
    verify: gr.Button
    stop_verifying: gr.Button
    trace: gr.HTML


TEXT_VIEW, TOKEN_VIEW = "Text", "Tokens"
CHAT_TAB, COMPARE_TAB, MODELS_TAB, INSIDE_TAB = "chat", "compare", "models", "inside"


def lay_out(base: SetChoice, defaults: GenerationSettings) -> Layout:
    """Make the components, in the Gradio context at hand."""
    parts: dict[str, Any] = {
        "conversation": gr.Textbox(visible="hidden", elem_id="conversation", label="Conversation"),
        "last_conversation": gr.Textbox(visible="hidden", label="Last conversation"),
    }
    with gr.Row(elem_id="head"):
        gr.HTML("<h1>Quorum</h1>", elem_id="brand", apply_default_css=False)
        parts["status"] = gr.HTML("<p>Starting</p>", elem_id="status", apply_default_css=False)
        parts["load_again"] = gr.Button(
            "Try again", size="sm", elem_id="load-again", scale=0, min_width=88, visible=False
        )
    parts["refresh"] = gr.Button("Refresh", elem_id="refresh", visible="hidden")
    parts["take"] = gr.Button("Take", elem_id="take", visible="hidden")
    with gr.Tabs(elem_id="tabs", selected=CHAT_TAB) as parts["tabs"]:
        with gr.Tab("Chat", id=CHAT_TAB, elem_id="chat-tab"), gr.Row(elem_id="main"):
            parts |= _chat_tab(defaults)
        with gr.Tab("Compare", id=COMPARE_TAB, elem_id="compare-tab", render_children=True) as parts["compare_tab"]:
            parts["compare"] = build_compare_tab()
        with gr.Tab("Models", id=MODELS_TAB, elem_id="models-tab", render_children=True) as parts["models_tab"]:
            parts["models_notice"] = gr.HTML(elem_id="models-notice", apply_default_css=False)
            parts["models"] = build_models_tab(base)
        with gr.Tab("Inside", id=INSIDE_TAB, elem_id="inside-tab", render_children=True):
            parts |= _inside_tab()
    return Layout(**parts)


def _chat_tab(defaults: GenerationSettings) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    with gr.Column(scale=2, min_width=200, elem_id="list-column"):
        parts["chats"] = build_chat_list()
    with gr.Column(scale=6, min_width=320, elem_id="chat-column"):
        parts["view"] = gr.Radio(
            [TEXT_VIEW, TOKEN_VIEW],
            value=TEXT_VIEW,
            label="Show answers as",
            show_label=False,
            container=False,
            elem_id="answer-view",
        )
        with gr.Column(visible=False, elem_id="welcome") as parts["welcome"]:
            gr.HTML(views.WELCOME, apply_default_css=False)
            parts["starter"] = gr.Button(
                "Try it now with the starter: 98\u00a0MB", variant="primary", elem_id="use-starter"
            )
            parts["recommended"] = gr.Button("What suits this machine", elem_id="use-recommended")
            parts["own_file"] = gr.Button("A model file of mine", elem_id="use-own-file")
        parts["most_turns"] = gr.Textbox(str(TURNS_AT_FIRST), visible="hidden", label="Turns shown")
        parts["earlier"] = gr.Button("Earlier turns", size="sm", visible=False, elem_id="earlier")
        parts["chat"] = gr.Chatbot(
            label="Conversation",
            show_label=False,
            elem_id="chat",
            height=None,
            buttons=["copy"],
            editable="user",
            feedback_options=None,
            layout="bubble",
            placeholder=views.GREETING,
            examples=[{"text": text} for text in EXAMPLES],
            reasoning_tags=[("<think>", "</think>")],
            allow_file_downloads=False,
        )
        parts["tokens"] = gr.HTML(elem_id="tokens", apply_default_css=False, visible=False)
        parts["notice"] = gr.HTML(elem_id="notice", apply_default_css=False)
        with gr.Row(elem_id="composer", equal_height=True):
            parts["question"] = gr.Textbox(
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
            parts["send"] = gr.Button("Send", variant="primary", elem_id="send", scale=0, min_width=88)
            parts["stop"] = gr.Button("Stop", variant="stop", elem_id="stop", scale=0, min_width=88, visible=False)
        with gr.Row(elem_id="under"):
            parts["hint"] = gr.HTML(elem_id="hint", apply_default_css=False)
            parts["meter"] = gr.HTML(elem_id="meter", apply_default_css=False)
            parts["resume"] = gr.Button("Continue", size="sm", elem_id="resume", scale=0, min_width=72, visible=False)
            parts["retry"] = gr.Button("Retry", size="sm", elem_id="retry", scale=0, min_width=72, visible=False)
    with gr.Column(scale=4, min_width=300, elem_id="side-column"):
        parts["live"] = gr.HTML(views.live_panel(None), elem_id="live", apply_default_css=False)
        parts["answers"] = build_answer_controls(defaults)
    return parts


def _inside_tab() -> dict[str, Any]:
    inside = gr.HTML(inside_view.empty(), elem_id="inside", apply_default_css=False)
    with gr.Row(elem_id="inside-lower"):
        with gr.Column(scale=1, min_width=320):
            exactness = gr.HTML(elem_id="exactness", apply_default_css=False)
            check = gr.Button("Check now", size="sm", elem_id="check-exactness")
            verification = gr.HTML(elem_id="verification", apply_default_css=False)
            verify = gr.Button("Verify now", size="sm", elem_id="verify-lossless")
            stop_verifying = gr.Button("Stop it", variant="stop", size="sm", visible=False, elem_id="stop-verifying")
        with gr.Column(scale=1, min_width=320):
            trace = gr.HTML(elem_id="trace", apply_default_css=False)
    return {
        "inside": inside,
        "exactness": exactness,
        "check": check,
        "verification": verification,
        "verify": verify,
        "stop_verifying": stop_verifying,
        "trace": trace,
    }
