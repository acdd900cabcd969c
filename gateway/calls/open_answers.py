"""The limit on the bytes of unstreamed answers, which the gateway buffers until they are whole."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from plait.backends.errors import AnswerTooLargeError
from plait.gateway.calls.call import BufferedBytes


class OpenAnswers:
    """Counts the buffered bytes of all calls' unstreamed answers. At most `max_bytes` together."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.buffered_bytes = 0

    def __repr__(self) -> str:
        return f"OpenAnswers({self.buffered_bytes} of {self._max_bytes} bytes)"

    def hold(self, size_bytes: int) -> None:
        """Add to the count. Raises `AnswerTooLargeError` beyond the limit, and then adds nothing."""
        if self.buffered_bytes + size_bytes > self._max_bytes:
            raise AnswerTooLargeError(
                f"The answers that this gateway holds would have more than {self._max_bytes} bytes together. Ask for a "
                "stream or for less, or send the call again later.",
                retry_after_s=1.0,
            )
        self.buffered_bytes += size_bytes

    def free(self, size_bytes: int) -> None:
        self.buffered_bytes -= size_bytes


class OpenAnswer:
    """The buffered bytes of one answer. They count in each of `places` until `end`, or until its `with` block ends."""

    __slots__ = ("_places",)

    def __init__(self, *places: BufferedBytes) -> None:
        self._places = dict.fromkeys(places, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.end()

    def hold(self, size_bytes: int) -> None:
        """Add to the count of each place. Raises what a place raises."""
        for place in self._places:
            place.hold(size_bytes)
            self._places[place] += size_bytes

    def end(self) -> None:
        for place in reversed(self._places):
            self.end_in(place)

    def end_in(self, place: BufferedBytes) -> None:
        """Take this answer's bytes off the count of one place."""
        size_bytes, self._places[place] = self._places[place], 0
        if size_bytes:
            place.free(size_bytes)
