"""Outlines of requests: where their segments end, how long they are, and what makes them differ."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.errors import CallerError
from plait.backends.protocol.openai import ChatRequest, CompletionRequest
from plait.gateway.calls.guessed_tokens import CHARACTERS_PER_TOKEN
from plait.gateway.programs.prompt_outline import outline_of
from plait.gateway.programs.substitution import replaced
from plait.policy.programs.variable_prefix import shared_segments
from tests.gateway.programs.chained_gateway import served_calls

INPUTS = ("a", "b")
TEXTS = st.lists(st.sampled_from(["{{a}}", "{{b}}", "{{c}}", "Write ", "\n", "é"]), max_size=5).map("".join)


def chat(*contents: Any, **fields: Any) -> ChatRequest:
    messages = [{"role": "user", "content": content} for content in contents]
    return ChatRequest(model="m", messages=messages, **fields)


def text(prompt: Any, **fields: Any) -> CompletionRequest:
    return CompletionRequest(model="m", prompt=prompt, **fields)


def shared(*requests: ChatRequest | CompletionRequest) -> int:
    return shared_segments(outline_of(request, INPUTS) for request in requests)


def test_a_segment_ends_at_a_variable_and_at_a_message() -> None:
    one = outline_of(chat("Be brief.", "Review {{a}} by {{ b }}, not {{c}}"), INPUTS)
    assert [size for size in one.sizes if isinstance(size, str)] == ["a", "b"]
    assert len(one.keys) == 6
    assert shared(chat("Be brief.", "{{a}}"), chat("Be brief.", "{{b}}")) == 2
    assert shared(chat("Be brief.", "1"), chat("Be brief.", "2")) == 1
    assert shared(chat("Be brief."), chat("Be long.")) == 0


def test_parts_of_a_message_and_raw_prompts_are_seen_too() -> None:
    parts = [{"type": "text", "text": "Review {{a}}"}, {"type": "text", "text": "soon"}]
    assert outline_of(chat(parts), INPUTS).sizes[1] == "a"
    assert outline_of(text("Review {{a}}"), INPUTS).sizes[1] == "a"
    assert shared(text(["{{a}} one", "two"]), text("{{a}} one")) == 3
    assert shared(text([1, 2, 3]), text([1, 2, 3])) == 1
    assert shared(text([1, 2, 3]), text([1, 2])) == 0
    with pytest.raises(CallerError):
        outline_of(text([]), INPUTS)


@pytest.mark.parametrize(
    "fields", [{"tools": [{"type": "function"}]}, {"chat_template": "x"}, {"cache_salt": "x"}, {"model": "n"}]
)
def test_what_changes_the_prompt_or_its_cache_is_not_shared(fields: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "x"}]
    assert shared(chat("x"), ChatRequest(**{"model": "m", "messages": messages, **fields})) == 0
    assert shared(chat("x", max_tokens=1), chat("x", stream=True)) == 1


@given(first=TEXTS, second=TEXTS, values=st.fixed_dictionaries({"a": st.just("A" * 40), "b": st.just("B" * 80)}))
def test_what_is_shared_is_a_common_prefix_once_there_are_values(
    first: str, second: str, values: dict[str, str]
) -> None:
    outlines = [outline_of(text(prompt), INPUTS) for prompt in (first, second)]
    segments = shared_segments(outlines)
    tokens = outlines[0].tokens(segments, lambda name: len(values[name]) // CHARACTERS_PER_TOKEN)
    filled = [replaced(prompt, values) for prompt in (first, second)]
    common = next((n for n, pair in enumerate(zip(*filled, strict=False)) if len(set(pair)) > 1), min(map(len, filled)))
    assert tokens * CHARACTERS_PER_TOKEN <= len(filled[0][:common].encode())


async def test_calls_of_a_group_are_placed_with_what_they_share_however_they_came() -> None:
    rules, design = "Keep to the rules. " * 20, "A snake game. " * 20
    async with served_calls() as served:
        await served.chat("{{one}} {{two}}", inputs="one, two", output="all", objective="latency")
        for output in ("one", "two"):
            await served.chat(f"{rules}{{{{design}}}} Write {output}", inputs="design", output=output)
        await served.value("design", design)
        calls = [delivery.call for delivery, _, _ in served.engine.running.values()]
        for call in calls:
            assert call.group is not None
            assert 0.7 * call.prompt_tokens < call.group.shared_tokens < call.prompt_tokens


async def test_a_submitted_prompt_shares_what_stands_before_its_first_output() -> None:
    async with served_calls() as served:
        await served.chat("{{one}} {{two}}", inputs="one, two", output="all", objective="latency")
        for output in ("one", "two"):
            await served.submit(
                f"Write {{{{design}}}} as {output}: {{{{{output}}}}} and end", output, inputs=("design",), chat=False
            )
        await served.value("design", "word " * 300)
        calls = [delivery.call for delivery, _, _ in served.engine.running.values()]
        assert [call.group.calls for call in calls if call.group is not None] == [2, 2]
        for call in calls:
            assert call.group is not None
            assert 0.9 * call.prompt_tokens < call.group.shared_tokens < call.prompt_tokens
