"""Chat and plain completions of real engines through the gateway, as a client sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from e2e.real_engines.calls import fields_of
from e2e.real_engines.engine import MODEL, EngineKind
from e2e.real_engines.fleet import EngineFleet
from e2e.sdk import content
from plait.backends.tokenization.loading import load_tokenizer

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "What is a prefix cache?"},
]
GREEDY: dict[str, Any] = {"model": MODEL, "max_tokens": 16, "temperature": 0, "extra_body": {"ignore_eos": True}}
FUNCTION = {"name": "look_up", "description": "Looks a word up: ünïcödé too.", "parameters": {"type": "object"}}
CONVERSATION: list[dict[str, Any]] = [
    *MESSAGES,
    {"role": "assistant", "content": "A cache.\n\n  Of prefixes — 前缀 🙂"},
    {"role": "user", "content": [{"type": "text", "text": "In parts, "}, {"type": "text", "text": "this one."}]},
]


def chat(client: OpenAI, **options: Any) -> Any:
    """The answer to `MESSAGES`, or its chunks."""
    answer = client.chat.completions.create(**{**GREEDY, "messages": MESSAGES, **options})
    return list(answer) if options.get("stream") else answer


def test_a_chat(client: OpenAI, model: Path) -> None:
    answer = chat(client)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.model == MODEL
    assert answer.usage.prompt_tokens == len(load_tokenizer(str(model)).encode_chat(MESSAGES))
    assert answer.usage.completion_tokens == 16


def test_a_streamed_chat_says_the_same(client: OpenAI) -> None:
    answer, chunks = chat(client), chat(client, stream=True)
    assert content(chunks) == answer.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in chunks), "usage was not asked for"


def test_a_streams_usage_comes_when_asked_for(client: OpenAI) -> None:
    *_, last = chat(client, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage.completion_tokens == 16


@pytest.mark.parametrize("prompt", ["Once upon a time", [5, 6, 7, 8, 9] * 20], ids=["text", "tokens"])
def test_a_completion_streamed_and_whole(client: OpenAI, prompt: str | list[int]) -> None:
    answer = client.completions.create(prompt=prompt, **GREEDY)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    chunks = list(client.completions.create(prompt=prompt, stream=True, **GREEDY))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == answer.choices[0].text


def test_tools_reach_the_prompt(client: OpenAI) -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    assert chat(client, tools=tools).usage.prompt_tokens > chat(client).usage.prompt_tokens + 20


@pytest.mark.parametrize(
    "chat_request",
    [
        {"messages": MESSAGES},
        {"messages": CONVERSATION},
        {"messages": MESSAGES, "tools": [{"type": "function", "function": FUNCTION}]},
        {"messages": MESSAGES, "add_generation_prompt": False},
    ],
    ids=["plain", "conversation", "tools", "no generation prompt"],
)
def test_the_gateway_counts_the_tokens_that_the_engine_computes(
    fleet: EngineFleet, kind: EngineKind, model: Path, chat_request: dict[str, Any]
) -> None:
    """Id by id: one that differs would end every prefix there."""
    engine = fleet.engines["engine-1"]
    body = {"model": MODEL, "max_tokens": 1, engine.prompt_ids_option: True, **chat_request}
    answer = fleet.gateway.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    fields = fields_of(kind, body)
    if not fields.is_exact:
        assert (kind.name, chat_request) == ("sglang", {"messages": MESSAGES, "add_generation_prompt": False})
        pytest.skip("SGLang adds the generation prompt whatever the body says: a guess is enough")
    counted = load_tokenizer(str(model)).encode_chat(
        chat_request["messages"],
        tools=fields.tools,
        add_generation_prompt=chat_request.get("add_generation_prompt", True),
        form=fields.form,
    )
    assert engine.prompt_ids(answer.json()) == counted


@pytest.mark.parametrize(
    "headers",
    [
        {"plait-slo-ttft-ms": "2000", "plait-slo-tpot-ms": "200"},
        {"plait-slo-jct-ms": "60000", "plait-objective": "throughput"},
        {"plait-priority": "-3", "plait-objective": "latency"},
    ],
    ids=lambda headers: next(iter(headers)),
)
def test_annotated_calls_are_served(client: OpenAI, headers: dict[str, str]) -> None:
    assert chat(client, extra_headers=headers).choices[0].message.content


def test_both_engines_take_part(client: OpenAI, fleet: EngineFleet) -> None:
    """New prompts go wherever the window holds less work, so that over the gateway's life every engine has some."""
    for number in range(6):
        client.completions.create(prompt=[100 + number, *range(10, 800)], **GREEDY)
    for name in fleet.engines:
        assert fleet.gateway.metric("plait_calls_total", engine=name) > 0


def test_what_the_engine_refuses_is_refused(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as refused:
        chat(client, temperature=-1)
    assert "temperature" in str(refused.value)
