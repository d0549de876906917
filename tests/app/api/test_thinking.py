"""Models that think first, and templates that know tools: the starter with another template."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from gguf import GGUFReader

from app.api.routes import ApiOptions
from app.api.schema import ChatRequest, parse
from app.api.translate import Defaults, chat_requests
from app.conversations import Conversations
from app.service import Service
from engine.config import ModelPlacement, SetConfig
from tests.app.api.conftest import GREEDY, QUESTION, Served, serving_in_thread
from tests.app.conftest import PATIENCE_S, finished, loading
from tests.engine.making import TEMPLATE, patched_copy, value_of

THINKING = (
    "{% if tools %}{{ tools|tojson }}\n{% endif %}{% for m in messages %}{{m.role}}:{{m.content}}"
    "{{ m.tool_calls|tojson if m.tool_calls }}\n{% endfor %}A:{% if enable_thinking is false %}<think>\n\n</think>\n"
    "{% endif %}"
)
THOUGHT = 'root ::= "<think>\\nwell</think>\\n\\nYes."'
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks."}}


@pytest.fixture(scope="module")
def thinker(client_home: None, starter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("thinker")
    room = len(value_of(GGUFReader(starter).fields[TEMPLATE])) - len(THINKING)
    path = patched_copy(starter, folder / "thinker.gguf", TEMPLATE, THINKING + "{#".ljust(room - 2) + "#}")
    service = Service(Conversations())
    try:
        config = SetConfig(path, context_tokens=512, placement=ModelPlacement(threads=1))
        finished(service.load(loading(config)))
        with serving_in_thread(service, ApiOptions(Defaults(GREEDY))) as url:
            yield Served(url, service)
    finally:
        service.close()


def rendered(served: Served, **fields: Any) -> str:
    """The prompt that a request becomes."""
    request = parse(ChatRequest, {"messages": QUESTION, **fields})
    with served.service.desk.borrowed() as lent:
        [asked] = chat_requests(request, lent, Defaults(GREEDY))
        return lent.loaded.model.vocabulary.text(asked.request.prompt)


def test_thoughts_come_apart_from_the_answer(thinker: Served) -> None:
    message = thinker.chat(grammar=THOUGHT)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("well", "Yes.")
    with openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="none", timeout=PATIENCE_S) as client:
        parts = [
            chunk.choices[0].delta.model_dump()
            for chunk in client.chat.completions.create(
                model="quorum",
                messages=[{"role": "user", "content": "Really?"}],
                extra_body={"grammar": THOUGHT},
                stream=True,
            )
        ]
    assert "".join(part.get("reasoning_content") or "" for part in parts) == "well"
    assert "".join(part.get("content") or "" for part in parts) == "Yes."


def test_thinking_is_switched_as_clients_do(thinker: Served, served: Served) -> None:
    assert rendered(thinker).endswith("A:")
    for off in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        assert rendered(thinker, **off).endswith("</think>\n")
    assert rendered(thinker, reasoning_effort="high").endswith("A:")
    status, error = served.refusal("/v1/chat/completions", {"messages": QUESTION, "reasoning_effort": "high"})
    assert status == 400
    assert "no switch for thinking" in error["message"]


def test_tools_go_through_a_template_that_knows_them(thinker: Served, served: Served) -> None:
    prompt = rendered(thinker, tools=[TOOL])
    assert prompt.startswith('[{"type": "function", "function": {"description": "Looks.", "parameters"')
    assert "# Tools" not in prompt
    assert "look" not in rendered(thinker, tools=[TOOL], tool_choice="none")
    called = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "look", "arguments": '{"a": 1}'}}]}
    assert '"arguments": {"a": 1}' in rendered(thinker, messages=[*QUESTION, called])
    # The starter's own template knows none: they are put in words.
    assert "# Tools" in rendered(served, tools=[TOOL])
    assert "# Tools" not in rendered(served)
