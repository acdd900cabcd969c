"""LlamaIndex's models for OpenAI-compatible servers."""

from __future__ import annotations

import openai
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, MessageRole, TextBlock
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses
from program import KEY, LIMITED_KEY, MODEL, PICTURE, V1, WRONG_KEY, WRONG_MODEL, feature, refused, run, until_refused
from pydantic import BaseModel

ASK = [ChatMessage(role=MessageRole.USER, content="Where is the Eiffel Tower?")]


class Place(BaseModel):
    """A place."""

    place: str


def find(place: str) -> str:
    """Find a place."""
    return f"{place} is in Paris"


TOOL = FunctionTool.from_defaults(fn=find)


def options(**more: object) -> dict[str, object]:
    said = {"is_chat_model": True, "is_function_calling_model": True, "max_retries": 0, "context_window": 8_000}
    return {"model": MODEL, "api_base": V1, "api_key": KEY, **said, **more}


def model(**more: object) -> OpenAILike:
    return OpenAILike(**options(**more))


@feature("chat")
def chat() -> None:
    answer = model().chat(ASK)
    assert answer.message.content
    assert answer.raw.usage.completion_tokens
    assert model(is_chat_model=False).complete("Once upon a time").text


@feature("stream")
def stream() -> None:
    assert "".join(part.delta or "" for part in model().stream_chat(ASK))


@feature("tools")
def tools() -> None:
    answer = model().chat_with_tools([TOOL], chat_history=ASK, tool_required=True)
    (call,) = model().get_tool_calls_from_response(answer)
    assert call.tool_kwargs["place"]
    result = ChatMessage(role=MessageRole.TOOL, content="Paris", additional_kwargs={"tool_call_id": call.tool_id})
    assert model().chat([*ASK, answer.message, result]).message.content


@feature("schema")
def schema() -> None:
    assert model(should_use_structured_outputs=True).as_structured_llm(Place).chat(ASK).raw.place
    assert model().as_structured_llm(Place).chat(ASK).raw.place


@feature("image")
def image() -> None:
    blocks = [TextBlock(text="What is it?"), ImageBlock(image=PICTURE, image_mimetype="image/png")]
    answer = model().chat([ChatMessage(role=MessageRole.USER, blocks=blocks)])
    assert answer.raw.usage.prompt_tokens > 200


@feature("embeddings")
def embeddings() -> None:
    embed = OpenAILikeEmbedding(model_name=MODEL, api_base=V1, api_key=KEY, max_retries=0)
    assert len(embed.get_text_embedding_batch(["a text", "another"])) == 2


@feature("responses")
def responses() -> None:
    assert OpenAILikeResponses(**options()).chat(ASK).message.content


@feature("responses stream")
def responses_stream() -> None:
    assert "".join(part.delta or "" for part in OpenAILikeResponses(**options()).stream_chat(ASK))


@feature("async")
async def asynchronous() -> None:
    assert (await model().achat(ASK)).message.content


@feature("wrong model")
def wrong_model() -> None:
    refused(openai.NotFoundError, lambda: model(model=WRONG_MODEL).chat(ASK))


@feature("wrong key")
def wrong_key() -> None:
    refused(openai.AuthenticationError, lambda: model(api_key=WRONG_KEY).chat(ASK))


@feature("retry")
def retry() -> None:
    limited = {"api_key": LIMITED_KEY, "max_tokens": 1}
    until_refused(openai.RateLimitError, lambda: model(**limited).chat(ASK))
    assert model(**limited, max_retries=3).chat(ASK).message


run()
