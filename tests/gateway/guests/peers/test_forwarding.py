"""A request that goes to another gateway, and its answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from starlette.types import Message

from plait.backends.errors import PeerUnavailableError
from plait.gateway.guests.peers.forwarding import Forwarding
from plait.gateway.guests.peers.membership import UnreachableStoreError
from plait.gateway.guests.peers.peers import Peers
from plait.gateway.guests.peers.signatures import PeerKey
from plait.gateway.others import Checked, Forwarded
from plait.gateway.streams import StreamKey

WHOLE = b"HTTP/1.1 201 Created\r\ndate: today\r\ncontent-type: text/plain\r\ncontent-length: 4\r\n\r\nhere"
BROKEN = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 9\r\n\r\nhere"
BROKEN_STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n"
)
KEYS = [(b"authorization", b"Bearer k"), (b"x-api-key", b"k"), (b"api-key", b"k")]
HEADERS = [(b"origin", b"http://page"), *KEYS, (b"host", b"public"), (b"accept", b"*/*")]
REQUEST = Forwarded("POST", "/v1/get?x=1", HEADERS, Checked("api_keys", "tenant"), b"{}")
KEY = PeerKey("the-secret-of-all-gateways")


class Peer:
    """Another gateway: notes the heads of requests, and answers each with the same bytes before it closes."""

    def __init__(self, answer: bytes) -> None:
        self.heads: list[bytes] = []
        self._answer = answer

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(self._answer)
        writer.close()


class Unreachable:
    """A membership whose store is out of reach."""

    async def holder(self, _stream: StreamKey) -> str | None:
        raise UnreachableStoreError


@asynccontextmanager
async def forwarding(*answers: bytes) -> AsyncIterator[tuple[Forwarding, Peer]]:
    """Gateway 0 and the others, of which each has one answer. Yields the first of these, too."""
    peers, urls = [Peer(answer) for answer in answers], {"0": ""}
    async with AsyncExitStack() as servers:
        for number, peer in enumerate(peers, 1):
            server = await servers.enter_async_context(await asyncio.start_server(peer.serve, "127.0.0.1", 0))
            urls[str(number)] = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        made = Forwarding(Peers(urls, "0", KEY))
        yield made, peers[0]
        await made.aclose()


async def sent(made: Forwarding, request: Forwarded = REQUEST) -> list[Message]:
    """The messages of an answer to a request."""
    messages: list[Message] = []

    async def keep(message: Message) -> None:
        messages.append(message)

    async def stays() -> Any:
        await asyncio.Event().wait()

    await made.forward("1", request, stays, keep)
    return messages


async def test_a_request_passes_without_its_key_and_the_answer_without_what_is_of_a_hop() -> None:
    async with forwarding(WHOLE) as (made, peer):
        start, *rest = await sent(made)
    (head,) = peer.heads
    assert head.startswith(b"POST /v1/get?x=1 HTTP/1.1\r\n")
    assert b"accept: */*\r\n" in head
    for left_out in (b"authorization", b"api-key", b"Bearer", b"public", b"origin", b"the-secret"):
        assert left_out not in head
    headers = [(b"content-type", b"text/plain"), (b"content-length", b"4")]
    assert start == {"type": "http.response.start", "status": 201, "headers": headers}
    assert b"".join(message["body"] for message in rest) == b"here"
    assert not rest[-1].get("more_body", False)


async def test_a_key_that_is_for_engines_passes_and_no_other() -> None:
    async with forwarding(WHOLE) as (made, peer):
        for checked in (Checked("api_keys"), Checked("admin_key"), Checked("metrics_key"), Checked("api_keys", "t")):
            await sent(made, REQUEST._replace(checked=checked))
    has_key = [b"authorization: Bearer k\r\n" in head for head in peer.heads]
    assert has_key == [True, False, False, False], "an open gateway checks none"


async def test_a_stream_that_breaks_off_ends_with_an_error_event() -> None:
    async with forwarding(BROKEN_STREAM) as (made, _):
        _, *rest = await sent(made)
    assert rest[0]["body"] == b"data: 1\n\n"
    assert b"gateway_unavailable" in rest[-1]["body"]
    assert not rest[-1].get("more_body", False)


async def test_an_answer_that_breaks_off_does_not_look_whole() -> None:
    async with forwarding(BROKEN) as (made, _):
        *_, last = await sent(made)
    assert last["more_body"]


async def test_a_gateway_that_does_not_answer_is_said_to_be_unavailable() -> None:
    async with forwarding(b"") as (made, _):
        with pytest.raises(PeerUnavailableError) as raised:
            await sent(made)
    assert (raised.value.status, raised.value.retry_after_s) == (503, 1.0)


THERE, NOT_THERE, RECOVERING, SILENT = (
    b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
    b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
    b"HTTP/1.1 503 Recovering\r\ncontent-length: 0\r\n\r\n",
    b"",
)
RESPONSES = [StreamKey("response", "t", f"resp_{number}") for number in range(9)]


@pytest.mark.parametrize(
    ("answers", "wanted"),
    [
        ([THERE, NOT_THERE], "1"),
        ([NOT_THERE, THERE], "2"),
        ([NOT_THERE, NOT_THERE], None),
        ([RECOVERING, NOT_THERE], PeerUnavailableError),
        ([NOT_THERE, SILENT], PeerUnavailableError),
        ([SILENT, THERE], "2"),
        ([RECOVERING, THERE], "2"),
    ],
)
async def test_a_response_is_nowhere_only_if_each_gateway_says_so(answers: Sequence[bytes], wanted: Any) -> None:
    async with forwarding(*answers) as (made, _):
        for stream in RESPONSES:  # whichever gateway a hash gives them to: a response is stored where its call ran
            if wanted is PeerUnavailableError:
                with pytest.raises(PeerUnavailableError) as caught:
                    await made.holder(stream, "/v1/responses/x", ())
                assert (caught.value.status, caught.value.retry_after_s) == (503, 1.0)
            else:
                assert await made.holder(stream, "/v1/responses/x", ()) == wanted


@pytest.mark.parametrize(("answer", "wanted"), [(THERE, "1"), (NOT_THERE, None)])
async def test_without_the_store_those_that_are_there_cannot_say_that_a_response_is_nowhere(
    answer: bytes, wanted: str | None
) -> None:
    async with forwarding(answer) as (made, _):
        made.membership = Unreachable()  # type: ignore[assignment]
        if wanted is None:
            with pytest.raises(UnreachableStoreError):
                await made.holder(RESPONSES[0], "/v1/responses/x", ())
        else:
            assert await made.holder(RESPONSES[0], "/v1/responses/x", ()) == wanted
