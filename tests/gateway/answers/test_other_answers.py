"""Whole answers and streams of the routes beside completions: usage, endings, errors, and the bytes unchanged."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.errors import EngineError
from plait.gateway.answers.completions import (
    COMPLETION,
    UNKNOWN,
    AnswerForm,
    EventStream,
    UsageBounds,
    WholeAnswer,
)
from plait.gateway.answers.other_answers import OBJECT
from plait.gateway.fleet.booking import CallUsage
from plait.gateway.guests.translation.typed_answers import MESSAGE, RESPONSE

RESPONSE_USAGE = {"input_tokens": 100, "input_tokens_details": {"cached_tokens": 64}, "output_tokens": 7}
MESSAGE_USAGE = {"input_tokens": 36, "cache_read_input_tokens": 64, "output_tokens": 7}
READ = CallUsage(100, 7, 64)


def events(*bodies: dict[str, Any]) -> bytes:
    return b"".join(b"event: %b\ndata: %b\n\n" % (b["type"].encode(), json.dumps(b).encode()) for b in bodies)


RESPONSE_STREAM = events(
    {"type": "response.created", "response": {"status": "in_progress", "usage": None}},
    {"type": "response.output_text.delta", "delta": 'the "error" of response.failed'},
    {"type": "response.completed", "response": {"status": "completed", "usage": RESPONSE_USAGE}},
)
MESSAGE_STREAM = events(
    {"type": "message_start", "message": {"usage": MESSAGE_USAGE | {"output_tokens": 1}}},
    {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "message_stop"}},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 7}},
    {"type": "message_stop"},
)
STREAMS = {"response": (RESPONSE, RESPONSE_STREAM), "message": (MESSAGE, MESSAGE_STREAM)}


def reader(form: AnswerForm) -> EventStream:
    return form.stream("a", withhold=False, choices=1, bounds=UNKNOWN)


@pytest.mark.parametrize("kind", STREAMS)
@given(cuts=st.lists(st.integers(0, 600), max_size=6))
def test_a_stream_passes_unchanged_and_its_usage_is_read(kind: str, cuts: list[int]) -> None:
    form, sent = STREAMS[kind]
    stream, out, start = reader(form), b"", 0
    for cut in [*sorted(cuts), len(sent)]:
        out += stream.feed(sent[start:cut])
        start = max(start, cut)
    assert out + stream.end() == sent
    assert (stream.usage, stream.usage_corrected, stream.problem) == (READ, False, None)


@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_without_its_last_event_is_broken(kind: str) -> None:
    form, sent = STREAMS[kind]
    stream = reader(form)
    stream.feed(sent[: sent.rindex(b"event:")])
    assert isinstance(stream.problem, EngineError)
    assert "without" in stream.problem.message


def test_a_message_that_ends_without_a_reason_is_broken() -> None:
    """As vLLM ends those of a rank that it stops. The last event is kept back, so that an error event can follow."""
    stream, sent = reader(MESSAGE), MESSAGE_STREAM.replace(b'"end_turn"', b"null")
    assert stream.feed(sent) == sent[: sent.rindex(b"event:")]
    assert isinstance(stream.problem, EngineError)
    assert "without" in stream.problem.message


@pytest.mark.parametrize(
    ("form", "body"),
    [
        (RESPONSE, {"type": "error", "message": "it broke"}),
        (RESPONSE, {"type": "response.failed", "response": {"error": {"message": "it broke"}}}),
        (RESPONSE, {"type": "error", "error": {"message": "it broke"}}),
        (MESSAGE, {"type": "error", "error": {"type": "api_error", "message": "it broke"}}),
    ],
)
def test_an_error_event_is_the_engines_fault(form: AnswerForm, body: dict[str, Any]) -> None:
    stream = reader(form)
    stream.feed(events(body))
    assert isinstance(stream.error, EngineError)
    assert "it broke" in stream.error.message


@pytest.mark.parametrize(
    ("form", "body", "usage"),
    [
        (RESPONSE, {"status": "completed", "error": None, "usage": RESPONSE_USAGE}, READ),
        (RESPONSE, {"status": "incomplete", "usage": None}, None),
        (MESSAGE, {"type": "message", "stop_reason": "end_turn", "usage": MESSAGE_USAGE}, READ),
        (OBJECT, {"data": [], "usage": {"prompt_tokens": 5, "total_tokens": 5}}, CallUsage(5, 0, None)),
        (OBJECT, {"tokens": [1, 2]}, None),
        (OBJECT, [{"score": 1.0}], None),
    ],
)
def test_a_whole_answer_says_its_usage(form: AnswerForm, body: Any, usage: CallUsage | None) -> None:
    assert form.whole("a", json.dumps(body).encode(), UNKNOWN)[:3] == (usage, False, None)


def test_vectors_may_come_as_bytes() -> None:
    assert OBJECT.whole("a", b"\x00\xff NaN", UNKNOWN) == WholeAnswer(is_not_json=True)


def test_clients_get_no_numbers_that_json_lacks() -> None:
    assert OBJECT.whole("a", b'{"data": [], "usage": {"prompt_tokens": NaN}}', UNKNOWN).mended == (
        b'{"data":[],"usage":{"prompt_tokens":null}}'
    )
    stream = RESPONSE.stream("a", withhold=False, choices=1, bounds=UNKNOWN)
    end = b'event: x\ndata: {"type": "response.completed", "response": {"status": "completed", "usage": {"a": %b}}}\n\n'
    assert json.loads(stream.feed(end % b"Infinity").partition(b"data:")[2], parse_constant=pytest.fail)
    assert stream.problem is None


@pytest.mark.parametrize(
    ("form", "body", "finish"),
    [
        (COMPLETION, {"choices": [{"finish_reason": "length", "index": 0}]}, "length"),
        (RESPONSE, {"status": "incomplete"}, "incomplete"),
        (MESSAGE, {"type": "message", "stop_reason": "tool_use"}, "tool_use"),
        (OBJECT, {"data": []}, None),
    ],
)
def test_a_whole_answer_says_why_it_ended(form: AnswerForm, body: Any, finish: str | None) -> None:
    assert form.whole("a", json.dumps(body).encode(), UNKNOWN).finish == finish


@pytest.mark.parametrize(
    ("form", "answer"),
    [
        (RESPONSE, b"[]"),
        (RESPONSE, b'{"status": "in_progress"}'),
        (MESSAGE, b'{"type": "message", "stop_reason": null}'),
    ],
)
def test_what_is_no_whole_answer_is_the_engines_fault(form: AnswerForm, answer: bytes) -> None:
    with pytest.raises(EngineError):
        form.whole("a", answer, UNKNOWN)


@pytest.mark.parametrize(
    ("form", "has_begun", "told"),
    [
        (COMPLETION, False, b": waiting\n\n"),
        (COMPLETION, True, b": waiting\n\n"),
        (RESPONSE, False, b": waiting\n\n"),
        (RESPONSE, True, b': waiting\nevent: keepalive\ndata: {"type": "keepalive"}\n\n'),
        (MESSAGE, False, b': waiting\nevent: ping\ndata: {"type": "ping"}\n\n'),
    ],
)
def test_a_silent_stream_gets_a_sign_of_life_in_its_clients_way(
    form: AnswerForm, told: bytes, *, has_begun: bool
) -> None:
    assert form.sign_of_life("waiting", has_begun=has_begun) == told


@pytest.mark.parametrize(
    ("form", "begins"),
    [(MESSAGE, b"event: error\ndata: "), (RESPONSE, b"event: error\ndata: "), (COMPLETION, b"data: ")],
)
def test_an_error_in_a_stream_has_its_clients_form(form: AnswerForm, begins: bytes) -> None:
    assert form.errors.event(EngineError("it broke")).startswith(begins)


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ({"error": {"message": "no such language", "code": 400}}, 400),
        ({"object": "error", "message": "no such language", "code": 400}, 400),
        ({"type": "error", "error": {"type": "invalid_request_error", "message": "no"}}, 400),
        ({"status": "failed", "error": {"message": "it broke"}}, 502),
    ],
)
def test_an_answer_that_is_an_error_has_its_status(answer: Any, status: int) -> None:
    for form in (OBJECT, RESPONSE, MESSAGE):
        assert form.whole("a", json.dumps(answer).encode(), UNKNOWN).failed_status == status


def test_typed_answers_are_made_of_no_other_form() -> None:
    for form in (RESPONSE, MESSAGE):
        with pytest.raises(EngineError):
            form.assembled("a", b"")
        with pytest.raises(EngineError):
            form.as_events("a", b"{}", withhold=False)
    assert OBJECT.as_events("a", b"{}", withhold=False) is None


@pytest.mark.parametrize("usage", [5, {"input_tokens": "x"}, {"input_tokens": -1, "output_tokens": 10**9}, {}])
def test_no_usage_is_trusted(usage: object) -> None:
    for form, body in (
        (RESPONSE, {"status": "completed", "usage": usage}),
        (MESSAGE, {"stop_reason": "end_turn", "usage": usage}),
    ):
        read = form.whole("a", json.dumps(body).encode(), UsageBounds(1_000, 50)).usage
        assert read is None or (0 <= read.prompt_tokens <= 1_000 and 0 <= read.output_tokens <= 50)
