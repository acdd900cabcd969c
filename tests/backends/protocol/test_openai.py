"""Bodies that no engine should see: too deep, not Unicode, with a name that nobody has."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.errors import CallerError
from plait.backends.protocol.json_bounds import MAX_CONTAINERS, MAX_JSON_LEVELS, MAX_STRINGS, MAX_VALUES
from plait.backends.protocol.openai import (
    MAX_MODEL_CHARACTERS,
    MAX_TEMPLATE_OPTIONS_BYTES,
    ChatRequest,
    CompletionRequest,
    check_unicode,
    parse_request,
)


def body(content: bytes = b'"x"', **fields: object) -> bytes:
    given = {"model": "m"} | fields
    return json.dumps(given).encode()[:-1] + b', "messages": [{"role": "user", "content": ' + content + b"}]}"


def refusal(raw: bytes) -> tuple[str | None, str | None]:
    with pytest.raises(CallerError) as caught:
        parse_request(raw, ChatRequest)
    assert len(caught.value.message) < 500
    return caught.value.param, caught.value.code


@pytest.mark.parametrize("levels", [MAX_JSON_LEVELS, 900, 1_000, 100_000])
@pytest.mark.parametrize("ends", [(b"[", b"]"), (b'{"a":', b"}")])
def test_a_deep_body_is_refused(levels: int, ends: tuple[bytes, bytes]) -> None:
    deep = ends[0] * levels + b"1" + ends[1] * levels
    assert refusal(body(deep)) == (None, "json_too_deep")
    assert refusal(body()[:-1] + b', "unknown": ' + deep + b"}") == (None, "json_too_deep")


MANY = {
    "objects": b"[" + b"{}," * MAX_CONTAINERS + b"{}]",
    "arrays": b"[" + b"[]," * MAX_CONTAINERS + b"[]]",
    "strings": b"[" + b'"",' * MAX_STRINGS + b'""]',
    "numbers": b"[" + b"1," * MAX_VALUES + b"1,1]",
}


@pytest.mark.parametrize("kind", MANY)
def test_a_body_with_too_many_values_is_refused(kind: str) -> None:
    assert refusal(body()[:-1] + b', "unknown": ' + MANY[kind] + b"}") == (None, "json_too_many_values")


@pytest.mark.parametrize("kind", MANY)
def test_a_text_may_hold_any_number_of_brackets_quotes_and_commas(kind: str) -> None:
    parse_request(body(json.dumps(MANY[kind].decode()).encode()), ChatRequest)


@pytest.mark.parametrize("ids", [[], [True], [1.5], [-1], [2**32], [1, "a"]])
def test_what_is_no_token_id_is_refused(ids: list[object]) -> None:
    with pytest.raises(CallerError, match="list of token ids"):
        parse_request(json.dumps({"model": "m", "prompt": ids}).encode(), CompletionRequest).prompts()


def test_a_body_may_be_as_deep_as_allowed() -> None:
    levels = MAX_JSON_LEVELS - 3
    parse_request(body(b"[" * levels + b"]" * levels), ChatRequest)


@pytest.mark.parametrize("content", [b'"\xff"', rb'"\ud800"', rb'"\udc00x"', b'"\xed\xa0\x80"', rb'"\ud83dx"'])
def test_text_that_is_not_unicode_is_refused(content: bytes) -> None:
    assert refusal(body(content)) == (None, "invalid_json")


@pytest.mark.parametrize(
    "more", [b'"\xff": 1', b'"unread": {"\xff": 1}', b'"unread": "\xff"', b'"unread": [{"a": ["\xed\xa0\x80"]}]']
)
def test_nor_may_it_stand_where_nobody_reads(more: bytes) -> None:
    assert refusal(body()[:-1] + b", " + more + b"}") == (None, "invalid_json")


@given(st.binary(max_size=12) | st.text(max_size=12).map(str.encode), st.integers(1, 5))
def test_unicode_is_told_from_other_bytes_in_parts_too(document: bytes, part: int) -> None:
    try:
        document.decode()
    except UnicodeDecodeError:
        with pytest.raises(UnicodeDecodeError):
            check_unicode(document, part)
    else:
        check_unicode(document, part)


def test_the_length_of_a_models_name_is_bounded() -> None:
    assert refusal(body(model="m" * (MAX_MODEL_CHARACTERS + 1))) == ("model", None)
    parse_request(body(model="m" * MAX_MODEL_CHARACTERS), ChatRequest)


def test_template_options_are_switches() -> None:
    parse_request(body(chat_template_kwargs={"enable_thinking": False}), ChatRequest)
    large = {"text": "x" * MAX_TEMPLATE_OPTIONS_BYTES}
    assert refusal(body(chat_template_kwargs=large)) == ("chat_template_kwargs", None)


@pytest.mark.parametrize(
    ("fields", "has_grammar"),
    [
        ("", False),
        (', "response_format": null', False),
        (', "response_format": {"type": "text"}', False),
        (', "response_format": {"type": "json_object"}', True),
        (', "structured_outputs": {"regex": "a+"}', True),
        (', "guided_choice": ["a", "b"]', True),
        (', "ebnf": "root ::= [a-z]"', True),
    ],
)
def test_a_grammar_is_told_by_the_fields_of_each_engine(fields: str, has_grammar: bool) -> None:
    body = f'{{"model": "m", "prompt": "x"{fields}}}'.encode()
    assert parse_request(body, CompletionRequest).has_grammar is has_grammar


@pytest.mark.parametrize(
    ("choice", "has_grammar"),
    [('"auto"', False), ('"none"', False), ('"required"', True), ('{"type": "function"}', True)],
)
def test_a_tool_that_has_to_be_called_is_a_grammar(choice: str, has_grammar: bool) -> None:
    body = f'{{"model": "m", "messages": [], "tool_choice": {choice}}}'.encode()
    assert parse_request(body, ChatRequest).has_grammar is has_grammar
