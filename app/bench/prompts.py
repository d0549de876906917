"""The benchmark's prompts: those that come with the program, or a user's own file.

A file holds one JSON object a line: `id`, `category`, and `prompt` (a text) or `messages` (a conversation whose last
message is the user's); `copies` marks a prompt whose answer repeats much of it. Every prompt belongs to one of two
halves by the hash of its id, for good: one half to tune on, the other to report.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from engine.errors import SettingError
from engine.runtime.template import Message

SHIPPED_PROMPTS = Path(__file__).with_name("prompts.jsonl")
ROLES = ("system", "user", "assistant")


class Half(str, Enum):
    """Which prompts are run."""

    TUNE = "tune"
    REPORT = "report"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation to answer."""

    id: str
    category: str
    messages: tuple[Message, ...]
    copies: bool = False
    """Its answer repeats much of the prompt."""

    @property
    def half(self) -> Half:
        """Fixed by the id alone."""
        is_odd = hashlib.sha256(self.id.encode()).digest()[0] % 2
        return Half.REPORT if is_odd else Half.TUNE


def read_prompts(path: Path = SHIPPED_PROMPTS) -> tuple[Prompt, ...]:
    """All prompts of a file, in its order.

    Raises:
        SettingError: the file cannot be read, or a line is not a prompt; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"cannot read the prompts in {path}: {error}") from error
    prompts: dict[str, Prompt] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompt = _prompt(json.loads(line))
        except ValueError as error:
            raise SettingError(f"{path}, line {number}: {error}") from error
        if prompt.id in prompts:
            raise SettingError(f"{path}, line {number}: the id {prompt.id!r} is already taken")
        prompts[prompt.id] = prompt
    if not prompts:
        raise SettingError(f"{path} holds no prompts")
    return tuple(prompts.values())


def choose_prompts(prompts: Sequence[Prompt], half: Half, categories: Collection[str] = ()) -> tuple[Prompt, ...]:
    """The prompts of one half, of the named categories (none: all), category by category.

    Raises:
        SettingError: a category is unknown, or nothing is left.
    """
    known = list(dict.fromkeys(prompt.category for prompt in prompts))
    unknown = [category for category in categories if category not in known]
    if unknown:
        raise SettingError(f"no prompt has the category {unknown[0]!r}; there are {', '.join(known)}")
    chosen = []
    for category in known:
        if categories and category not in categories:
            continue
        chosen += [prompt for prompt in prompts if prompt.category == category and half in (Half.ALL, prompt.half)]
    if not chosen:
        raise SettingError(f"no prompt is left in the {half.value} half; choose another with --half")
    return tuple(chosen)


def _prompt(data: Any) -> Prompt:
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    for key in ("id", "category"):
        if not isinstance(data.get(key), str) or not data[key].strip():
            raise ValueError(f"{key!r} must be a text that is not empty")
    if ("prompt" in data) == ("messages" in data):
        raise ValueError("give either 'prompt' or 'messages'")
    written = data["messages"] if "messages" in data else [{"role": "user", "content": data["prompt"]}]
    if not isinstance(written, list) or not written:
        raise ValueError("'messages' must be a list that is not empty")
    messages = tuple(_message(message) for message in written)
    if messages[-1].role != "user" or not messages[-1].content.strip():
        raise ValueError("the last message must be the user's, and not empty")
    return Prompt(data["id"], data["category"], messages, bool(data.get("copies", False)))


def _message(data: Any) -> Message:
    if not isinstance(data, dict) or data.get("role") not in ROLES or not isinstance(data.get("content"), str):
        raise ValueError(f"a message needs a 'role' ({', '.join(ROLES)}) and a text as 'content'")
    return Message(data["role"], data["content"])


def first_of_each(prompts: Sequence[Prompt], limit: int | None) -> tuple[Prompt, ...]:
    """The first prompts of each category, so many of each; None: all."""
    places = dict.fromkeys((prompt.category for prompt in prompts), len(prompts) if limit is None else limit)
    kept = []
    for prompt in prompts:
        if places[prompt.category]:
            places[prompt.category] -= 1
            kept.append(prompt)
    return tuple(kept)
