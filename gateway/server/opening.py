"""The opening of an answer: its head goes out with its first bytes, in one system call instead of two."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

JOINED_BYTES = 64 * 1024
"""Longer first bytes are written by themselves: copying them takes longer than a system call."""


class Opening:
    """Stands for the transport of uvicorn's `cycle` until the first bytes of the answer. Then the cycle gets its own.

    A head that is not followed by bytes at once goes out in the next turn of the event loop.
    """

    __slots__ = ("_cycle", "_head", "_loop", "_transport")

    def __init__(self, cycle: RequestResponseCycle, loop: asyncio.AbstractEventLoop) -> None:
        self._cycle = cycle
        self._loop = loop
        self._transport = cycle.transport
        self._head = b""

    def write(self, data: bytes) -> None:
        """Of a transport. The first piece is the head."""
        if not self._head:
            self._head = data
            self._loop.call_soon(self._release)
        elif len(data) <= JOINED_BYTES:
            self._head += data
            self._release()
        else:
            self._release()
            self._transport.write(data)

    def close(self) -> None:
        """Of a transport."""
        self._release()
        self._transport.close()

    def is_closing(self) -> bool:
        """Of a transport."""
        return self._transport.is_closing()

    def _release(self) -> None:
        head, self._head = self._head, b""
        if head:
            self._cycle.transport = self._transport
            self._transport.write(head)
