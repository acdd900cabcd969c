"""What people do with the OpenAI SDK, sync and async, through the gateway and on an embedded engine itself."""

from __future__ import annotations

import json
from typing import Any

import pytest

from e2e.conftest import CONTEXT_TOKENS
from e2e.sdk import Sdk, asking, content, sync_client
from e2e.server_process import Server
from e2e.servers import Fleet
from plait.lab.embedded.responses import FINGERPRINT

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
            "required": ["place", "days", "unit"],
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}


async def test_a_completion_has_text_usage_and_says_that_it_is_emulated(sdk: Sdk) -> None:
    answer = await sdk.chat(**asking("Say something."))
    (choice,) = answer.choices
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert choice.message.content.startswith("This is emulated text.")
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8
    assert answer.system_fingerprint == FINGERPRINT


async def test_a_completion_without_a_limit_ends_by_itself(sdk: Sdk) -> None:
    answer = await sdk.chat(model="demo", messages=[{"role": "user", "content": "Say as much as you like."}])
    assert answer.choices[0].finish_reason == "stop"


async def test_a_stream_brings_the_text_of_the_whole_answer(sdk: Sdk) -> None:
    request = asking("Tell me a story.", max_tokens=40, seed=7)
    whole = await sdk.chat(**request)
    chunks = await sdk.chat(**request, stream=True)
    assert content(chunks) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 40 + ["length"]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}], ids=str)
async def test_usage_comes_in_a_last_chunk_to_those_who_ask(sdk: Sdk, options: dict[str, bool] | None) -> None:
    chunks = await sdk.chat(**asking("Count."), stream=True, **({} if options is None else {"stream_options": options}))
    with_usage = [chunk for chunk in chunks if chunk.usage is not None]
    if options == {"include_usage": True}:
        assert with_usage == chunks[-1:]
        assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 8)
    else:
        assert with_usage == []
        assert all(chunk.choices for chunk in chunks)


@pytest.mark.parametrize(
    ("tool_choice", "called", "arguments"),
    [
        ("required", "get_weather", {"place": "emulated", "days": 1, "unit": "C"}),
        ({"type": "function", "function": {"name": "get_time"}}, "get_time", {}),
    ],
    ids=["required", "named"],
)
async def test_tools_are_called(sdk: Sdk, tool_choice: Any, called: str, arguments: dict[str, Any]) -> None:
    request = asking("Weather in Bern?", max_tokens=100, tools=[WEATHER, TIME], tool_choice=tool_choice)
    (choice,) = (await sdk.chat(**request)).choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert (call.function.name, json.loads(call.function.arguments)) == (called, arguments)

    chunks = await sdk.chat(**request, stream=True)
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert calls[0].function.name == called
    assert json.loads("".join(call.function.arguments for call in calls)) == arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("tool_choice", ["auto", "none"])
async def test_tools_that_need_not_be_called_are_part_of_the_prompt(sdk: Sdk, tool_choice: str) -> None:
    plain = await sdk.chat(**asking("Weather in Bern?"))
    answer = await sdk.chat(**asking("Weather in Bern?", tools=[WEATHER], tool_choice=tool_choice))
    assert answer.choices[0].message.tool_calls is None
    assert answer.usage.prompt_tokens > plain.usage.prompt_tokens


async def test_two_choices_differ(sdk: Sdk) -> None:
    request = asking("Give me two.", max_tokens=30, n=2)
    answer = await sdk.chat(**request)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert texts[0] != texts[1]
    assert answer.usage.completion_tokens == 60

    chunks = await sdk.chat(**request, stream=True)
    assert [content(chunks, index) for index in (0, 1)] == texts


@pytest.mark.parametrize("as_list", [False, True], ids=["string", "list"])
async def test_stop_cuts_the_text_before_it(sdk: Sdk, as_list: bool) -> None:
    request = asking("Talk until you are stopped.", max_tokens=60)
    unstopped = (await sdk.chat(**request)).choices[0].message.content
    stop = unstopped[40:52]  # from within a word, over several tokens
    request["stop"] = ["not in the text", stop] if as_list else stop
    (choice,) = (await sdk.chat(**request)).choices
    assert (choice.message.content, choice.finish_reason) == (unstopped[: unstopped.index(stop)], "stop")

    chunks = await sdk.chat(**request, stream=True)
    assert (content(chunks), chunks[-1].choices[0].finish_reason) == (choice.message.content, "stop")


async def test_logprobs_cover_every_token(sdk: Sdk) -> None:
    (choice,) = (await sdk.chat(**asking("Are you sure?", logprobs=True))).choices
    assert len(choice.logprobs.content) == 8
    assert "".join(token.token for token in choice.logprobs.content) == choice.message.content


@pytest.mark.parametrize("echo", [False, True], ids=["text", "echo"])
async def test_logprobs_of_text_completions_say_where_each_token_stands(sdk: Sdk, echo: bool) -> None:
    request = {"model": "demo", "prompt": ["Are you", "quite sure?"], "max_tokens": 8, "logprobs": 1, "echo": echo}
    answer = await sdk.text(**request)
    for choice in answer.choices:
        found = choice.logprobs
        assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == 8
        assert all(choice.text.startswith(*at) for at in zip(found.tokens, found.text_offset, strict=True))
        assert choice.text.endswith("".join(found.tokens))

    pieces = [choice for chunk in await sdk.text(**request, stream=True) for choice in chunk.choices if choice.logprobs]
    for choice in answer.choices:
        own = [piece.logprobs for piece in pieces if piece.index == choice.index]
        assert [offset for part in own for offset in part.text_offset] == choice.logprobs.text_offset


async def test_a_seed_repeats_the_text_and_another_changes_it(sdk: Sdk) -> None:
    answers = [await sdk.chat(**asking("Once more.", max_tokens=40, seed=seed)) for seed in (1, 1, 2)]
    first, again, other = [answer.choices[0].message.content for answer in answers]
    assert first == again != other


@pytest.mark.parametrize(
    ("prompt", "choices", "prompt_tokens"),
    [
        ("A text prompt", 1, None),
        ([11, 12, 13, 14, 15], 1, 5),
        (["One text", "and another", "and a third"], 3, None),
        ([[11, 12, 13], [14, 15, 16, 17]], 2, 7),
    ],
    ids=["text", "token ids", "texts", "lists of token ids"],
)
async def test_text_completions(sdk: Sdk, prompt: Any, choices: int, prompt_tokens: int | None) -> None:
    request = {"model": "demo", "prompt": prompt, "max_tokens": 20}
    answer = await sdk.text(**request)
    assert [choice.index for choice in answer.choices] == list(range(choices))
    assert answer.usage.completion_tokens == 20 * choices
    assert prompt_tokens in (None, answer.usage.prompt_tokens)

    chunks = await sdk.text(**request, stream=True)
    pieces = [choice for chunk in chunks for choice in chunk.choices]
    streamed = ["".join(piece.text for piece in pieces if piece.index == index) for index in range(choices)]
    assert streamed == [choice.text for choice in answer.choices]


async def test_echo_puts_the_prompt_before_the_text(sdk: Sdk) -> None:
    answer = await sdk.text(model="demo", prompt="Once upon a time", max_tokens=4, echo=True)
    assert answer.choices[0].text.startswith("Once upon a time")


def test_models_are_listed_and_described(server: Server, fleet: Fleet) -> None:
    expected = ["demo", "small"] if server is fleet.gateway else ["demo"]
    with sync_client(server) as client:
        assert [model.id for model in client.models.list()] == expected


def test_the_gateway_describes_each_model(fleet: Fleet) -> None:
    with sync_client(fleet.gateway) as client:
        assert client.models.retrieve("small").to_dict()["max_model_len"] == CONTEXT_TOKENS
