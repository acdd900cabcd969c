"""Pydantic AI: its OpenAI models for chat completions and Responses, and its Anthropic model."""

from __future__ import annotations

from anthropic import AsyncAnthropic
from program import KEY, MODEL, PICTURE, URL, V1, WRONG_KEY, WRONG_MODEL, feature, refused, run
from pydantic import BaseModel
from pydantic_ai import Agent, BinaryContent, ModelHTTPError
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

ASK = "Where is the Eiffel Tower?"


class Place(BaseModel):
    place: str


def chat_model(name: str = MODEL, key: str = KEY) -> OpenAIChatModel:
    return OpenAIChatModel(name, provider=OpenAIProvider(base_url=V1, api_key=key))


def responses_model() -> OpenAIResponsesModel:
    return OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=V1, api_key=KEY))


def anthropic_model() -> AnthropicModel:
    client = AsyncAnthropic(base_url=URL, api_key=KEY, max_retries=0)
    return AnthropicModel(MODEL, provider=AnthropicProvider(anthropic_client=client))


def check_tools(model: object) -> None:
    """The output is a tool, which the model has to call; the next run gets the call and its result."""
    agent = Agent(model, output_type=Place)
    first = agent.run_sync(ASK)
    assert first.output.place
    assert agent.run_sync("And then?", message_history=first.all_messages()).output.place


async def check_stream(model: object) -> None:
    async with Agent(model).run_stream(ASK) as result:
        assert await result.get_output()
        assert result.usage.output_tokens


@feature("chat")
def chat() -> None:
    result = Agent(chat_model(), system_prompt="Be short.").run_sync(ASK)
    assert result.output
    assert result.usage.output_tokens


@feature("stream")
async def stream() -> None:
    await check_stream(chat_model())


@feature("tools")
def tools() -> None:
    check_tools(chat_model())


@feature("schema")
def schema() -> None:
    from pydantic_ai import NativeOutput  # noqa: PLC0415

    assert Agent(chat_model(), output_type=NativeOutput(Place)).run_sync(ASK).output.place


@feature("image")
def image() -> None:
    from base64 import b64decode  # noqa: PLC0415

    picture = BinaryContent(b64decode(PICTURE), media_type="image/png")
    assert Agent(chat_model()).run_sync([ASK, picture]).usage.input_tokens > 200


@feature("responses")
def responses() -> None:
    assert Agent(responses_model()).run_sync(ASK).output


@feature("responses stream")
async def responses_stream() -> None:
    await check_stream(responses_model())


@feature("responses tools")
def responses_tools() -> None:
    check_tools(responses_model())


@feature("messages")
def messages() -> None:
    assert Agent(anthropic_model()).run_sync(ASK).output


@feature("messages stream")
async def messages_stream() -> None:
    await check_stream(anthropic_model())


@feature("messages tools")
def messages_tools() -> None:
    check_tools(anthropic_model())


@feature("async")
async def asynchronous() -> None:
    assert (await Agent(chat_model()).run(ASK)).output


@feature("wrong model")
def wrong_model() -> None:
    assert refused(ModelHTTPError, lambda: Agent(chat_model(WRONG_MODEL)).run_sync(ASK)).status_code == 404


@feature("wrong key")
def wrong_key() -> None:
    assert refused(ModelHTTPError, lambda: Agent(chat_model(key=WRONG_KEY)).run_sync(ASK)).status_code == 401


run()
