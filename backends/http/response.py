"""An engine's response to one call: its head, and its body in pieces as they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from plait.backends.errors import EngineError, EngineGarbledError

JOINED_BYTES = 2**20
"""A longer body is gathered in place. To join it at its end would take twice its memory."""


class Source(Protocol):
    """The source of a response, as the response sees it."""

    def resume(self) -> None:
        """Resumes reading if it was paused because too much was unread."""

    def fail(self, error: EngineError) -> None:
        """Ends the exchange with `error` and closes the connection."""


class Response:
    """One response. Its owner reads until `b""` or an error, or calls `abort`. Only one reader may read at a time.

    `status` and `headers` are complete when `HttpClient.request` returns. Header names are in lower case. 1xx responses
    and trailers are left out. More may arrive while there is a `source`. Only the connection adds `pieces` and calls
    `finish`, `fail` and `wake`. It calls `wake` once a read, not once a chunk.
    """

    __slots__ = ("_waiter", "error", "headers", "pieces", "source", "status", "unread_bytes")

    def __init__(self, source: Source) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.unread_bytes = 0
        self.source: Source | None = source  # None once the exchange has ended or failed
        self.pieces: list[bytes] = []
        self.error: EngineError | None = None  # of a failed exchange
        self._waiter: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        state = "failed" if self.error is not None else "arriving" if self.source is not None else "complete"
        return f"<Response {self.status} {state} unread={self.unread_bytes}>"

    @property
    def is_read(self) -> bool:
        """Whether all has arrived, without a failure, and was read."""
        return self.source is None and self.error is None and not self.pieces

    async def read_chunk(self) -> bytes:
        """All of the body that has arrived and is unread. After the end it is always `b""`.

        Raises `EngineError` (`EngineTimeoutError` for a silent engine) once everything before the failure is read.
        Cancellation aborts the response.
        """
        while not self.pieces:
            if self.error is not None:
                raise self.error
            if self.source is None:
                return b""
            await self.wait()
        pieces, source = self.pieces, self.source
        self.pieces, self.unread_bytes = [], 0
        if source is not None:
            source.resume()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def read(self, limit_bytes: int | None = None) -> bytes:
        """The rest of the body, as `gather` has it."""
        return bytes(await self.gather(limit_bytes))

    async def gather(
        self, limit_bytes: int | None = None, on_piece: Callable[[int], None] | None = None
    ) -> bytes | bytearray:
        """The rest of the body. `on_piece` is told the bytes of each piece as it comes, and may raise.

        Raises the errors of `read_chunk`, and `EngineGarbledError` beyond `limit_bytes`.
        """
        pieces: list[bytes] = []
        long, size = bytearray(), 0
        while self.source is not None or self.pieces:
            piece = await self.read_chunk()
            if not piece:
                break
            size += len(piece)
            if on_piece is not None:
                on_piece(len(piece))
            if limit_bytes is not None and size > limit_bytes:
                raise EngineGarbledError(f"the engine's answer is longer than {limit_bytes} bytes")
            if size <= JOINED_BYTES:
                pieces.append(piece)
                continue
            for earlier in pieces:
                long += earlier
            pieces.clear()
            long += piece
        if self.error is not None:
            raise self.error
        return long or (pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def abort(self) -> None:
        """Gives up the response. Unless it is complete, the connection closes, so that the engine aborts the call."""
        if self.source is not None:
            self.source.fail(EngineError("the response was given up before its end"))

    async def wait(self) -> None:
        """Waits for the next `wake`. Cancellation aborts the response."""
        assert self._waiter is None, "a response has one reader at a time"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        except asyncio.CancelledError:
            self.abort()
            raise
        finally:
            self._waiter = None

    def finish(self) -> None:
        """The whole body has arrived."""
        self.source, waiter = None, self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def fail(self, error: EngineError) -> None:
        """Nothing more will arrive; the reader gets `error`."""
        self.source = None
        self.error = error
        self.wake()

    def wake(self) -> None:
        """Wakes the waiting reader, if there is one."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
