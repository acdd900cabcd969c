"""Plain events: a text is told without decoding, or nothing is."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.protocol.plain_events import LOOKS, PlainEvents

KEYS = ("content", "reasoning", "reasoning_content", "text")


def event(text: str, key: str = "content", **more: Any) -> bytes:
    delta: dict[str, Any] = {"index": 0, "delta": {key: text}, "finish_reason": None, **more}
    return b"data: " + msgspec.json.encode({"id": "c", "choices": [delta]}) + b"\n\n"


@given(st.sampled_from(KEYS), st.lists(st.text(max_size=8)), st.data())
def test_a_text_is_the_decoded_one(key: str, texts: list[str], data: st.DataObject) -> None:
    known = PlainEvents()
    assert known.text(event("a", key)) is None
    assert known.learn(event("a", key))
    for text in texts:
        sent = event(text, data.draw(st.sampled_from((key, *KEYS))))
        found = known.text(sent)
        assert found is None or found == json.loads(sent.removeprefix(b"data: "))["choices"][0]["delta"][key]
        is_plain = sent == event(text, key) and msgspec.json.encode(text) == f'"{text}"'.encode()
        assert (found is not None) == is_plain


@pytest.mark.parametrize(
    "other",
    [
        b"",
        b": waiting\n\n",
        event("a") + event("b"),
        event("a")[:-1],
        event("a", finish_reason="stop"),
        event("a", logprobs={"content": []}),
        event("a").replace(b':"a"', b':"\xed\xa0\xbd"'),
        event("a").replace(b':"a"', b':"\xff"'),
        event("a").replace(b':"a"', b':"\\ud83d"'),
    ],
)
def test_any_other_bytes_have_no_text(other: bytes) -> None:
    known = PlainEvents()
    known.learn(event("a"))
    assert known.text(other) is None
    assert known.text(event("b")) == "b", "the example stays"


def test_an_example_has_the_text_that_was_decoded() -> None:
    known = PlainEvents()
    assert not known.learn(event("a"), "b")
    assert not known.learn(event("a", "refusal"))
    assert known.text(event("a")) is None
    assert known.learn(event("a"), "a")
    assert known.learn(event("a", "reasoning")), "a thought is followed by an answer"
    assert (known.text(event("b", "reasoning")), known.text(event("b"))) == ("b", None)
    assert known.looks == LOOKS - 4
    assert not known.learn(
        event("a", "reasoning").replace(b'"reasoning":"a"', b'"reasoning":"a","reasoning_content":"a"')
    )
    assert known.looks == LOOKS - 4, "an answer has to be looked at yet"
