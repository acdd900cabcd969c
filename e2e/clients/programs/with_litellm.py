"""LiteLLM: its providers for OpenAI-compatible servers and vLLM, Responses, and its Anthropic provider and bridge."""

from __future__ import annotations

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks the internet at its import

import litellm
from program import (
    KEY,
    LIMITED_KEY,
    MODEL,
    PICTURE_URL,
    PLACE_SCHEMA,
    URL,
    V1,
    WRONG_KEY,
    WRONG_MODEL,
    feature,
    refused,
    run,
    until_refused,
)
from pydantic import BaseModel

litellm.suppress_debug_info = True
ASK = [{"role": "user", "content": "Where is the Eiffel Tower?"}]
TOOL = {"type": "function", "function": {"name": "find", "parameters": PLACE_SCHEMA}}
AT = {"api_base": V1, "api_key": KEY, "max_retries": 0}
OPENAI, VLLM, ANTHROPIC = f"openai/{MODEL}", f"hosted_vllm/{MODEL}", f"anthropic/{MODEL}"
MESSAGES = {"model": ANTHROPIC, "messages": ASK, "max_tokens": 100, "api_base": URL, "api_key": KEY}


class Place(BaseModel):
    place: str


@feature("chat")
def chat() -> None:
    for model in (OPENAI, VLLM):
        answer = litellm.completion(model, ASK, **AT)
        assert answer.choices[0].message.content
        assert answer.usage.completion_tokens


@feature("stream")
def stream() -> None:
    for model in (OPENAI, VLLM):
        chunks = list(litellm.completion(model, ASK, stream=True, **AT))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@feature("usage")
def usage() -> None:
    chunks = list(litellm.completion(VLLM, ASK, stream=True, stream_options={"include_usage": True}, **AT))
    assert any(getattr(chunk, "usage", None) for chunk in chunks)


@feature("tools")
def tools() -> None:
    for model in (OPENAI, VLLM):
        message = litellm.completion(model, ASK, tools=[TOOL], tool_choice="required", **AT).choices[0].message
        (call,) = message.tool_calls
        assert json.loads(call.function.arguments)["place"]
        result = {"role": "tool", "tool_call_id": call.id, "content": "Paris"}
        assert litellm.completion(model, [*ASK, message, result], tools=[TOOL], **AT).choices[0].message.content


@feature("schema")
def schema() -> None:
    for model in (OPENAI, VLLM):
        answer = litellm.completion(model, ASK, response_format=Place, **AT)
        assert Place.model_validate_json(answer.choices[0].message.content).place


@feature("image")
def image() -> None:
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": PICTURE_URL}}]
    for model in (OPENAI, VLLM):
        answer = litellm.completion(model, [{"role": "user", "content": parts}], **AT)
        assert answer.usage.prompt_tokens > 200


@feature("embeddings")
def embeddings() -> None:
    for model in (OPENAI, VLLM):
        assert len(litellm.embedding(model, ["a text", "another"], api_base=V1, api_key=KEY).data) == 2


@feature("responses")
def responses() -> None:
    assert litellm.responses("Where is it?", OPENAI, api_base=V1, api_key=KEY).output[0].content[0].text


@feature("responses stream")
def responses_stream() -> None:
    events = list(litellm.responses("Where is it?", OPENAI, stream=True, api_base=V1, api_key=KEY))
    assert events[-1].type == "response.completed"


@feature("responses continue")
def responses_continue() -> None:
    first = litellm.responses("Where is it?", OPENAI, api_base=V1, api_key=KEY)
    second = litellm.responses("And then?", OPENAI, previous_response_id=first.id, api_base=V1, api_key=KEY)
    assert second.usage.input_tokens > first.usage.input_tokens


@feature("messages")
def messages() -> None:
    answer = litellm.completion(**MESSAGES)
    assert answer.choices[0].message.content


@feature("messages stream")
def messages_stream() -> None:
    chunks = list(litellm.completion(**MESSAGES, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@feature("messages tools")
def messages_tools() -> None:
    message = litellm.completion(**MESSAGES, tools=[TOOL], tool_choice="required").choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "Paris"}
    answer = litellm.completion(**{**MESSAGES, "messages": [*ASK, message, result]}, tools=[TOOL])
    assert answer.choices[0].message.content


@feature("count tokens")
async def count_tokens() -> None:
    counted = await litellm.acount_tokens(model=ANTHROPIC, messages=ASK, api_base=URL, api_key=KEY)
    assert counted.total_tokens > 5
    assert counted.tokenizer_type != "local_tokenizer", counted


@feature("async")
async def asynchronous() -> None:
    """Messages are asked for on the provider's own route, and through the bridge to chat completions."""
    assert (await litellm.acompletion(OPENAI, ASK, **AT)).choices[0].message.content
    ask = {"messages": ASK, "max_tokens": 100, "api_key": KEY}
    for model, base in ((ANTHROPIC, URL), (OPENAI, V1), (VLLM, V1)):
        answer = await litellm.anthropic.messages.acreate(model=model, api_base=base, **ask)
        assert answer["content"][0]["text"], model


@feature("wrong model")
def wrong_model() -> None:
    refused(litellm.NotFoundError, lambda: litellm.completion(f"openai/{WRONG_MODEL}", ASK, **AT))
    refused(litellm.NotFoundError, lambda: litellm.completion(**{**MESSAGES, "model": f"anthropic/{WRONG_MODEL}"}))


@feature("wrong key")
def wrong_key() -> None:
    refused(litellm.AuthenticationError, lambda: litellm.completion(OPENAI, ASK, **{**AT, "api_key": WRONG_KEY}))
    refused(litellm.AuthenticationError, lambda: litellm.completion(**{**MESSAGES, "api_key": WRONG_KEY}))


@feature("retry")
def retry() -> None:
    limited = {**AT, "api_key": LIMITED_KEY, "max_tokens": 1}
    until_refused(litellm.RateLimitError, lambda: litellm.completion(OPENAI, ASK, **limited))
    assert litellm.completion(OPENAI, ASK, **{**limited, "max_retries": 3}).choices


run()
