"""The embedded engine speaks OpenAI's Responses and Anthropic's Messages: the vendors' own clients talk to it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic import BaseModel

from tests.lab.embedded.served_engine import Served, sdk_transport, serving

LOOK: dict[str, Any] = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}


class Animal(BaseModel):
    name: str
    age: int


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving(tokenizer="embedded") as served:
        yield served


@pytest.fixture
async def openai_client(served: Served) -> AsyncIterator[AsyncOpenAI]:
    async with sdk_transport(served) as http:
        yield AsyncOpenAI(api_key="none", base_url="http://engine/v1", http_client=http)


# Responses.


async def test_a_response(openai_client: AsyncOpenAI) -> None:
    made = await openai_client.responses.create(model="m", instructions="be brief", input="hi", max_output_tokens=30)
    assert made.output_text.startswith("This is emulated text.")
    assert made.status == "incomplete"
    assert made.usage is not None
    assert made.usage.output_tokens == 30


async def test_a_streamed_response(openai_client: AsyncOpenAI) -> None:
    async with openai_client.responses.stream(model="m", input="hi") as stream:
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert "".join(deltas) == final.output_text
    assert len(deltas) == final.usage.output_tokens  # type: ignore[union-attr]


async def test_a_parsed_response(openai_client: AsyncOpenAI) -> None:
    made = await openai_client.responses.parse(model="m", input="hi", text_format=Animal)
    assert made.output_parsed == Animal(name="emulated", age=1)


async def test_a_tool_and_its_result(openai_client: AsyncOpenAI) -> None:
    tool: Any = {"type": "function", "name": "look", "parameters": LOOK, "strict": True}
    asked = await openai_client.responses.create(model="m", input="hi", tools=[tool], tool_choice="required")
    [call] = asked.output
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"at": "emulated"}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "a cat"}
    items: Any = [{"role": "user", "content": "hi"}, call.to_dict(), result]
    made = await openai_client.responses.create(model="m", input=items, tools=[tool])
    assert made.output_text


async def test_a_stored_response_is_not_there(openai_client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="resp_1"):
        await openai_client.responses.create(model="m", input="hi", previous_response_id="resp_1")


async def test_a_malformed_input(openai_client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        await openai_client.responses.create(model="m", input=[])
    assert refusal.value.param == "input"


# Messages.


@pytest.fixture
async def anthropic_client(served: Served) -> AsyncIterator[AsyncAnthropic]:
    async with sdk_transport(served) as http:
        yield AsyncAnthropic(api_key="none", base_url="http://engine", http_client=http)


async def test_a_message(anthropic_client: AsyncAnthropic) -> None:
    made = await anthropic_client.messages.create(
        model="m", system="be brief", messages=[{"role": "user", "content": "hi"}], max_tokens=9
    )
    [block] = made.content
    assert block.type == "text"
    assert (made.stop_reason, made.usage.output_tokens) == ("max_tokens", 9)


async def test_a_streamed_message(anthropic_client: AsyncAnthropic) -> None:
    async with anthropic_client.messages.stream(
        model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=300
    ) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    [block] = final.content
    assert block.type == "text"
    assert block.text == text
    assert final.stop_reason == "end_turn"
    assert final.usage.input_tokens > 0


async def test_a_tools_use(anthropic_client: AsyncAnthropic) -> None:
    made = await anthropic_client.messages.create(
        model="m",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=300,
        tools=[{"name": "look", "input_schema": LOOK}],
        tool_choice={"type": "any"},
    )
    [block] = made.content
    assert block.type == "tool_use"
    assert (made.stop_reason, block.name, block.input) == ("tool_use", "look", {"at": "emulated"})


async def test_a_count_is_that_of_the_prompt(anthropic_client: AsyncAnthropic) -> None:
    asked: Any = {"model": "m", "system": "be brief", "messages": [{"role": "user", "content": "hi"}]}
    counted = await anthropic_client.messages.count_tokens(**asked)
    made = await anthropic_client.messages.create(**asked, max_tokens=1)
    assert counted.input_tokens == made.usage.input_tokens


async def test_errors_have_anthropics_shape(served: Served, anthropic_client: AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await anthropic_client.messages.create(model="x", messages=[{"role": "user", "content": "hi"}], max_tokens=1)
    assert unknown.value.body == {
        "type": "error",
        "error": {"type": "not_found_error", "message": "The model `x` does not exist."},
    }
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        response: httpx.Response = await served.post(path, messages=3, max_tokens=1)
        assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")
