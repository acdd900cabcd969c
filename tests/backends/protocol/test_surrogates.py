from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plait.backends.protocol.surrogates import events_with_whole_pairs, may_go_on, with_whole_pairs

PIECES = st.lists(st.sampled_from(["\ud83d", "\ude00", "\\", '"', "u", "ud83d", "a", "é", "\n", "\u2028", "😀"]))


def with_whole_characters(text: str) -> str:
    """What Python makes of a text: pairs are characters, halves are U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@given(PIECES)
@example(["\\", "ud83d", "\ude00"])
def test_each_half_is_a_replacement_and_all_else_stays(pieces: list[str]) -> None:
    text = "".join(pieces)
    document = json.dumps({text: [text]}).encode()
    mended = with_whole_pairs(document)
    assert msgspec.json.decode(mended) == {with_whole_characters(text): [with_whole_characters(text)]}
    assert len(mended) == len(document)
    assert with_whole_pairs(mended) == mended


WHOLE = [
    rb'"\ud83d\ude00"', rb'"\uD83D\uDE00"', rb'"\\ud83d"', rb'"\\\\ude00"', rb'"\u00d8"', b'"\xed\x95\x9c"', b"",
    b"\xff\xff\\ud83d",
]  # fmt: skip


@pytest.mark.parametrize("document", WHOLE)
def test_a_document_without_halves_stays(document: bytes) -> None:
    assert with_whole_pairs(document) == document


def test_halves_in_bytes_are_replaced() -> None:
    assert with_whole_pairs('"\ud83d 한"'.encode("utf-8", "surrogatepass")) == '"\ufffd 한"'.encode()
    assert with_whole_pairs(bytearray(rb'"\ud83d"')) == rb'"\ufffd"'


def events(*texts: str, end: str = "\n\n", name: str = "") -> bytes:
    """Events with these texts as their deltas."""
    datas = [json.dumps({"choices": [{"delta": {"content": text}, "finish_reason": None}]}) for text in texts]
    return "".join([f"{name}data: {data}{end}" for data in datas]).encode()


@pytest.mark.parametrize(
    ("texts", "mended"),
    [
        (["a\ud83d", "\ude00b"], ["a", "😀b"]),
        (["\ud83d", "\ude00\ud83d", "\ude00"], ["", "😀", "😀"]),
        (["\\ud83d", "\ude00"], ["\\ud83d", "\ufffd"]),
        (["\ud83d", "b\ude00"], ["\ufffd", "b\ufffd"]),
        (["\ud83d", "b", "\ude00"], ["\ufffd", "b", "\ufffd"]),
        (["\ud83d", ""], ["\ufffd", ""]),
    ],
)
@pytest.mark.parametrize(("end", "name"), [("\n\n", ""), ("\r\n\r\n", "event: x\r\n")])
def test_a_pair_that_two_events_part_comes_with_the_second(texts: Any, mended: Any, end: str, name: str) -> None:
    lines = events_with_whole_pairs(events(*texts, end=end, name=name)).splitlines()
    datas = [json.loads(line[6:]) for line in lines if line.startswith(b"data: ")]
    assert [data["choices"][0]["delta"]["content"] for data in datas] == mended


def test_an_event_may_go_on_if_a_text_ends_with_the_first_half() -> None:
    assert may_go_on(events("a\ud83d"))
    assert not any(may_go_on(events(text)) for text in ("\ud83da", "\ude00", "\\ud83d", "a", ""))
