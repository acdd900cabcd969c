"""How often an answer is written to its connection: its head goes out with its first bytes, or else by itself."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from plait.gateway.server.http_protocol import Opening
from plait.gateway.server.served_client import JOINED_BYTES


class Transport:
    """Notes what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.written.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def opening() -> tuple[Any, Transport]:
    """A cycle whose transport is an opening, and the transport of the connection."""
    transport: Any = Transport()
    cycle: Any = SimpleNamespace(transport=transport)
    protocol: Any = SimpleNamespace(transport=transport, loop=asyncio.get_running_loop(), cycle=None)
    cycle.transport = Opening(cycle, protocol)
    return cycle, transport


async def test_a_head_goes_out_with_the_first_bytes() -> None:
    cycle, transport = opening()
    cycle.transport.write(b"head ")
    cycle.transport.write(b"one ")
    cycle.transport.write(b"two")
    assert transport.written == [b"head one ", b"two"]
    assert cycle.transport is transport, "later bytes take no detour"


async def test_a_head_alone_does_not_wait() -> None:
    cycle, transport = opening()
    cycle.transport.write(b"head")
    await asyncio.sleep(0)
    assert transport.written == [b"head"]
    cycle.transport.write(b"body")
    assert transport.written == [b"head", b"body"]


async def test_long_bytes_are_not_copied() -> None:
    cycle, transport = opening()
    body = bytes(JOINED_BYTES + 1)
    cycle.transport.write(b"head")
    cycle.transport.write(body)
    assert transport.written == [b"head", body]
    assert transport.written[1] is body


@pytest.mark.parametrize("pieces", [[], [b"head"], [b"head", b"body"]])
async def test_a_connection_closes_behind_what_was_written(pieces: list[bytes]) -> None:
    cycle, transport = opening()
    for piece in pieces:
        cycle.transport.write(piece)
    assert not cycle.transport.is_closing()
    cycle.transport.close()
    await asyncio.sleep(0)
    assert b"".join(transport.written) == b"".join(pieces)
    assert transport.closed


async def test_a_head_is_not_written_to_a_connection_that_has_closed_since() -> None:
    cycle, transport = opening()
    cycle.transport.write(b"head")
    transport.close()
    await asyncio.sleep(0)
    assert transport.written == []
