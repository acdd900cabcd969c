"""The events of a response in the background do not depend on the engine's cuts, and are made again of the response."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.protocol.api_errors import Event, write_event
from plait.backends.translation.answer_translator import Identity, Part, TurnTranslator
from plait.backends.translation.background_turn import BackgroundTurn, replayed
from tests.backends.translation.chat_answers import chunk, error, message, stream
from tests.backends.translation.event_grammars import events
from tests.backends.translation.test_streams import RESPONSE_EVENT

LOGPROBS = [{"token": token, "logprob": -0.5, "bytes": list(token.encode()), "top_logprobs": []} for token in "abc"]
TOOLS = [{"type": "function", "name": "look", "parameters": {}}, {"type": "custom", "name": "write"}]


def told(parts: list[bytes], *, cancelled: bool = False, **fields: Any) -> tuple[list[Any], dict[str, Any]]:
    """The events of a response, and the response."""
    turn = BackgroundTurn({"model": "m", "input": "hi", "background": True, **fields}, Identity("k", 5))
    written = b"".join(map(write_event, turn.queue()))
    translator = TurnTranslator(turn)
    written += b"".join(map(translator.feed, parts))
    if cancelled:
        written += b"".join(map(write_event, turn.cancel()))
    assert turn.is_over
    return events(written), turn.answer()


def again(response: dict[str, Any]) -> list[Any]:
    return events(b"".join(map(write_event, replayed(response))))


@given(
    st.text(max_size=40),
    st.text(max_size=20),
    st.lists(st.sampled_from([("look", '{"a": 1}'), ("write", '{"input": "x"}')]), max_size=2),
    st.integers(1, 50),
    st.sampled_from(["stop", "length"]),
)
def test_they_do_not_depend_on_the_cuts(
    content: str, reasoning: str, calls: list[Any], size: int, finish_reason: str
) -> None:
    said = message(content, reasoning=reasoning, calls=calls)
    first, response = told(stream(said, finish_reason), tools=TOOLS)
    assert told(stream(said, finish_reason, size=size), tools=TOOLS) == (first, response)
    assert [event["sequence_number"] for event in first] == list(range(len(first)))
    assert first[-1]["response"] == response
    assert again(response) == first
    for event in first:
        RESPONSE_EVENT.validate_python(event)


def test_a_token_with_logprobs_is_an_event() -> None:
    each = [
        chunk([{"index": 0, "delta": {"content": one["token"]}, "logprobs": {"content": [one]}}]) for one in LOGPROBS
    ]
    at_once = chunk([{"index": 0, "delta": {"content": "abc"}, "logprobs": {"content": LOGPROBS}}])
    first, response = told([*each, b"data: [DONE]\n\n"], top_logprobs=1)
    assert told([at_once, b"data: [DONE]\n\n"], top_logprobs=1) == (first, response)
    assert [event["delta"] for event in first if event["type"] == "response.output_text.delta"] == ["a", "b", "c"]
    assert again(response) == first


def test_the_events_of_a_long_text_are_made_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = chunk([{"index": 0, "delta": {"content": "abc" * 1000}, "logprobs": {"content": LOGPROBS * 1000}}])
    _, response = told([at_once, b"data: [DONE]\n\n"], top_logprobs=1)
    made, take = list[int](), BackgroundTurn.take

    def counted(turn: BackgroundTurn, part: Part) -> Iterable[Event]:
        taken = list(take(turn, part))
        made.append(len(taken))
        return taken

    monkeypatch.setattr(BackgroundTurn, "take", counted)
    assert len(list(replayed(response))) > 3000
    assert max(made) == 3  # the first begins the item and its content


@pytest.mark.parametrize("parts", [[], stream(message("a text of some length"))[:4]], ids=["queued", "begun"])
def test_one_that_was_cancelled_has_no_event_for_that(parts: list[bytes]) -> None:
    found, response = told(parts, cancelled=True)
    assert response["status"] == "cancelled"
    assert [event["type"] for event in found][:3] == ["response.created", "response.queued", "response.in_progress"]
    assert found[-1]["type"] == ("response.output_item.done" if parts else "response.in_progress")
    assert again(response) == found


def test_one_that_failed_says_so_twice_as_others_do() -> None:
    found, response = told([*stream(message("a text of some length"))[:4], error()])
    assert [event["type"] for event in found][-2:] == ["response.failed", "error"]
    assert [event["type"] for event in again(response)] == [event["type"] for event in found]
    assert again(response)[-2] == found[-2]


def test_signs_of_life_have_no_number() -> None:
    parts = stream(message("a text of some length"))
    found, _ = told([b": waiting\n\n", *parts[:3], b": waiting\n\n", *parts[3:]])
    assert found == told(parts)[0]
