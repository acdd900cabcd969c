"""OpenAI's SDK for Python, the present major and the one before."""

from __future__ import annotations

import json

import openai
from openai import AsyncOpenAI, OpenAI
from program import (
    KEY,
    LIMITED_KEY,
    MODEL,
    PICTURE_URL,
    PLACE_SCHEMA,
    V1,
    WRONG_KEY,
    WRONG_MODEL,
    feature,
    refused,
    run,
    until_refused,
)
from pydantic import BaseModel

client = OpenAI(base_url=V1, api_key=KEY, max_retries=0)
ASK = [{"role": "user", "content": "Where is the Eiffel Tower?"}]
TOOL = {"type": "function", "function": {"name": "find", "parameters": PLACE_SCHEMA, "strict": True}}
RESPONSES_TOOL = {"type": "function", "name": "find", "parameters": PLACE_SCHEMA, "strict": True}
CHAT = {"model": MODEL, "messages": ASK, "max_tokens": 100}


class Place(BaseModel):
    place: str


@feature("models")
def models() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


@feature("chat")
def chat() -> None:
    answer = client.chat.completions.create(**CHAT)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens


@feature("stream")
def stream() -> None:
    with client.chat.completions.stream(model=MODEL, messages=ASK) as events:
        kinds = {event.type for event in events}
        assert "content.delta" in kinds
        assert events.get_final_completion().choices[0].finish_reason == "stop"


@feature("usage")
def usage() -> None:
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


@feature("tools")
def tools() -> None:
    answer = client.chat.completions.create(**CHAT, tools=[TOOL], tool_choice="required")
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments)["place"]
    result = {"role": "tool", "tool_call_id": call.id, "content": "Paris"}
    answer = client.chat.completions.create(model=MODEL, messages=[*ASK, message, result], tools=[TOOL])
    assert answer.choices[0].message.content


@feature("schema")
def schema() -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Place)
    assert answer.choices[0].message.parsed.place


@feature("image")
def image() -> None:
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": PICTURE_URL}}]
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": parts}])
    assert answer.usage.prompt_tokens > 200


@feature("embeddings")
def embeddings() -> None:
    answer = client.embeddings.create(model=MODEL, input=["a text", "another"])
    assert len(answer.data) == 2
    assert len(answer.data[0].embedding) > 1


@feature("responses")
def responses() -> None:
    answer = client.responses.create(model=MODEL, input="Where is it?", instructions="Be short.")
    assert answer.output_text
    assert client.responses.retrieve(answer.id).output_text == answer.output_text
    parsed = client.responses.parse(model=MODEL, input="Where is it?", text_format=Place)
    assert parsed.output_parsed.place


@feature("responses stream")
def responses_stream() -> None:
    with client.responses.stream(model=MODEL, input="Where is it?") as events:
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        final = events.get_final_response()
    assert final.output_text == text
    assert final.usage.output_tokens


@feature("responses continue")
def responses_continue() -> None:
    first = client.responses.create(model=MODEL, input="Where is it?")
    second = client.responses.create(model=MODEL, input="And then?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens


@feature("responses tools")
def responses_tools() -> None:
    first = client.responses.create(
        model=MODEL, input="Where is it?", tools=[RESPONSES_TOOL], tool_choice={"type": "function", "name": "find"}
    )
    (call,) = [item for item in first.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Paris"}
    second = client.responses.create(model=MODEL, input=[result], tools=[RESPONSES_TOOL], previous_response_id=first.id)
    assert second.output_text


@feature("async")
async def asynchronous() -> None:
    async with AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0) as asked:
        stream = await asked.chat.completions.create(**CHAT, stream=True)
        assert [chunk async for chunk in stream]
        assert (await asked.responses.create(model=MODEL, input="Where is it?")).output_text


@feature("wrong model")
def wrong_model() -> None:
    for ask in (
        lambda: client.chat.completions.create(model=WRONG_MODEL, messages=ASK),
        lambda: client.responses.create(model=WRONG_MODEL, input="x"),
        lambda: client.embeddings.create(model=WRONG_MODEL, input="x"),
    ):
        assert refused(openai.NotFoundError, ask).code == "model_not_found"


@feature("wrong key")
def wrong_key() -> None:
    asked = client.with_options(api_key=WRONG_KEY)
    assert refused(openai.AuthenticationError, lambda: asked.chat.completions.create(**CHAT)).code == "invalid_api_key"


@feature("retry")
def retry() -> None:
    limited = client.with_options(api_key=LIMITED_KEY)
    short = {**CHAT, "max_tokens": 1}
    until_refused(openai.RateLimitError, lambda: limited.chat.completions.create(**short))
    assert limited.with_options(max_retries=3).chat.completions.create(**short).choices


run()
