from __future__ import annotations

from typing import Any

import msgspec
import pytest

from plait.backends.errors import CallerError
from plait.backends.protocol.client_bodies import mended
from plait.backends.protocol.openai import ChatRequest, parse_request

HI = b'"messages":[{"role":"user","content":"hi %b"}]'


def test_a_body_that_can_be_decoded_is_what_came() -> None:
    body = b"{%b}" % HI % rb"\ud83d\ude00"
    request, same = mended(parse_request, body, ChatRequest)
    assert same is body
    assert request.messages[0]["content"] == "hi 😀"


@pytest.mark.parametrize(
    ("body", "better"),
    [
        (b"{%b}" % HI % rb"\ud83d!", {"messages": [{"role": "user", "content": "hi \ufffd!"}]}),
        (b'{"model":null,%b}' % HI % b"", {"messages": [{"role": "user", "content": "hi "}]}),
        (
            b'{"model": null,%b,"x":"\\udc00"}' % HI % b"",
            {"messages": [{"role": "user", "content": "hi "}], "x": "\ufffd"},
        ),
    ],
)
def test_what_is_plainly_meant_is_read_and_sent_so(body: bytes, better: Any) -> None:
    request, sent = mended(parse_request, body, ChatRequest)
    assert request.model == ""
    assert request.messages == better["messages"]
    assert msgspec.json.decode(sent) == better


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"model":7,%b}' % HI % b"", "model"),
        (b'{"model":null,"messages":7}', "messages"),
        (b'{"model":null,%b' % HI % b"", "model"),
        (b"{%b" % HI % rb"\ud83d", None),
    ],
)
def test_other_faults_are_told(body: bytes, param: str | None) -> None:
    with pytest.raises(CallerError) as caught:
        mended(parse_request, body, ChatRequest)
    assert caught.value.param == param
