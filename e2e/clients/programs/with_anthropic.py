"""Anthropic's SDK for Python."""

from __future__ import annotations

import anthropic
from anthropic import Anthropic, AsyncAnthropic
from program import (
    KEY,
    LIMITED_KEY,
    MODEL,
    PICTURE,
    PLACE_SCHEMA,
    URL,
    WRONG_KEY,
    WRONG_MODEL,
    feature,
    refused,
    run,
    until_refused,
)

client = Anthropic(base_url=URL, api_key=KEY, max_retries=0)
ASK = {"role": "user", "content": "Where is the Eiffel Tower?"}
TOOL = {"name": "find", "description": "Find a place.", "input_schema": PLACE_SCHEMA}
MESSAGE = {"model": MODEL, "max_tokens": 100, "messages": [ASK]}


@feature("models")
def models() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


@feature("messages")
def messages() -> None:
    answer = client.messages.create(**MESSAGE, system="Be short.", stop_sequences=["never"])
    assert answer.content[0].text
    assert answer.usage.output_tokens


@feature("messages stream")
def messages_stream() -> None:
    with client.messages.stream(**MESSAGE) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    assert final.content[0].text == text
    assert final.usage.output_tokens


@feature("messages tools")
def messages_tools() -> None:
    first = client.messages.create(**MESSAGE, tools=[TOOL], tool_choice={"type": "any"})
    assert first.stop_reason == "tool_use"
    (use,) = [block for block in first.content if block.type == "tool_use"]
    assert use.input["place"]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "Paris"}
    turns = [ASK, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**{**MESSAGE, "messages": turns}, tools=[TOOL]).content[0].text


@feature("count tokens")
def count_tokens() -> None:
    assert client.messages.count_tokens(model=MODEL, messages=[ASK], tools=[TOOL]).input_tokens > 5


@feature("image")
def image() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": PICTURE}
    parts = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
    answer = client.messages.create(model=MODEL, max_tokens=10, messages=[{"role": "user", "content": parts}])
    assert answer.usage.input_tokens > 200


@feature("async")
async def asynchronous() -> None:
    async with (
        AsyncAnthropic(base_url=URL, api_key=KEY, max_retries=0) as asked,
        asked.messages.stream(**MESSAGE) as events,
    ):
        assert await events.get_final_text()


@feature("wrong model")
def wrong_model() -> None:
    error = refused(anthropic.NotFoundError, lambda: client.messages.create(**{**MESSAGE, "model": WRONG_MODEL}))
    assert error.body["error"]["type"] == "not_found_error"


@feature("wrong key")
def wrong_key() -> None:
    asked = client.with_options(api_key=WRONG_KEY)
    error = refused(anthropic.AuthenticationError, lambda: asked.messages.create(**MESSAGE))
    assert error.body["error"]["type"] == "authentication_error"


@feature("retry")
def retry() -> None:
    limited = client.with_options(api_key=LIMITED_KEY)
    short = {**MESSAGE, "max_tokens": 1}
    until_refused(anthropic.RateLimitError, lambda: limited.messages.create(**short))
    assert limited.with_options(max_retries=3).messages.create(**short).content


run()
