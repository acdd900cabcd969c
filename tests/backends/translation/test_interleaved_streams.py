"""Whatever an engine's stream looks like, it tells what the whole answer tells, in the grammar of the client's API."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.protocol.plain_events import PlainEvents
from plait.backends.translation.answer_translator import Identity, TurnTranslator
from plait.backends.translation.chat_answer import pieces, read_answer
from plait.backends.translation.messages import MessageTurn
from plait.backends.translation.responses import ResponseTurn
from tests.backends.translation.chat_answers import USAGE, chunk, message, whole
from tests.backends.translation.event_grammars import events, read_message, read_response

IDENTITY = Identity("key", 1_700_000_000)
Read = Callable[[bytes], dict[str, Any]]


def responses() -> TurnTranslator:
    return TurnTranslator(ResponseTurn({"model": "m", "input": "hi"}, IDENTITY))


def messages() -> TurnTranslator:
    return TurnTranslator(MessageTurn({"model": "m", "messages": []}, IDENTITY))


APIS = pytest.mark.parametrize(("api", "read"), [(responses, read_response), (messages, read_message)])

DONE = b"data: [DONE]\n\n"


def sent(*deltas: Any, finish: Any = "stop", usage: Any = USAGE) -> bytes:
    """A stream of these deltas."""
    said = [chunk([{"index": 0, "delta": delta, "finish_reason": None}]) for delta in deltas]
    ending = chunk([{"index": 0, "delta": {}, "finish_reason": finish}])
    return b"".join([*said, ending, chunk([], usage=usage), DONE])


def piece(index: Any = 0, call_id: Any = None, name: Any = None, arguments: Any = None) -> dict[str, Any]:
    """The delta of a piece of a call. What is None is not sent."""
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    call = {"index": index, "id": call_id, "function": function}
    return {"tool_calls": [{key: value for key, value in call.items() if value is not None}]}


def same(api: Callable[[], TurnTranslator], read: Read, streamed: bytes, answer: bytes) -> dict[str, Any]:
    """What the stream and the whole answer tell, which has to be the same."""
    told = read(api().feed(streamed))
    assert told == json.loads(api().whole(answer))
    return told


# Any stream of an OpenAI answer.

ARGUMENTS = st.dictionaries(st.text(max_size=3), st.integers(-9, 9) | st.text(max_size=4), max_size=2).map(json.dumps)
CALLS = st.lists(st.tuples(st.sampled_from(["look", "wait"]), ARGUMENTS), max_size=3)


def cut(draw: st.DrawFn, text: str) -> list[str]:
    """A text in pieces, some of them empty."""
    ends = sorted(draw(st.lists(st.integers(0, len(text)), max_size=3)))
    return [text[begin:end] for begin, end in zip([0, *ends], [*ends, len(text)], strict=True)]


@st.composite
def answers(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """A whole answer, and the events of a stream that says the same: each call's pieces, and the text's, at random.

    What the model thought comes before its text, as all engines have it.
    """
    said = message(draw(st.none() | st.text(max_size=6)), reasoning=draw(st.none() | st.text(max_size=6)))
    calls = draw(CALLS)
    if calls:
        said["tool_calls"] = message(calls=calls)["tool_calls"]
    lanes = [[{key: text} for key in ("reasoning_content", "content") for text in cut(draw, said.get(key) or "")]]
    for index, call in enumerate(said.get("tool_calls", ())):
        arguments, function = cut(draw, call["function"]["arguments"]), call["function"]
        pieces = [piece(index, None, None, text) for text in arguments]
        late = draw(st.integers(0, len(pieces)))
        pieces.insert(late, piece(index, call["id"], function["name"], ""))
        if draw(st.booleans()):
            again = draw(st.sampled_from([call["id"], "", None]))
            pieces.insert(draw(st.integers(late + 1, len(pieces))), piece(index, again, function["name"], ""))
        lanes.append(pieces)
    deltas = []
    while lanes := [lane for lane in lanes if lane]:
        deltas.append(draw(st.sampled_from(lanes)).pop(0))
    finish = draw(st.sampled_from(["stop", "length", "tool_calls"]))
    stream = sent(*deltas, finish=finish)
    return whole(said, finish), [event + b"\n\n" for event in stream.split(b"\n\n")[:-1]]


@APIS
@given(answer=answers(), data=st.data())
def test_any_interleaving_and_cutting_tells_the_same(
    api: Callable[[], TurnTranslator], read: Read, answer: tuple[bytes, list[bytes]], data: st.DataObject
) -> None:
    as_one, stream = answer
    same(api, read, b"".join(stream), as_one)
    translator, written, rest = api(), b"", stream
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        written += translator.feed(b"".join(rest[:count]))
        rest = rest[count:]
    assert written == api().feed(b"".join(stream))


@APIS
@given(texts=st.lists(st.tuples(st.sampled_from(["content", "reasoning_content"]), st.text(max_size=5)), max_size=20))
def test_plain_events_tell_what_decoded_ones_tell(
    api: Callable[[], TurnTranslator], read: Read, texts: list[tuple[str, str]]
) -> None:
    deltas = [{key: text} for key, text in texts]
    stream = [compact(event) for event in sent(*deltas).split(b"\n\n")[:-2]]
    quick, decoding = api(), api()
    decoding._plain = PlainEvents(looks=0)
    told = b"".join(map(quick.feed, [*stream, DONE]))
    assert told == b"".join(map(decoding.feed, [*stream, DONE]))
    assert read(told) == read(api().feed(b"".join([*stream, DONE])))


def compact(event: bytes) -> bytes:
    """An event as servers write it."""
    return b"data: " + msgspec.json.encode(json.loads(event.removeprefix(b"data: "))) + b"\n\n"


ANYTHING: st.SearchStrategy[Any] = (
    st.none()
    | st.booleans()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4)
    | st.lists(st.just({}))
    | st.just({})
)
FIELDS = st.dictionaries(
    st.sampled_from(["content", "reasoning", "reasoning_content", "refusal", "tool_calls", "function_call", "role"]),
    ANYTHING
    | st.lists(st.dictionaries(st.sampled_from(["index", "id", "function", "name", "type", "text"]), ANYTHING)),
    max_size=4,
)


@APIS
@given(
    deltas=st.lists(FIELDS, max_size=3),
    others=st.dictionaries(
        st.sampled_from(["index", "stop_reason", "matched_stop", "logprobs", "finish_reason"]), ANYTHING
    ),
    usage=ANYTHING | st.dictionaries(st.sampled_from(["prompt_tokens", "completion_tokens_details"]), ANYTHING),
)
def test_no_field_of_another_type_fails_a_turn(
    api: Callable[[], TurnTranslator], read: Read, deltas: list[Any], others: dict[str, Any], usage: Any
) -> None:
    read(
        api().feed(b"".join([*(chunk([{"delta": delta, **others}]) for delta in deltas), chunk([], usage=usage), DONE]))
    )
    for delta in deltas:
        answer = json.dumps({"model": 3, "choices": [{"message": delta, **others}], "usage": usage})
        json.loads(api().whole(answer.encode()))


# Streams of engines that were seen.

LOOK, WAIT = ("look", '{"a":1}'), ("wait", '{"b":2}')
BOTH, ONE = whole(message(calls=[LOOK, WAIT]), "tool_calls"), whole(message(calls=[LOOK]), "tool_calls")


@APIS
@pytest.mark.parametrize(
    "deltas",
    [
        pytest.param(
            [
                piece(0, "call_0", "look", ""), piece(1, "call_1", "wait", ""), piece(0, arguments='{"a"'),
                piece(1, arguments='{"b"'), piece(0, arguments=":1}"), piece(1, arguments=":2}"),
            ],
            id="alternating",
        ),
        pytest.param(
            [
                piece(0, "call_0", "look", '{"a":1}'), piece(0, "call_1", None, '{"b"'), piece(0, "call_1", "wait", ""),
                piece(0, None, None, ":2}"),
            ],
            id="all at the index 0, a name that comes late",
        ),
        pytest.param(
            [piece(None, "call_0", *LOOK), piece(None, "call_1", "wait", '{"b"'), piece(None, None, None, ":2}")],
            id="no index",
        ),
        pytest.param([piece(1, "call_1", *WAIT), piece(0, "call_0", *LOOK)], id="the second before the first"),
        pytest.param(
            [{"tool_calls": [{"id": f"call_{at}", "name": name, "arguments": json.loads(arguments)}]}
             for at, (name, arguments) in enumerate((LOOK, WAIT))],
            id="arguments as an object, without a function",
        ),
    ],
)  # fmt: skip
def test_two_calls(api: Callable[[], TurnTranslator], read: Read, deltas: list[Any]) -> None:
    same(api, read, sent(*deltas, finish="tool_calls"), BOTH)


@APIS
@pytest.mark.parametrize(
    "deltas",
    [
        [piece(0, "call_0", "", ""), piece(0, "call_0", *LOOK)],
        [piece(0, None, None, '{"a"'), piece(0, "call_0", "look", ":1}")],
        [piece(0, "call_0", "look", '{"a"'), piece(0, "x7", "look", ":1}")],
        [piece(0, "call_0", "look", '{"a"'), piece(0, "x7", None, ":1"), piece(0, "x8", None, "}")],
        [piece(0, "call_0", "look", ""), piece(0, "x7", *LOOK)],
        [piece(0, "call_0", "look", '{"a"'), piece(0, "x7", "look", ":1}"), piece(0, "x8", "look", "")],
        [piece(0, "call_0", "look", '{"a"'), piece(1, "call_0", "look", ":1}")],
        [piece(0, "call_0", "look", ""), piece(1, "call_0", None, '{"a"'), piece(1, None, None, ":1}")],
        [piece(0, "call_0", "look", "{}"), piece(0, None, None, '{"a"'), piece(0, None, None, ":1}")],
        [piece(0, "call_0", "look", "{}"), piece(0, "call_0", *LOOK)],
        [piece(0, "call_0", "lo", ""), piece(0, "call_0", "ok", ""), piece(0, None, None, '{"a":1}')],
        [piece(0, "call_0", "lo", ""), piece(0, "call_0", *LOOK)],
        [piece(0, "call_0", *LOOK), piece(0, "call_0", *LOOK)],
        [piece(0.0, "call_0", *LOOK), piece("0", "", "look", "")],
        [{"tool_calls": {"id": "call_0", "function": dict(zip(("name", "arguments"), LOOK, strict=True))}}],
    ],
)
def test_one_call(api: Callable[[], TurnTranslator], read: Read, deltas: list[Any]) -> None:
    same(api, read, sent(*deltas, finish="tool_calls"), ONE)


@APIS
@pytest.mark.parametrize(
    "deltas",
    [
        [piece(0, "a", *LOOK), piece(1, "a", *WAIT)],
        [piece(0, "a", *LOOK), piece(0, "a", *WAIT)],
        [piece(None, "a", *LOOK), piece(None, "a", *WAIT)],
        [
            piece(0, "a", "look", ""),
            piece(1, "a", "wait", ""),
            piece(0, None, None, LOOK[1]),
            piece(1, None, None, "{}"),
        ],
    ],
)
def test_calls_of_one_id_get_ids_of_their_own(api: Callable[[], TurnTranslator], read: Read, deltas: list[Any]) -> None:
    told = read(api().feed(sent(*deltas, finish="tool_calls")))
    calls = told.get("output") or told["content"]
    assert [call["name"] for call in calls] == ["look", "wait"]
    assert len({call.get("call_id") or call["id"] for call in calls}) == 2


@APIS
def test_the_calls_of_a_whole_answer_stay_apart(api: Callable[[], TurnTranslator], read: Read) -> None:
    del read
    said = message(calls=[("ping", ""), ("ping", ""), LOOK])
    for call in said["tool_calls"]:
        call["id"] = "same"
    told = json.loads(api().whole(whole(said, "tool_calls")))
    assert [call["name"] for call in told.get("output") or told["content"]] == ["ping", "ping", "look"]


@APIS
def test_numbers_that_json_lacks_fail_no_turn(api: Callable[[], TurnTranslator], read: Read) -> None:
    tokens = [{"token": "a", "logprob": float(value)} for value in ("-inf", "nan", "-1.5")]
    choice = {"index": 0, "logprobs": {"content": tokens}, "finish_reason": "stop"}
    streamed = b"".join([chunk([{**choice, "delta": {"content": "a"}}]), chunk([], usage=USAGE), DONE])
    assert b"NaN" in streamed
    same(api, read, streamed, whole(message("a"), logprobs=choice["logprobs"]))
    [text] = pieces(read_answer(streamed.split(b"\n\n")[0].removeprefix(b"data: ")).choice)
    assert [one["logprob"] for one in getattr(text, "logprobs", ())] == [-9999.0, None, -1.5]


@APIS
def test_a_call_without_a_name_is_left_out(api: Callable[[], TurnTranslator], read: Read) -> None:
    same(api, read, sent({"content": "a"}, piece(0, "call_0", None, "{}"), finish="tool_calls"), whole(message("a")))


@APIS
def test_nothing_of_a_call_is_told_before_the_answer_ends(api: Callable[[], TurnTranslator], read: Read) -> None:
    stream = sent(piece(0, "call_0", *LOOK), {"content": "text"}, piece(1, "call_1", *WAIT), finish="tool_calls")
    translator = api()
    begun = translator.feed(stream.removesuffix(DONE))
    assert b"look" not in begun
    assert b'"text"' in begun
    told = read(begun + translator.feed(DONE))
    assert [b"look" in json.dumps(item).encode() for item in (told.get("output") or told["content"])] == [
        False,
        True,
        False,
    ]


@APIS
def test_a_long_call_gives_signs_of_life(api: Callable[[], TurnTranslator], read: Read) -> None:
    long = json.dumps({"a": "x" * 4_000})
    cuts = [piece(0, "call_0", "look"), *(piece(0, arguments=long[at : at + 100]) for at in range(0, len(long), 100))]
    written = api().feed(sent(*cuts))
    assert 5 < sum(event["type"] in ("ping", "keepalive") for event in events(written)) < 10
    read(written)


@APIS
@pytest.mark.parametrize(
    "content",
    [
        [{"type": "text", "text": "a "}, {"type": "output_text", "text": "cat"}],
        ["a ", {"text": "cat"}],
        {"type": "text", "text": "a cat"},
        [{"type": "thinking", "thinking": []}, {"type": "text", "text": ["a ", "cat"]}, {"type": "image_url"}],
    ],
)
def test_content_in_parts(api: Callable[[], TurnTranslator], read: Read, content: Any) -> None:
    same(api, read, sent({"content": content}), whole(message("a cat")))
    assert json.loads(api().whole(whole({"content": content}))) == json.loads(api().whole(whole(message("a cat"))))


@APIS
def test_thoughts_in_parts(api: Callable[[], TurnTranslator], read: Read) -> None:
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}
    same(api, read, sent({"content": [thought]}, {"content": "a"}), whole(message("a", reasoning="hm")))


@APIS
def test_thoughts_amid_text_keep_their_place(api: Callable[[], TurnTranslator], read: Read) -> None:
    told = read(api().feed(sent({"content": "a"}, {"reasoning": "hm"}, {"content": "b"})))
    kinds = [item["type"] for item in (told.get("output") or told["content"])]
    assert kinds in (["message", "reasoning", "message"], ["text", "thinking", "text"])


@APIS
@pytest.mark.parametrize("finish", ["stop", {"type": "stop"}, {"type": "stop", "matched": 7}])
def test_reasons_to_finish(api: Callable[[], TurnTranslator], read: Read, finish: Any) -> None:
    same(api, read, sent({"content": "a"}, finish=finish), whole(message("a")))


def test_a_call_that_is_cut_off() -> None:
    stream = sent(piece(0, "call_0", "look", '{"a":'), finish="length")
    [item] = read_response(responses().feed(stream))["output"]
    assert (item["status"], item["arguments"]) == ("incomplete", '{"a":')
    message_told = read_message(messages().feed(stream))
    assert (message_told["content"][0]["input"], message_told["stop_reason"]) == ({}, "max_tokens")


def test_a_call_without_arguments_has_an_empty_object() -> None:
    stream = sent(piece(0, "call_0", "look"), finish="tool_calls")
    assert read_response(responses().feed(stream))["output"][0]["arguments"] == "{}"
