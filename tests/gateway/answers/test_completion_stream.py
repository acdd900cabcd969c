"""Streams on their way through: whatever the chunks, the same bytes go out and the same usage is read."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plait.backends.errors import EngineError, EngineGarbledError
from plait.backends.protocol.plain_events import PlainEvents
from plait.gateway.answers import completions
from plait.gateway.answers.completions import CompletionStream, UsageBounds
from plait.gateway.fleet.booking import CallUsage

USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 7,
    "total_tokens": 107,
    "prompt_tokens_details": {"cached_tokens": 64},
}
READ = CallUsage(100, 7, 64)
TEXTS = st.sampled_from(("hello", '"usage":', '{"usage": 3}', "\n\n", "data: x", "ü", ""))


def data(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode()


def content(text: str, **more: Any) -> bytes:
    return data({"id": "x", "choices": [{"index": 0, "delta": {"content": text}}], **more})


ONLY_USAGE = data({"id": "x", "choices": [], "usage": USAGE})
PLAIN_EVENTS = st.one_of(
    TEXTS.map(content),
    TEXTS.map(lambda text: content(text, usage=None)),
    st.sampled_from(
        (
            b"data: [DONE]",
            b": keep-alive",
            b"event: error\ndata: {}",
            b'data: {"usage": {"prompt_tokens": ',  # cut off
            b'data: not JSON, but "usage": it says',
            b'data: {"usage": null, "choices": []}',
        )
    ),
)
COUNTING_EVENTS = st.integers(0, 9).map(lambda n: (content("x", usage={**USAGE, "completion_tokens": n}), n))
SEPARATORS = st.sampled_from((b"\n\n", b"\r\n\r\n", b"\n\n\n", b"\r\n\n"))


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, bytes, CallUsage | None]:
    """A stream, what of it goes out if the usage-only events are withheld, and the last usage in it."""
    stream, kept, usage = b"", b"", None
    for _ in range(draw(st.integers(0, 6))):
        kind, end = draw(st.sampled_from(("plain", "plain", "counting", "usage"))), draw(SEPARATORS)
        if kind == "counting":
            event, tokens = draw(COUNTING_EVENTS)
            usage = CallUsage(100, tokens, 64)
        elif kind == "usage":
            event, usage = ONLY_USAGE, READ
        else:
            event = draw(PLAIN_EVENTS)
        stream += event + end
        # Of three line ends, the third is no part of the event.
        kept += event + end if kind != "usage" else b"\n" if end == b"\n\n\n" else b""
    tail = draw(st.sampled_from((b"", b"data: {", b"\n")))
    return stream + tail, kept + tail, usage


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    cuts = sorted({place % (len(stream) + 1) for place in places} | {0, len(stream)})
    return [stream[start:end] for start, end in pairwise(cuts)]


@given(streams(), st.lists(st.integers(0, 5_000), max_size=12), st.booleans())
@example((ONLY_USAGE + b"\n\n\n", b"\n", READ), [], True)
def test_chunks_change_nothing(
    stream: tuple[bytes, bytes, CallUsage | None], places: list[int], withhold: bool
) -> None:
    sent, kept, usage = stream
    tap = CompletionStream("a", withhold=withhold)
    out = [tap.feed(chunk) for chunk in cut(STOP + sent, places)]
    expected = STOP + (kept if withhold else sent)
    assert b"".join(out) + tap.end() in {expected, expected + DONE, expected + b"\n\n" + DONE}
    assert tap.usage == usage


@given(streams())
def test_byte_by_byte(stream: tuple[bytes, bytes, CallUsage | None]) -> None:
    sent, kept, usage = stream
    tap, sent, kept = CompletionStream("a", withhold=True), STOP + sent, STOP + kept
    out = b"".join(tap.feed(sent[place : place + 1]) for place in range(len(sent)))
    assert out + tap.end() in {kept, kept + DONE, kept + b"\n\n" + DONE}
    assert tap.usage == usage


def test_only_whole_events_go_out() -> None:
    tap = CompletionStream("a", withhold=False)
    assert tap.feed(b"data: 1\n\nda") == b"data: 1\n\n"
    assert tap.feed(b"ta: 2\n") == b""
    assert tap.feed(b"\ndata: 3\r\n\r") == b"data: 2\n\n"
    assert tap.feed(b"\n") == b"data: 3\r\n\r\n"
    assert tap.end() == b""


def test_the_end_brings_what_is_no_whole_event_once() -> None:
    tap = CompletionStream("a", withhold=True)
    assert tap.feed(b"data: cut") == b""
    assert (tap.end(), tap.end()) == (b"data: cut", b"")


def test_an_event_whose_text_speaks_of_usage_is_text() -> None:
    tap = CompletionStream("a", withhold=True)
    event = content('"usage":{"prompt_tokens":1}') + b"\n\n"
    assert tap.feed(event) == event
    assert tap.usage is None


def test_the_last_usage_counts() -> None:
    tap = CompletionStream("a", withhold=True)
    for tokens in (1, 2, 3):
        tap.feed(content("x", usage={**USAGE, "completion_tokens": tokens}) + b"\n\n")
    assert tap.usage == CallUsage(100, 3, 64)


def test_an_event_without_an_end_is_read_in_linear_time_up_to_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = CompletionStream("a", withhold=False)
    for _ in range(1_000):
        assert stream.feed(b"x" * 10_000) == b""
    monkeypatch.setattr(completions, "MAX_EVENT_BYTES", 10_000_000)
    with pytest.raises(EngineGarbledError, match=r"engine a sent an event of over 10000000 bytes"):
        stream.feed(b"x")


def test_an_event_in_small_pieces_is_read_up_to_the_memory_that_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "MAX_EVENT_BYTES", 100 * (completions.PIECE_BYTES + 2))
    stream = CompletionStream("a", withhold=False)
    for _ in range(100):
        assert stream.feed(b"ab") == b""
    with pytest.raises(EngineGarbledError, match="engine a sent an event of over 6600 bytes in memory"):
        stream.feed(b"ab")


# How it ended.

STOP = data({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}) + b"\n\n"
SECOND = data({"choices": [{"index": 1, "text": "", "finish_reason": "length"}]}) + b"\n\n"
OPEN = data({"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None}]}) + b"\n\n"
ABORT = data({"choices": [{"index": 0, "finish_reason": "abort"}]}) + b"\n\n"
BEGUN = data({"choices": [{"index": 1, "text": "x", "finish_reason": None}]}) + b"\n\n"
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("stream", "choices", "problem"),
    [
        (OPEN + STOP + DONE, 1, None),
        (OPEN + STOP + ONLY_USAGE + b"\n\n" + DONE, 1, None),
        (STOP + SECOND + DONE, 2, None),
        (STOP + b"data: [DONE]", 1, None),
        (STOP + b"data:[DONE]\r\n\r\n", 1, None),
        (OPEN + DONE, 1, "engine a ended its answer with no finish reason"),
        (b"", 1, "engine a ended its answer with no finish reason"),
        (STOP + DONE, 2, None),
        (OPEN + STOP, 1, None),
        (OPEN + STOP.rstrip(), 1, None),
        (STOP + BEGUN + DONE, 2, "engine a ended its answer with 1 finish reasons for 2 choices"),
        (BEGUN + SECOND, 2, None),
        (OPEN + data({"object": "error", "message": "dead", "code": 500}) + b"\n\n" + DONE, 1, "engine a: dead"),
        (OPEN + ABORT + DONE, 1, "engine a gave the call up: its finish reason is 'abort'"),
        (content('"finish_reason":"stop"') + b"\n\n" + DONE, 1, "engine a ended its answer with no finish reason"),
        (OPEN + data({"error": {"message": "dead", "code": 500}}) + b"\n\n" + DONE, 1, "engine a: dead"),
        (OPEN + data({"error": "dead"}) + b"\n\n", 1, "engine a: dead"),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_whole_answer_has_its_endings(stream: bytes, choices: int, problem: str | None, size: int) -> None:
    tap, out = CompletionStream("a", withhold=True, choices=choices), b""
    for start in range(0, len(stream), size):
        out += tap.feed(stream[start : start + size])
    out += tap.end()
    found = tap.problem
    assert (b"[DONE]" in out) == (problem is None or (b"[DONE]" in stream and b"dead" in out))
    assert (None if found is None else isinstance(found, EngineError) and found.message) == problem


def test_an_error_that_is_the_callers_is_told_apart() -> None:
    tap = CompletionStream("a", withhold=False)
    tap.feed(data({"error": {"message": "too long", "code": 400}}) + b"\n\n" + DONE)
    assert tap.problem == "too long"


def test_a_usage_that_cannot_be_is_corrected_and_one_without_numbers_is_none() -> None:
    tap = CompletionStream("a", withhold=True, bounds=UsageBounds(1_000, 50))
    assert tap.feed(data({"choices": [], "usage": {"prompt_tokens": -3, "completion_tokens": 1e14}}) + b"\n\n") == b""
    assert (tap.usage, tap.usage_corrected) == (CallUsage(0, 50), True)
    assert tap.feed(data({"choices": [], "usage": {"prompt_tokens": "many"}}) + b"\n\n") == b""
    assert (tap.usage, tap.usage_corrected) == (None, True)


# What clients could not read.


def test_an_event_with_empty_data_is_none() -> None:
    tap = CompletionStream("a", withhold=False)
    assert tap.feed(b"data: \n\n") == tap.feed(b"event: x\r\ndata:\r\n\r\n") == b""
    assert tap.feed(b"data:\n\n" + OPEN + b"data: \n\n" + STOP + b": on\ndata:\n\n") == OPEN + STOP + b": on\n\n"
    assert tap.feed(OPEN + b"data:\n\n" + STOP + DONE) == OPEN + STOP + DONE
    lines = b'data: {"a":\ndata:\ndata: 1}\ndata:\n\n'
    assert tap.feed(lines) == lines


@given(st.lists(st.sampled_from(("a", "\ud83d", "\ude00", "\\ud83d", "ü", "😀")), max_size=6), st.integers(1, 200))
def test_half_a_pair_is_a_replacement_unless_the_next_event_has_the_other_half(texts: list[str], size: int) -> None:
    raw = b"".join([b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n" for text in texts])
    tap, out = CompletionStream("a", withhold=False), b""
    for start in range(0, len(raw), size):
        out += tap.feed(raw[start : start + size])
    out += tap.end()
    read = [json.loads(event.removeprefix(b"data: "))["choices"][0]["text"] for event in out.split(b"\n\n")[:-1]]
    assert len(read) == len(texts)
    assert "".join(read) == "".join(texts).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_a_byte_order_mark_hides_no_text(size: int) -> None:
    for sent, expected in ((OPEN + STOP + DONE, OPEN + STOP + DONE), (STOP.rstrip(), STOP.rstrip() + b"\n\n" + DONE)):
        tap, marked = CompletionStream("a", withhold=True), BOM_UTF8 + sent
        out = b"".join(tap.feed(marked[start : start + size]) for start in range(0, len(marked), size))
        assert out + tap.end() == expected
        assert tap.problem is None


def test_an_error_at_the_top_level_becomes_one_that_sdks_know() -> None:
    tap = CompletionStream("a", withhold=True)
    out = tap.feed(data({"object": "error", "message": "too long", "type": "BadRequestError", "code": 400}) + b"\n\n")
    error = {"message": "too long", "type": "BadRequestError", "param": None, "code": 400}
    assert json.loads(out.removeprefix(b"data: ")) == {"error": error}
    assert (tap.error, tap.end()) == ("too long", b"")


def compact(text: str, key: str, **more: Any) -> bytes:
    delta = {"delta": {"content": text}} if key == "content" else {"text": text}
    body = {"id": "x", "choices": [{"index": 0, **delta, "finish_reason": None, **more}], "usage": None}
    return b"data: %b\n\n" % json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


PIECES = st.sampled_from(
    ("a", " word", "", 'a "quoted" word', "\\", "\n", "ü", "퟿", '"},"finish_reason":"stop"', "[DONE]", "data:")
)


@given(
    st.lists(st.tuples(PIECES, st.sampled_from((None, None, None, "stop"))), max_size=12),
    st.sampled_from(("content", "text")),
)
def test_events_that_differ_in_their_texts_are_read_as_if_each_was_looked_at(
    events: list[tuple[str, str | None]], key: str
) -> None:
    chunks = [compact(text, key, finish_reason=finish) for text, finish in events]
    chunks += [b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n", DONE]
    quick, whole = (CompletionStream("a", withhold=True) for _ in range(2))
    whole._plain = PlainEvents(looks=0)
    assert [quick.feed(chunk) for chunk in chunks] == [whole.feed(chunk) for chunk in chunks]
    for tap in (quick, whole):
        tap.end()
    assert (quick.usage, quick.finish, str(quick.problem)) == (whole.usage, whole.finish, str(whole.problem))
    assert quick.usage == READ


def test_events_after_a_plain_one_are_passed_on_without_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    tap, looks = CompletionStream("a", withhold=True), list[bytes]()

    def says_more(events: bytes) -> bool:
        looks.append(events)
        return False

    monkeypatch.setattr(tap, "_says_more", says_more)
    for number in range(50):
        event = compact(f" word {number}", "content")
        assert tap.feed(event) is event
    assert len(looks) == 2
