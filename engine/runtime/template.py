"""Chat messages to prompt text, by the model's own Jinja template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import ModelFileError, PromptError
from engine.runtime.model import Model

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Used for models that carry no template, as llama.cpp does."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation; `role` is `system`, `user` or `assistant`."""

    role: str
    content: str


class ChatTemplate:
    """Renders conversations for one model.

    Raises:
        ModelFileError: the model's template is no Jinja template.
    """

    def __init__(self, model: Model) -> None:
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        vocabulary = model.vocabulary
        self._bos = vocabulary.spelling(vocabulary.bos) if vocabulary.bos >= 0 else ""
        try:
            self._formatter: Any = Jinja2ChatFormatter(
                template=model.chat_template or CHATML,
                eos_token=vocabulary.spelling(vocabulary.eos) if vocabulary.eos >= 0 else "",
                bos_token=self._bos,
            )
        except Exception as error:  # the template is part of the model file: parsing it may raise anything
            raise ModelFileError(f"{model.path} has a chat template that cannot be read: {error}") from error

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt text up to where the assistant's answer begins.

        Raises:
            PromptError: the template refuses the conversation, for example a role it does not know.
        """
        plain = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return str(self._formatter(messages=plain).prompt)
        except Exception as error:  # a template is a program from the model file: it may raise anything
            raise PromptError(f"the model's chat template refuses this conversation: {error}") from error

    def starts_with_bos(self, prompt: str) -> bool:
        """Whether the rendered text already begins with the BOS token."""
        return bool(self._bos) and prompt.startswith(self._bos)
