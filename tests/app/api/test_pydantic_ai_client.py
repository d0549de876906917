"""A second client that people use: pydantic-ai, which asks for structured answers by tools and by schemas."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

from tests.app.api.conftest import Served


class River(BaseModel):
    """A river."""

    name: str = Field(max_length=20)
    kind: Literal["river", "stream"]
    is_long: bool


@pytest.fixture
def model(served: Served) -> OpenAIChatModel:
    provider = OpenAIProvider(base_url=f"{served.url}/v1", api_key="none")
    return OpenAIChatModel("quorum", provider=provider, settings=ModelSettings(max_tokens=160, temperature=0))


def test_it_gets_an_answer_whole_and_streamed(model: OpenAIChatModel) -> None:
    agent = Agent(model, instructions="Be brief.", model_settings=ModelSettings(max_tokens=24))

    async def streamed() -> str:
        async with agent.run_stream("Name a river.") as result:
            return str(await result.get_output())

    async def both() -> tuple[str, str]:
        return (await agent.run("Name a river.")).output, await streamed()

    whole, parts = asyncio.run(both())
    assert whole
    assert parts == whole


@pytest.mark.parametrize("form", [ToolOutput(River), NativeOutput(River)])
def test_it_gets_data_by_tool_and_by_schema(
    model: OpenAIChatModel, form: ToolOutput[River] | NativeOutput[River]
) -> None:
    agent = Agent(model, output_type=form)
    result = asyncio.run(agent.run("Tell me of a river."))
    assert isinstance(result.output, River)
    assert result.usage.output_tokens > 0
