"""The list of conversations, and what can be done with the one that is open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gradio as gr

from app.conversations import LISTED_AT_FIRST, Listing


@dataclass(frozen=True)
class ChatList:
    """Components, in the order in which they appear."""

    new: gr.Button
    search: gr.Textbox
    entries: gr.Radio
    older: gr.Button
    """Lists conversations that are older than those listed."""
    most_listed: gr.Textbox
    """How many of the newest are listed; never seen."""
    title: gr.Textbox
    rename: gr.Button
    export: gr.HTML
    delete: gr.Button
    keep: gr.Button
    really_delete: gr.Button


def build_chat_list() -> ChatList:
    """Lay the components out, in the Gradio context at hand."""
    new = gr.Button("New chat", variant="secondary", size="sm", elem_id="new-chat")
    search = gr.Textbox(
        label="Search conversations",
        show_label=False,
        container=False,
        placeholder="Search",
        max_lines=1,
        elem_id="search-chats",
    )
    entries = gr.Radio([], label="Conversations", show_label=False, container=False, elem_id="chat-list")
    older = gr.Button("Older conversations", size="sm", visible=False, elem_id="older-chats")
    most_listed = gr.Textbox(str(LISTED_AT_FIRST), visible="hidden", label="Conversations listed")
    with gr.Accordion("This conversation", open=False, elem_id="chat-actions"):
        title = gr.Textbox(label="Title", placeholder="Its first question", max_lines=1, elem_id="chat-title")
        rename = gr.Button("Rename", size="sm", elem_id="rename-chat")
        export = gr.HTML(elem_id="export-chat", apply_default_css=False)
        delete = gr.Button("Delete", size="sm", elem_id="delete-chat")
        with gr.Row():
            keep = gr.Button("Keep it", size="sm", visible=False, elem_id="keep-chat", min_width=60)
            really_delete = gr.Button(
                "Delete for good", size="sm", variant="stop", visible=False, elem_id="really-delete-chat", min_width=60
            )
    return ChatList(new, search, entries, older, most_listed, title, rename, export, delete, keep, really_delete)


def list_update(listing: Listing, conversation_id: str) -> dict[str, Any]:
    """What the list is to show; the open conversation is chosen where it is listed."""
    choices = [(entry.name, entry.id) for entry in listing.entries]
    is_listed = any(entry.id == conversation_id for entry in listing.entries)
    update: dict[str, Any] = gr.update(choices=choices, value=conversation_id if is_listed else None)
    return update


def older_update(older: int) -> dict[str, Any]:
    """The button that lists older conversations, where there are some."""
    update: dict[str, Any] = gr.update(visible=older > 0, value=f"Show older conversations ({older:,})")
    return update


def export_links(conversation_id: str) -> str:
    """Where the open conversation can be downloaded."""
    links = " ".join(
        f'<a href="/conversations/{conversation_id}.{suffix}" download>{name}</a>'
        for suffix, name in (("md", "Markdown"), ("json", "JSON"))
    )
    return f'<p class="q-links">Export: {links}</p>'
