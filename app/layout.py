"""Where things are on the page: the conversation, and beside it the live readings and the controls."""

from __future__ import annotations

from dataclasses import dataclass

import gradio as gr

from app import views
from app.controls import AnswerControls, build_answer_controls
from app.set_controls import SetControls, build_set_controls
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
    status: gr.HTML
    load_again: gr.Button
    chat: gr.Chatbot
    notice: gr.HTML
    question: gr.Textbox
    send: gr.Button
    stop: gr.Button
    hint: gr.HTML
    retry: gr.Button
    clear: gr.Button
    live: gr.HTML
    refresh: gr.Button
    """Pressed by the page itself when it comes back into view; never seen."""
    sets: SetControls
    answers: AnswerControls


def lay_out(context_tokens: int, defaults: GenerationSettings) -> Layout:
    """Make the components, in the Gradio context at hand."""
    conversation = gr.Textbox(visible="hidden", elem_id="conversation", label="Conversation")
    last_conversation = gr.Textbox(visible="hidden", label="Last conversation")
    with gr.Row(elem_id="head"):
        gr.HTML("<h1>Quorum</h1>", elem_id="brand", apply_default_css=False)
        status = gr.HTML("<p>Starting</p>", elem_id="status", apply_default_css=False)
        load_again = gr.Button("Try again", size="sm", elem_id="load-again", scale=0, min_width=88, visible=False)
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
                hint = gr.HTML(elem_id="hint", apply_default_css=False)
                retry = gr.Button("Retry", size="sm", elem_id="retry", scale=0, min_width=72, visible=False)
                clear = gr.Button("Clear", size="sm", elem_id="clear", scale=0, min_width=72)
        with gr.Column(scale=3, min_width=320, elem_id="side-column"):
            live = gr.HTML(views.live_panel(None), elem_id="live", apply_default_css=False)
            sets = build_set_controls(context_tokens)
            answers = build_answer_controls(defaults)
    refresh = gr.Button("Refresh", elem_id="refresh", visible="hidden")
    return Layout(
        conversation=conversation,
        last_conversation=last_conversation,
        status=status,
        load_again=load_again,
        chat=chat,
        notice=notice,
        question=question,
        send=send,
        stop=stop,
        hint=hint,
        retry=retry,
        clear=clear,
        live=live,
        refresh=refresh,
        sets=sets,
        answers=answers,
    )
