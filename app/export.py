"""A conversation as a document to take away: Markdown to read, JSON to read by machine."""

from __future__ import annotations

import json
import re

from app.conversations import Conversation, Turn


def as_markdown(conversation: Conversation) -> str:
    """Title, system prompt, and every turn as it reads."""
    parts = [f"# {conversation.name}"]
    if conversation.system_prompt.strip():
        parts.append("\n".join(f"> {line}" for line in conversation.system_prompt.strip().splitlines()))
    for turn in conversation.turns:
        parts.append(f"## You\n\n{turn.question}")
        parts.append(f"## {turn.model or 'Model'}")
        if turn.thinking.strip():
            parts.append(f"<details><summary>Thought</summary>\n\n{turn.thinking.strip()}\n\n</details>")
        if turn.answer:
            parts.append(turn.answer)
        if turn.note:
            parts.append(f"*{turn.note}*")
    return "\n\n".join(parts) + "\n"


def as_json(conversation: Conversation) -> str:
    """Everything that is kept, token by token."""
    document = {
        "id": conversation.id,
        "title": conversation.name,
        "system_prompt": conversation.system_prompt,
        "turns": [_turn(turn) for turn in conversation.turns],
    }
    return json.dumps(document, ensure_ascii=False, indent=1)


def file_stem(conversation: Conversation) -> str:
    """A name that every file system takes."""
    words = re.sub(r"[^A-Za-z0-9]+", "-", conversation.name).strip("-").lower()
    return words[:48].rstrip("-") or "conversation"


def _turn(turn: Turn) -> dict[str, object]:
    return {
        "question": turn.question,
        "thinking": turn.thinking,
        "answer": turn.answer,
        "model": turn.model,
        "finish_reason": turn.finish_reason.value if turn.finish_reason else None,
        "note": turn.note,
        "tokens": [
            {
                "id": token.id,
                "text": token.text,
                "origin": token.provenance.value,
                "proposers": token.proposers,
                "agreement": token.agreement,
                "probability": token.probability,
            }
            for token in turn.tokens
        ],
    }
