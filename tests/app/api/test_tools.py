"""Tool calls: how they are offered in words, and how they are read from an answer that comes in pieces."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.tools import CallReader, call_grammar, written_out
from engine.runtime.template import Message, ToolCall

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def read(pieces: list[str]) -> tuple[str, list[ToolCall]]:
    reader = CallReader()
    content, calls = "", []
    for piece in pieces:
        for part in reader.push(piece):
            if isinstance(part, str):
                content += part
            else:
                calls.append(part)
    return content + reader.finish(), calls


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        (CALL, "", [{"x": 1}]),
        (f"I look.{CALL}{CALL} Done", "I look. Done", [{"x": 1}, {"x": 1}]),
        ("a < b <tool", "a < b <tool", []),
        ("<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
        ('<tool_call>{"name": 5}</tool_call>!', '<tool_call>{"name": 5}</tool_call>!', []),
        ('<tool_call>{"name": "f"}', '<tool_call>{"name": "f"}', []),
        ('<tool_call>{"name": "f", "parameters": {"y": "ä"}}</tool_call>', "", [{"y": "ä"}]),
        ('<tool_call>{"name": "f", "arguments": "{\\"z\\": 2}"}</tool_call>', "", [{"z": 2}]),
    ],
)
@given(cuts=st.sets(st.integers(0, 120)))
def test_calls_are_read_however_an_answer_is_cut(
    cuts: set[int], text: str, content: str, arguments: list[object]
) -> None:
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    found, calls = read(pieces)
    assert found == content
    assert [json.loads(call.arguments) for call in calls] == arguments
    assert {call.name for call in calls} <= {"f"}
    assert len({call.id for call in calls}) == len(calls)


def test_content_is_told_as_soon_as_it_is_known_to_be_content() -> None:
    reader = CallReader()
    assert list(reader.push("Well, <")) == ["Well, "]
    assert list(reader.push("b>")) == ["<b>"]


def test_a_conversation_with_tools_is_put_in_words() -> None:
    messages = [
        Message("system", "Be brief."),
        Message("user", "x?"),
        Message("assistant", "", (ToolCall("f", '{"x": 1}', "1"),)),
        Message("tool", "42", tool_call_id="1"),
    ]
    system, user, called, returned = written_out(messages, [TOOL])
    assert system.content.startswith("Be brief.\n\n# Tools")
    assert json.dumps(TOOL) in system.content
    assert user == messages[1]
    assert called == Message("assistant", CALL)
    assert returned == Message("user", "<tool_response>\n42\n</tool_response>")
    assert written_out(messages[1:2], [TOOL])[0].role == "system"
    assert written_out(messages[:2], []) == messages[:2]


def test_grammars_keep_tools_of_the_same_inner_names_apart() -> None:
    def tool(name: str, kind: str) -> dict[str, object]:
        parameters = {
            "type": "object",
            "properties": {"p": {"$ref": "#/$defs/P"}},
            "required": ["p"],
            "$defs": {"P": {"type": kind}},
        }
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    grammar = call_grammar([tool("one", "integer"), tool("two", "boolean")], allows_several=True)
    assert grammar.count("root ::=") == 1
    assert "integer ::=" in grammar
    assert "boolean ::=" in grammar
