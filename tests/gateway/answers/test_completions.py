"""What an engine says of a completion: read where it can be, and never trusted."""

from __future__ import annotations

import json
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.errors import EngineError, EngineStatusError
from plait.gateway.answers.completions import (
    COMPLETION,
    LONG_BYTES,
    UNKNOWN,
    UsageBounds,
    decode,
    endings,
    given_up,
    read_usage,
    reported_error,
)
from plait.gateway.answers.error_texts import stated_status
from plait.gateway.fleet.booking import CallUsage

ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
USAGE_KEYS = st.sampled_from(("prompt_tokens", "completion_tokens", "prompt_tokens_details", "cached_tokens"))


@pytest.mark.parametrize(
    ("usage", "read", "corrected"),
    [
        ({"prompt_tokens": 3, "completion_tokens": 4}, CallUsage(3, 4), False),
        ({"prompt_tokens": 3, "completion_tokens": None, "prompt_tokens_details": None}, CallUsage(3, 0), False),
        ({"prompt_tokens": 3, "prompt_tokens_details": {}}, CallUsage(3, 0), False),
        ({"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}, CallUsage(3, 0, 2), False),
        ({"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}, CallUsage(3, 0, 3), True),
        ({"prompt_tokens": 3, "completion_tokens": 1e14}, CallUsage(3, 70), True),
        ({"prompt_tokens": -3, "completion_tokens": -1}, CallUsage(0, 0), True),
        ({"prompt_tokens": True}, None, True),
        ({"prompt_tokens": nan}, None, True),
        ({"prompt_tokens": "3"}, None, True),
        ({"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": []}}, None, True),
        ([], None, True),
        (None, None, False),
    ],
)
def test_a_usage_within_its_bounds(usage: Any, read: CallUsage | None, corrected: bool) -> None:
    assert read_usage(usage, UsageBounds(100, 70)) == (read, corrected)


@given(ANY_JSON | st.dictionaries(USAGE_KEYS, ANY_JSON))
def test_no_usage_leaves_its_bounds(usage: Any) -> None:
    read, corrected = read_usage(usage, UsageBounds(100, 70))
    assert read is None or (0 <= read.prompt_tokens <= 100 and 0 <= read.output_tokens <= 70)
    assert read is None or read.cached_tokens is None or 0 <= read.cached_tokens <= read.prompt_tokens
    assert corrected or read is None or usage.get("prompt_tokens", 0) == read.prompt_tokens


@given(st.dictionaries(st.sampled_from(("usage", "choices", "error")), ANY_JSON))
def test_any_object_is_a_body(fields: dict[str, Any]) -> None:
    body = decode(json.dumps(fields, allow_nan=False, default=str).encode()) if _finite(fields) else None
    if body is not None:
        endings(body)
        read_usage(body.usage, UsageBounds())
        reported_error("a", body.error)


def _finite(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"\xff", b"3", b"[" * 100_000])
def test_what_is_not_an_object_is_not_a_body(body: bytes) -> None:
    assert decode(body) is None


def test_endings_are_read_by_choice() -> None:
    body = decode(
        b'{"choices":[{"finish_reason":"stop"},{"index":1,"finish_reason":null},{"index":2,"finish_reason":{"type":"length"}},7]}'
    )
    assert body is not None
    assert endings(body) == [(0, "stop"), (2, "length")]
    assert given_up("a", ["stop", "length"]) is None
    assert given_up("a", ["stop", "abort"]) is not None


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ({"code": 404}, 404),
        ({"code": "422"}, 422),
        ({"code": 503, "type": "BadRequestError"}, 503),
        ({"code": None, "type": "BadRequestError"}, 400),
        ({"code": 40303}, 400),  # FastChat: the context is too long
        ({"code": 42903}, 429),
        ({"code": 50002}, 500),
        ({"code": True}, 502),
        ({"code": "9" * 5_000}, 502),
        ("dead", 502),
    ],
)
def test_an_error_states_its_status(error: Any, status: int) -> None:
    assert stated_status(error) == status
    for body in ({"error": error}, {"object": "error", **error} if isinstance(error, dict) else {"error": error}):
        read = COMPLETION.whole("a", json.dumps(body).encode(), UNKNOWN)
        assert read.failed_status == status


CHOICES = st.lists(
    st.fixed_dictionaries(
        {
            "message": st.fixed_dictionaries(
                {
                    "role": st.just("assistant"),
                    "content": st.text(min_size=1),
                    "tool_calls": st.lists(
                        st.fixed_dictionaries(
                            {
                                "id": st.just("c"),
                                "type": st.just("function"),
                                "function": st.fixed_dictionaries(
                                    {"name": st.just("f"), "arguments": st.text(min_size=1)}
                                ),
                            }
                        ),
                        min_size=1,
                        max_size=2,
                    ),
                }
            ),
            "finish_reason": st.sampled_from(("stop", "length", "tool_calls")),
        }
    ),
    min_size=1,
    max_size=3,
)


@given(CHOICES, st.booleans())
def test_a_whole_answer_is_the_same_as_a_stream(choices: list[Any], withhold: bool) -> None:
    indexed = [{"index": place, **choice} for place, choice in enumerate(choices)]
    body = {"id": "x", "object": "chat.completion", "choices": indexed, "usage": {"prompt_tokens": 1}}
    events = COMPLETION.as_events("a", json.dumps(body).encode(), withhold=withhold)
    assert events is not None
    assert events.endswith(b"data: [DONE]\n\n")
    assert (b"usage" in events) != withhold
    expected = {name: value for name, value in body.items() if name != "usage" or not withhold}
    assert json.loads(COMPLETION.assembled("a", events)) == expected


def test_a_stream_that_is_not_whole_makes_no_answer() -> None:
    for events in (b"", b'data: {"choices": [{"index": 0, "delta": {"content": "x"}}]}\n\n', b"data: 1\n\n"):
        with pytest.raises(EngineError):
            COMPLETION.assembled("a", events)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ({"message": "too long", "code": 400}, "too long"),
        ({"message": "x" * 1_000, "code": 422}, "x" * 300 + "..."),
        ({"message": "dead", "code": 500}, EngineStatusError),
        ({"message": "dead", "code": "engine_error"}, EngineStatusError),
        ({}, EngineStatusError),
        ("dead", EngineStatusError),
        ([1], EngineStatusError),
    ],
)
def test_an_error_may_be_the_callers(error: Any, expected: Any) -> None:
    found = reported_error("a", error)
    assert found == expected or (isinstance(expected, type) and isinstance(found, expected))


@pytest.mark.parametrize("words", [1, LONG_BYTES // 5], ids=["short", "long"])
def test_numbers_that_json_lacks_are_no_engines_fault(words: int) -> None:
    message = {"role": "assistant", "content": "word " * words}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": {"content": [{"logprob": nan}]}}
    usage = {"prompt_tokens": 3, "completion_tokens": words}
    answer = json.dumps({"choices": [choice], "usage": usage, "inf": inf}).encode()
    read = COMPLETION.whole("e", answer, UNKNOWN)
    assert (read.finish, read.usage) == ("stop", CallUsage(3, words))
    client = {"choices": [{**choice, "logprobs": {"content": [{"logprob": None}]}}], "usage": usage, "inf": None}
    assert json.loads(read.mended or b"", parse_constant=pytest.fail) == client
    stream = COMPLETION.stream("e", withhold=False, choices=1, bounds=UNKNOWN)
    event, done = stream.feed(b": a comment\ndata: %b\n\ndata: [DONE]\n\n" % answer).split(b"\n\n", 1)
    assert (event, done) == (b": a comment\ndata: " + (read.mended or b""), b"data: [DONE]\n\n")
    assert (stream.problem, stream.finish) == (None, "stop")


@pytest.mark.parametrize("body", [b'["NaN"]', b'"Infinity"', b"[NaN]", b'{"a": "NaN'])
def test_a_text_that_looks_like_a_number_makes_no_body_of_what_is_none(body: bytes) -> None:
    assert decode(body) is None
