"""OpenAI's SDK for Python, whose streams are silent for long."""

from __future__ import annotations

from typing import Any

from openai import OpenAI
from program import KEY, V1, run_at_once
from silent import MESSAGES, QUESTION, reads_silent_streams

client = OpenAI(base_url=V1, api_key=KEY, max_retries=0)


@reads_silent_streams
def chat(model: str, more: dict[str, Any]) -> str:
    chunks = client.chat.completions.create(model=model, messages=MESSAGES, stream=True, extra_body=more)
    return "".join([chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices])


@reads_silent_streams
def completion(model: str, more: dict[str, Any]) -> str:
    chunks = client.completions.create(model=model, prompt=QUESTION, stream=True, extra_body=more)
    return "".join([chunk.choices[0].text for chunk in chunks if chunk.choices])


@reads_silent_streams
def response(model: str, more: dict[str, Any]) -> str:
    events = list(client.responses.create(model=model, input=QUESTION, stream=True, extra_body=more))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    return events[-1].response.output_text


@reads_silent_streams
def response_helper(model: str, more: dict[str, Any]) -> str:
    with client.responses.stream(model=model, input=QUESTION, extra_body=more) as events:
        said = "".join([event.delta for event in events if event.type == "response.output_text.delta"])
        assert events.get_final_response().output_text == said
    return said


run_at_once()
