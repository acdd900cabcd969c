"""The value of one variable as a stream brings it: pieces of text, then the whole value or an error."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from plait.client.collected import Batch
from plait.client.delivery import Delivery
from plait.client.errors import ClientError, ConnectionFailedError
from plait.client.flow import Request
from plait.client.objectives import Wanted, criteria
from plait.client.program_stream import ProgramStream
from plait.client.transport import AsyncTransport, BlockingTransport
from plait.client.variable import SemanticVariable


class StreamedValue:
    """Sends what was collected together with a streamed get of one variable, which keeps its value."""

    def __init__(self, variable: SemanticVariable, delivery: Delivery, objective: Wanted, timeout_s: float) -> None:
        delivery.collected.check(variable.name)
        self._variable = variable
        self._delivery = delivery
        self._criteria = criteria(objective)
        self._timeout_s = timeout_s
        self._stream = ProgramStream(timeout_s)
        self._given = False
        self._error: ClientError | None = None

    def pieces(self, transport: BlockingTransport) -> Iterator[str]:
        """The pieces of the text. Raises the variable's error, or the gateway's refusal."""
        batch = transport.run(self._delivery.opened([self._variable.name]))
        with batch.sent(), transport.lines(self._request(batch)) as lines:
            batch.enter()
            for line in lines:
                if piece := self._piece(line):
                    yield piece
            batch.accept()
        self._close()

    async def apieces(self, transport: AsyncTransport) -> AsyncIterator[str]:
        """`pieces` in an event loop."""
        batch = await transport.run(self._delivery.opened([self._variable.name]))
        with batch.sent():
            async with transport.lines(self._request(batch)) as lines:
                batch.enter()
                async for line in lines:
                    if piece := self._piece(line):
                        yield piece
                batch.accept()
        self._close()

    def _request(self, batch: Batch) -> Request:
        return self._delivery.request(batch, {self._variable.name: self._criteria}, self._timeout_s, stream=True)

    def _piece(self, line: str) -> str:
        """The text in a line, empty for most lines."""
        news = self._stream.feed(line)
        if news is None:
            return ""
        if news.error is not None:
            # Raised at the end of the stream: its connection can be used again.
            self._error = self._delivery.explained(news.error)
        piece = news.piece or ""
        if news.value is not None:
            self._variable.keep(news.value)
            piece = "" if self._given else news.value  # no piece was streamed before the value
        self._given |= piece != ""
        return piece

    def _close(self) -> None:
        if self._error is not None:
            raise self._error
        if self._variable.value is None:
            raise ConnectionFailedError(f"the stream of {self._variable.name} ended before its value; get it again")
