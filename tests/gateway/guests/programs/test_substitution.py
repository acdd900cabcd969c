"""Values in prompts: only the names that are listed, only in texts, and each once."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.protocol.openai import ChatRequest, CompletionRequest, parse_request
from plait.gateway.calls.outgoing import FIELDS
from plait.gateway.guests.programs.filled_prompts import fill_in, filled_sizes, message_texts, replaced

VALUES = {"a": "one", "b": "{{a}} and \\1"}
Request = ChatRequest | CompletionRequest


def filled_in(body: bytes, request: Request) -> tuple[bytes, Request]:
    """The body and the request with `VALUES`."""
    fields = FIELDS.decode(body)
    filled = fill_in(fields, request, VALUES)
    return msgspec.json.encode(fields), filled


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no braces", "no braces"),
        ("{{a}}", "one"),
        ("{{ a }}, {{a}}", "one, one"),
        ("{{b}}", "{{a}} and \\1"),
        ("{{c}} {{ 1 }} {{}} {a} {{a b}} {{{a}}}", "{{c}} {{ 1 }} {{}} {a} {{a b}} {one}"),
    ],
)
def test_a_text(text: str, expected: str) -> None:
    assert replaced(text, VALUES) == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{{a}}", "one"),
        (None, None),
        ([3, {"type": ["text"], "text": "{{a}}"}], [3, {"type": ["text"], "text": "{{a}}"}]),
        (
            [{"type": "text", "text": "{{a}}", "x": "{{a}}"}, "{{a}}", {"type": "image_url", "image_url": "{{a}}"}],
            [{"type": "text", "text": "one", "x": "{{a}}"}, "one", {"type": "image_url", "image_url": "{{a}}"}],
        ),
    ],
)
def test_messages(content: Any, expected: Any) -> None:
    body = b'{"model":"m", "vendor": 1.50,"messages":%b}' % json.dumps([{"role": "user", "content": content}]).encode()
    filled, request = filled_in(body, parse_request(body, ChatRequest))
    assert isinstance(request, ChatRequest)
    assert request.messages == [{"role": "user", "content": expected}]
    assert parse_request(filled, ChatRequest) == request
    assert b'"vendor":1.50' in filled


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("{{a}}", "one"), (["{{a}}", "x"], ["one", "x"]), ([1, 2], [1, 2]), ([[1], [2]], [[1], [2]])],
)
def test_prompts(prompt: Any, expected: Any) -> None:
    body = json.dumps({"model": "m", "prompt": prompt}).encode()
    filled, request = filled_in(body, parse_request(body, CompletionRequest))
    assert isinstance(request, CompletionRequest)
    assert request.prompt == json.loads(filled)["prompt"] == expected


def test_without_values_nothing_is_touched() -> None:
    body = b'{"model":"m","prompt":"{{a}}"}'
    request, fields = parse_request(body, CompletionRequest), FIELDS.decode(body)
    assert fill_in(fields, request, {}) is request
    assert msgspec.json.encode(fields) == body


TEXTS = st.lists(st.sampled_from(["{{a}}", "{{ b }}", "{{c}}", "{{\u2003a}}", "{{", "}}", "é", "x"])).map("".join)
VALUES_OF = st.fixed_dictionaries({"a": st.text(), "b": TEXTS})


@given(st.lists(st.one_of(TEXTS, st.lists(st.one_of(TEXTS, st.builds(lambda text: {"text": text}, TEXTS))))), VALUES_OF)
def test_the_size_of_a_chat_is_known_before_it_is_filled(contents: list[Any], values: dict[str, str]) -> None:
    request = ChatRequest(messages=[{"role": "user", "content": content} for content in contents])
    filled = fill_in({}, request, values)
    assert isinstance(filled, ChatRequest)
    texts = [text for message in filled.messages for text in message_texts(message)]
    assert filled_sizes(request, values) == [sum(len(text.encode()) for text in texts)]


@given(st.one_of(TEXTS, st.lists(TEXTS, min_size=1)), VALUES_OF)
def test_the_sizes_of_prompts_are_known_before_they_are_filled(prompt: Any, values: dict[str, str]) -> None:
    request = CompletionRequest(prompt=prompt)
    filled = fill_in({}, request, values)
    assert isinstance(filled, CompletionRequest)
    assert filled_sizes(request, values) == [len(str(text).encode()) for text in filled.prompts()]


def test_a_request_without_values_stays_as_it_is() -> None:
    assert filled_sizes(CompletionRequest(prompt="{{a}}"), {}) == []
