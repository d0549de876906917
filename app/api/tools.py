"""Functions that a model may ask for: how they are offered, how a call can be enforced, how it is read.

Models whose template knows tools are told in their own way. For the others the common form is written out: a system
message with the functions between `<tools>` tags, calls as JSON between `<tool_call>` tags. Calls in that form are
read from answers; whatever else an answer says is content.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.runtime.grammar import grammar_of_schema
from engine.runtime.template import Message, ToolCall

OPENS = "<tool_call>"
CLOSES = "</tool_call>"

_OFFER = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def written_out(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """A conversation with tools, in words alone, for templates that know none."""
    plain = [_in_words(message) for message in messages]
    if not tools:
        return plain
    offer = _OFFER.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if plain and plain[0].role == "system":
        return [Message("system", f"{plain[0].content}\n\n{offer}"), *plain[1:]]
    return [Message("system", offer), *plain]


def _in_words(message: Message) -> Message:
    if message.role == "tool":
        return Message("user", f"<tool_response>\n{message.content}\n</tool_response>")
    calls = [
        f'{OPENS}\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n{CLOSES}'
        for call in message.tool_calls
    ]
    return Message(message.role, "\n".join(filter(None, (message.content, *calls))))


def call_grammar(tools: Sequence[Mapping[str, Any]], *, allows_several: bool) -> str:
    """The grammar of an answer that calls one of these functions, or several.

    Raises:
        SettingError: a function's parameters cannot be turned into a grammar.
    """
    definitions: dict[str, Any] = {}
    alternatives = []
    for number, tool in enumerate(tools):
        function = tool["function"]
        place = f"tool-{number}"
        parameters = dict(function.get("parameters") or {"type": "object"})
        for name, definition in parameters.pop("$defs", {}).items():
            definitions[f"{place}-{name}"] = _moved(definition, place)
        definitions[place] = _moved(parameters, place)
        alternatives.append(
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, "arguments": {"$ref": f"#/$defs/{place}"}},
                "required": ["name", "arguments"],
            }
        )
    grammar = grammar_of_schema(json.dumps({"anyOf": alternatives, "$defs": definitions}))
    one = f'"{OPENS}\\n" call "\\n{CLOSES}"'
    root = f'root ::= {one} ("\\n" {one})*' if allows_several else f"root ::= {one}"
    return re.sub(r"^root ::=", "call ::=", grammar, flags=re.MULTILINE) + f"\n{root}\n"


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references to its own definitions follow these to where they are now."""
    if isinstance(schema, Mapping):
        return {
            name: _moved_reference(value, place) if name == "$ref" and isinstance(value, str) else _moved(value, place)
            for name, value in schema.items()
        }
    return [_moved(item, place) for item in schema] if isinstance(schema, list) else schema


def _moved_reference(reference: str, place: str) -> str:
    if reference == "#":
        return f"#/$defs/{place}"
    return re.sub(r"^#/\$defs/", f"#/$defs/{place}-", reference)


class CallReader:
    """Finds tool calls in an answer as it comes."""

    def __init__(self) -> None:
        self._held = ""
        """Text that is, or may be the beginning of, a call."""

    def push(self, text: str) -> Iterator[str | ToolCall]:
        """Add text; yields what is known to be content, and calls, in their order."""
        self._held += text
        while self._held:
            start = self._held.find(OPENS)
            if start < 0:
                kept = _overlap(self._held, OPENS)
                content, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
                if content:
                    yield content
                return
            if start > 0:
                yield self._held[:start]
                self._held = self._held[start:]
            end = self._held.find(CLOSES)
            if end < 0:
                return
            whole, self._held = self._held[: end + len(CLOSES)], self._held[end + len(CLOSES) :]
            yield read_call(whole[len(OPENS) : -len(CLOSES)]) or whole

    def finish(self) -> str:
        """What was held back and is no call after all."""
        held, self._held = self._held, ""
        return held


def read_call(text: str) -> ToolCall | None:
    """The call between two tags; None when it is none."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(found["name"], arguments, f"call_{secrets.token_hex(12)}")


def _overlap(text: str, tag: str) -> int:
    """How many characters at the end of a text may be the beginning of a tag."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])), 0)
