"""A completion's text as it is read out of answers, and answers that have none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from plait.gateway.answers.completion_text import TextTap


def read(*pieces: bytes, stream: bool = True) -> tuple[list[str], str | None]:
    texts: list[str] = []
    tap = TextTap(texts.append)
    for piece in pieces:
        (tap.feed if stream else tap.whole)(piece)
    return texts, tap.problem


def event(body: Any, end: bytes = b"\n\n") -> bytes:
    return b"data: " + json.dumps(body).encode() + end


def chat(text: str | None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text, **more}}]}


def test_a_streamed_chat() -> None:
    role = event(chat("", role="assistant"))
    end = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}) + event({"choices": [], "usage": {}})
    pieces = [role, event(chat("one\n")) + event(chat(" two"), b"\r\n\r\n"), b": comment\n\n", end, b"data: [DONE]\n\n"]
    assert read(*pieces) == (["one\n two"], None), "one text for what came together"


def test_a_streamed_text() -> None:
    assert read(event({"choices": [{"text": "one"}]}), event({"choices": [{"text": " two"}]})) == (
        ["one", " two"],
        None,
    )


@pytest.mark.parametrize(
    ("choice", "texts", "problem"),
    [
        ({"message": {"content": "one"}}, ["one"], None),
        ({"text": "one"}, ["one"], None),
        ({"message": {"content": ""}}, [], None),
        ({"message": {"content": None, "tool_calls": []}}, [], "its answer has no text"),
    ],
)
def test_a_whole_answer(choice: Any, texts: list[str], problem: str | None) -> None:
    assert read(json.dumps({"choices": [choice]}).encode(), stream=False) == (texts, problem)


def test_a_stream_that_calls_a_tool_has_no_text() -> None:
    assert read(event(chat(None, tool_calls=[{"index": 0}])), b"data: [DONE]\n\n") == ([], "its answer has no text")


@pytest.mark.parametrize("body", [b"<html>", b'{"choices": "none"}', b"\xff"])
def test_what_is_no_completion(body: bytes) -> None:
    assert read(body, stream=False)[1] == "its answer is not a completion"


@pytest.mark.parametrize(("reason", "was_cut"), [("length", True), ("stop", False), ({"type": "length"}, False)])
def test_a_text_that_ended_at_its_length_limit_was_cut(reason: object, was_cut: bool) -> None:
    tap = TextTap(lambda _: None)
    tap.feed(event({"choices": [{"text": "one", "finish_reason": None}]}))
    tap.feed(event({"choices": [{"text": "", "finish_reason": reason}]}))
    assert (tap.was_cut, tap.problem) == (was_cut, None)


@pytest.mark.parametrize(
    ("pieces", "received"),
    [
        ([" x", " = 1"], ["x", " = 1"]),
        ([" ", "x"], ["x"]),
        (["", "  x"], [" x"]),
        (["x", " y"], ["x", " y"]),
        (["\n x"], ["\n x"]),
    ],
)
def test_a_space_at_the_beginning_that_was_in_the_prompt_is_left_out(pieces: list[str], received: list[str]) -> None:
    texts: list[str] = []
    tap = TextTap(texts.append, space=" ")
    for piece in pieces:
        tap.feed(b"data: " + json.dumps({"choices": [{"text": piece}]}).encode() + b"\n\n")
    assert texts == received
    assert tap.problem is None


@pytest.mark.parametrize("stream", [False, True])
def test_content_in_parts_is_read_without_its_thoughts(stream: bool) -> None:
    content = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a "}, {"type": "text", "text": "cat"}]
    body = json.dumps({"choices": [{"delta" if stream else "message": {"content": content}}]}).encode()
    assert read(b"data: " + body + b"\n\n" if stream else body, stream=stream) == (["a cat"], None)
