"""OpenAI's Agents SDK: its default model, which speaks Responses, and the one that speaks chat completions."""

from __future__ import annotations

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from program import KEY, MODEL, PICTURE_URL, V1, WRONG_KEY, WRONG_MODEL, feature, refused_later, run
from pydantic import BaseModel

client = AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0)
set_default_openai_client(client)
set_tracing_disabled(disabled=True)
ASK = "Where is the Eiffel Tower?"


class Place(BaseModel):
    place: str


@function_tool
def find(place: str) -> str:
    """Find a place."""
    return f"{place} is in Paris"


def agent(**options: object) -> Agent:
    return Agent(name="guide", instructions="Be short.", **{"model": MODEL, **options})


def with_tool(**options: object) -> Agent:
    return agent(tools=[find], model_settings=ModelSettings(tool_choice="required"), **options)


async def check_tools(asked: Agent) -> None:
    result = await Runner.run(asked, ASK)
    kinds = [item.type for item in result.new_items]
    assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"], kinds


@feature("responses")
async def responses() -> None:
    result = await Runner.run(agent(), ASK)
    assert result.final_output
    assert result.context_wrapper.usage.output_tokens


@feature("responses stream")
async def responses_stream() -> None:
    result = Runner.run_streamed(with_tool(), ASK)
    names = {event.name async for event in result.stream_events() if event.type == "run_item_stream_event"}
    assert {"tool_called", "tool_output", "message_output_created"} <= names
    assert result.final_output


@feature("responses continue")
async def responses_continue() -> None:
    first = await Runner.run(agent(), ASK)
    second = await Runner.run(agent(), "And then?", previous_response_id=first.last_response_id)
    assert second.context_wrapper.usage.input_tokens > first.context_wrapper.usage.input_tokens
    session = SQLiteSession("guided")
    await Runner.run(agent(), ASK, session=session)
    assert (await Runner.run(agent(), "And then?", session=session)).final_output


@feature("responses tools")
async def responses_tools() -> None:
    await check_tools(with_tool())


@feature("schema")
async def schema() -> None:
    assert (await Runner.run(agent(output_type=Place), ASK)).final_output.place


@feature("image")
async def image() -> None:
    parts = [{"type": "input_text", "text": ASK}, {"type": "input_image", "image_url": PICTURE_URL, "detail": "auto"}]
    result = await Runner.run(agent(), [{"role": "user", "content": parts}])
    assert result.context_wrapper.usage.input_tokens > 200


@feature("chat")
async def chat() -> None:
    assert (await Runner.run(agent(model=OpenAIChatCompletionsModel(MODEL, client)), ASK)).final_output


@feature("stream")
async def stream() -> None:
    asked = agent(model=OpenAIChatCompletionsModel(MODEL, client), model_settings=ModelSettings(include_usage=True))
    result = Runner.run_streamed(asked, ASK)
    assert [event async for event in result.stream_events()]
    assert result.context_wrapper.usage.output_tokens


@feature("tools")
async def tools() -> None:
    await check_tools(with_tool(model=OpenAIChatCompletionsModel(MODEL, client)))


@feature("async")
async def asynchronous() -> None:
    handed = agent(handoffs=[agent()], model_settings=ModelSettings(tool_choice="none"))
    assert (await Runner.run(handed, ASK)).final_output


@feature("wrong model")
async def wrong_model() -> None:
    await refused_later(openai.NotFoundError, Runner.run(agent(model=WRONG_MODEL), ASK))


@feature("wrong key")
async def wrong_key() -> None:
    set_default_openai_client(AsyncOpenAI(base_url=V1, api_key=WRONG_KEY, max_retries=0))
    await refused_later(openai.AuthenticationError, Runner.run(agent(), ASK))


run()
