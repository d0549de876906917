"""Chat messages to prompt text, by the model's own Jinja template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import ModelFileError, PromptError, SettingError
from engine.runtime.model import Model
from engine.text import THINKING_CLOSES, THINKING_OPENS

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Used for models that carry no template, as llama.cpp does."""
THINKING_SWITCHES = ("enable_thinking", "thinking")
"""What templates call the variable that turns thinking on and off."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that an answer asks to have called."""

    name: str
    arguments: str
    """A JSON object, as text."""
    id: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation; `role` is `system`, `user`, `assistant`, or `tool` for what a call returned."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """Which call a tool's message answers."""
    name: str = ""


class ChatTemplate:
    """Renders conversations for one model, and knows whether it is one that thinks before it answers.

    Raises:
        ModelFileError: the model's template is no Jinja template.
    """

    def __init__(self, model: Model) -> None:
        from jinja2 import meta
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        vocabulary = model.vocabulary
        source = model.chat_template or CHATML
        self._bos = vocabulary.spelling(vocabulary.bos) if vocabulary.bos >= 0 else ""
        try:
            self._formatter: Any = Jinja2ChatFormatter(
                template=source,
                eos_token=vocabulary.spelling(vocabulary.eos) if vocabulary.eos >= 0 else "",
                bos_token=self._bos,
            )
        except Exception as error:  # the template is part of the model file: parsing it may raise anything
            raise ModelFileError(f"{model.path} has a chat template that cannot be read: {error}") from error
        self.thinks = THINKING_CLOSES in source
        """Whether the model's answers may begin with a thought between tags."""
        variables = meta.find_undeclared_variables(self._formatter._environment.environment.parse(source))
        self._switch = next((name for name in THINKING_SWITCHES if name in variables), None)
        self.knows_tools = "tools" in variables
        """Whether functions can be offered to the model in its own way."""

    @property
    def has_thinking_switch(self) -> bool:
        """Whether thinking can be turned on and off."""
        return self._switch is not None

    def render(
        self,
        messages: Sequence[Message],
        thinking: bool | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The prompt text up to where the assistant's answer begins.

        Args:
            messages: The conversation.
            thinking: Whether the model is to think first; None leaves it to the template.
            tools: Functions the model may ask for, described as in OpenAI's API; for templates that know tools.

        Raises:
            PromptError: the template refuses the conversation, for example a role it does not know.
            SettingError: thinking is asked for or forbidden and the template has no switch for it.
        """
        switch = {}
        if thinking is not None:
            if self._switch is None:
                raise SettingError("this model's chat template has no switch for thinking; leave it to the model")
            switch[self._switch] = thinking
        plain = [_plain(message) for message in messages]
        try:
            return str(self._formatter(messages=plain, tools=list(tools) or None, **switch).prompt)
        except Exception as error:  # a template is a program from the model file: it may raise anything
            raise PromptError(f"the model's chat template refuses this conversation: {error}") from error

    def opens_thought(self, prompt: str) -> bool | None:
        """Whether the rendered text has begun the model's thought already; None where there are no thoughts."""
        return prompt.rstrip().endswith(THINKING_OPENS) if self.thinks else None

    def starts_with_bos(self, prompt: str) -> bool:
        """Whether the rendered text already begins with the BOS token."""
        return bool(self._bos) and prompt.startswith(self._bos)


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates expect it: what it does not have is not there."""
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _arguments(call)}}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        plain["tool_call_id"] = message.tool_call_id
    if message.name:
        plain["name"] = message.name
    return plain


def _arguments(call: ToolCall) -> Any:
    """Templates write arguments as JSON themselves, so they are to get the object."""
    try:
        return json.loads(call.arguments)
    except ValueError:
        return call.arguments
