"""Haystack's OpenAI components."""

from __future__ import annotations

import openai
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage, Document, ImageContent
from haystack.tools import Tool
from haystack.utils import Secret
from program import KEY, MODEL, PICTURE, PLACE_SCHEMA, V1, WRONG_KEY, WRONG_MODEL, feature, refused, run
from pydantic import BaseModel

ASK = ChatMessage.from_user("Where is the Eiffel Tower?")
FIND = Tool(name="find", description="Find a place.", parameters=PLACE_SCHEMA, function=lambda place: f"{place}: Paris")
REQUIRED = {"tool_choice": "required"}


class Place(BaseModel):
    place: str


def options(key: str = KEY, model: str = MODEL) -> dict[str, object]:
    return {"api_key": Secret.from_token(key), "api_base_url": V1, "model": model, "max_retries": 0}


def check_tools(generator: object) -> None:
    (called,) = generator.run([ASK], tools=[FIND], generation_kwargs=REQUIRED)["replies"]
    (call,) = called.tool_calls
    result = ChatMessage.from_tool(FIND.invoke(**call.arguments), origin=call)
    assert generator.run([ASK, called, result], tools=[FIND])["replies"][0].text


@feature("chat")
def chat() -> None:
    (reply,) = OpenAIChatGenerator(**options()).run([ChatMessage.from_system("Be short."), ASK])["replies"]
    assert reply.text
    assert reply.meta["usage"]["completion_tokens"]


@feature("stream")
def stream() -> None:
    chunks: list[object] = []
    (reply,) = OpenAIChatGenerator(**options(), streaming_callback=chunks.append).run([ASK])["replies"]
    assert reply.text
    assert len(chunks) > 2


@feature("tools")
def tools() -> None:
    check_tools(OpenAIChatGenerator(**options()))


@feature("schema")
def schema() -> None:
    asked = OpenAIChatGenerator(**options(), generation_kwargs={"response_format": Place})
    assert Place.model_validate_json(asked.run([ASK])["replies"][0].text).place


@feature("image")
def image() -> None:
    picture = ImageContent(base64_image=PICTURE, mime_type="image/png")
    (reply,) = OpenAIChatGenerator(**options()).run([ChatMessage.from_user(content_parts=["What?", picture])])[
        "replies"
    ]
    assert reply.meta["usage"]["prompt_tokens"] > 200


@feature("embeddings")
def embeddings() -> None:
    assert OpenAITextEmbedder(**options()).run("a text")["embedding"]
    documents = [Document(content="a text"), Document(content="another")]
    assert all(document.embedding for document in OpenAIDocumentEmbedder(**options()).run(documents)["documents"])


@feature("responses")
def responses() -> None:
    assert OpenAIResponsesChatGenerator(**options()).run([ASK])["replies"][0].text


@feature("responses stream")
def responses_stream() -> None:
    chunks: list[object] = []
    asked = OpenAIResponsesChatGenerator(**options(), streaming_callback=chunks.append)
    assert asked.run([ASK])["replies"][0].text
    assert len(chunks) > 2


@feature("responses tools")
def responses_tools() -> None:
    check_tools(OpenAIResponsesChatGenerator(**options()))


@feature("async")
async def asynchronous() -> None:
    assert (await OpenAIChatGenerator(**options()).run_async([ASK]))["replies"][0].text


@feature("wrong model")
def wrong_model() -> None:
    refused(openai.NotFoundError, lambda: OpenAIChatGenerator(**options(model=WRONG_MODEL)).run([ASK]))


@feature("wrong key")
def wrong_key() -> None:
    refused(openai.AuthenticationError, lambda: OpenAIChatGenerator(**options(key=WRONG_KEY)).run([ASK]))


run()
