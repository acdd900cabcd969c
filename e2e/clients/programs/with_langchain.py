"""LangChain's OpenAI package, over chat completions and over Responses."""

from __future__ import annotations

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from program import (
    KEY,
    LIMITED_KEY,
    MODEL,
    PICTURE_URL,
    V1,
    WRONG_KEY,
    WRONG_MODEL,
    feature,
    refused,
    run,
    until_refused,
)
from pydantic import BaseModel

ASK = "Where is the Eiffel Tower?"


class Place(BaseModel):
    """A place."""

    place: str


@tool
def find(place: str) -> str:
    """Find a place."""
    return f"{place} is in Paris"


def model(**options: object) -> ChatOpenAI:
    return ChatOpenAI(**{"model": MODEL, "base_url": V1, "api_key": KEY, "max_retries": 0, **options})


def check_tools(asked: ChatOpenAI) -> None:
    called = asked.bind_tools([find], tool_choice="find").invoke(ASK)
    (call,) = called.tool_calls
    result = find.invoke(call)
    assert isinstance(result, ToolMessage)
    assert asked.bind_tools([find]).invoke([HumanMessage(ASK), called, result]).text


@feature("chat")
def chat() -> None:
    answer = model(temperature=0.5).invoke(ASK)
    assert answer.text
    assert answer.usage_metadata["output_tokens"]


@feature("stream")
def stream() -> None:
    assert "".join(chunk.text for chunk in model().stream(ASK))


@feature("usage")
def usage() -> None:
    chunks = list(model(stream_usage=True).stream(ASK))
    assert any(chunk.usage_metadata for chunk in chunks)


@feature("tools")
def tools() -> None:
    check_tools(model())


@feature("schema")
def schema() -> None:
    for method in ("json_schema", "function_calling"):
        assert model().with_structured_output(Place, method=method).invoke(ASK).place


@feature("image")
def image() -> None:
    parts = [{"type": "text", "text": ASK}, {"type": "image_url", "image_url": {"url": PICTURE_URL}}]
    assert model().invoke([HumanMessage(parts)]).usage_metadata["input_tokens"] > 200


@feature("embeddings")
def embeddings() -> None:
    embed = OpenAIEmbeddings(model=MODEL, base_url=V1, api_key=KEY, max_retries=0, check_embedding_ctx_length=False)
    assert len(embed.embed_documents(["a text", "another"])) == 2


@feature("responses")
def responses() -> None:
    answer = model(use_responses_api=True).invoke(ASK)
    assert answer.text
    assert model(use_responses_api=True).with_structured_output(Place).invoke(ASK).place


@feature("responses stream")
def responses_stream() -> None:
    assert "".join(chunk.text for chunk in model(use_responses_api=True).stream(ASK))


@feature("responses continue")
def responses_continue() -> None:
    asked = model(use_responses_api=True, use_previous_response_id=True)
    first = asked.invoke(ASK)
    second = asked.invoke([HumanMessage(ASK), first, HumanMessage("And then?")])
    assert second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]


@feature("responses tools")
def responses_tools() -> None:
    check_tools(model(use_responses_api=True))


@feature("async")
async def asynchronous() -> None:
    assert (await model().ainvoke(ASK)).text
    assert "".join([chunk.text async for chunk in model(use_responses_api=True).astream(ASK)])


@feature("wrong model")
def wrong_model() -> None:
    refused(openai.NotFoundError, lambda: model(model=WRONG_MODEL).invoke(ASK))


@feature("wrong key")
def wrong_key() -> None:
    refused(openai.AuthenticationError, lambda: model(api_key=WRONG_KEY).invoke(ASK))


@feature("retry")
def retry() -> None:
    limited = {"api_key": LIMITED_KEY, "max_tokens": 1}
    until_refused(openai.RateLimitError, lambda: model(**limited).invoke(ASK))
    assert model(**limited, max_retries=3).invoke(ASK)


run()
