"""Whether another gateway is at an address."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from plait.gateway.guests.peers.namesake import has_namesake
from plait.gateway.guests.peers.peers import Peers
from plait.gateway.guests.peers.signatures import PEER_HEADER, PeerKey

KEY = PeerKey("the-key-of-all-gateways")


async def asked(answer: Callable[[bytes], bytes]) -> bool:
    """Whether a server that answers so is taken for another gateway."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(answer(head))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return await has_namesake(Peers({url: url}, url, KEY, share=True))


def said(head: bytes) -> bytes:
    (line,) = (line for line in head.split(b"\r\n") if line.startswith(PEER_HEADER + b": "))
    return line.removeprefix(PEER_HEADER + b": ")


def answer(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


async def test_a_gateway_with_the_same_key_is_another() -> None:
    assert await asked(lambda head: answer(KEY.answer(said(head))))


@pytest.mark.parametrize(
    "other",
    [
        lambda _head: answer(b"{}"),
        lambda head: answer(said(head)),
        lambda head: answer(PeerKey("another").answer(said(head))),
        lambda head: answer(KEY.answer(said(head)), b"404 Not Found"),
        lambda _head: answer(b"x" * 2000),
        lambda _head: b"",
    ],
)
async def test_nobody_else_is(other: Callable[[bytes], bytes]) -> None:
    assert not await asked(other)


async def test_nobody_is_where_nobody_listens() -> None:
    assert not await has_namesake(Peers({"http://127.0.0.1:1": ""}, "http://127.0.0.1:1", KEY, share=True))
