"""A turn's calls to tools, put together from their pieces.

Engines cut calls in many ways: pieces of several calls alternate, a name comes late or again, an index or an id is
missing or wrong. So a call is known to be complete only when the answer ends, not when the next call begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import msgspec

from plait.backends.protocol.surrogates import with_whole_pairs
from plait.backends.translation.chat_answer import CallPiece


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that is complete. `call_id` is empty if the engine has sent none."""

    call_id: str
    name: str
    arguments: str

    @property
    def values(self) -> dict[str, object] | None:
        """The arguments as an object, empty for no arguments; None if they are cut off or not an object."""
        if not self.arguments.strip():
            return {}
        try:
            value = msgspec.json.decode(self.json)
        except (msgspec.DecodeError, RecursionError):
            return None
        return value if isinstance(value, dict) else None

    @property
    def json(self) -> bytes:
        """The arguments, with U+FFFD for lone halves of surrogate pairs."""
        return bytes(with_whole_pairs(self.arguments.encode()))


@dataclass(slots=True)
class _GrowingCall:
    index: int = 0
    call_id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)

    def add(self, piece: CallPiece) -> None:
        if len(self.arguments) == 1 and self.arguments[0].strip() == "{}" and piece.arguments.lstrip().startswith("{"):
            self.arguments.clear()  # a placeholder, which the real arguments replace
        is_repeated = bool(piece.name) and piece.name == self.name and self.is_whole
        self.call_id = self.call_id or piece.call_id
        if not self.name:
            self.name = piece.name
        elif not self.arguments and piece.name != self.name:
            self.name = piece.name if piece.name.startswith(self.name) else self.name + piece.name
        if piece.arguments and not is_repeated:
            self.arguments.append(piece.arguments)

    @property
    def is_whole(self) -> bool:
        """Whether the arguments are a complete object, after which no more can come."""
        return bool(self.arguments) and self.arguments[-1].rstrip()[-1:] == "}" and self.call.values is not None

    @property
    def call(self) -> ToolCall:
        return ToolCall(self.call_id, self.name, "".join(self.arguments))


class ToolCalls:
    def __init__(self) -> None:
        self._calls: list[_GrowingCall] = []
        self._at: dict[int, _GrowingCall] = {}

    def add_whole(self, call: CallPiece) -> None:
        self._begin(len(self._calls)).add(call)

    def add(self, piece: CallPiece) -> None:
        call = self._call_of(piece)
        if call is None or _begins_another(call, piece):
            call = self._begin(piece.index or 0)
        if piece.index is not None:
            self._at[piece.index] = call
        call.add(piece)

    def complete(self) -> Iterator[ToolCall]:
        """The calls in the order of their indexes. A call without a name is left out: no client could run it.

        So is a call without arguments after a call with the same index and name: engines that repeat id and name in
        every piece send an empty last piece. An id of an earlier call is dropped: clients match results to calls by id.
        """
        told, last = set[str](), None
        for call in sorted(self._calls, key=lambda call: call.index):
            is_rest = last is not None and (call.index, call.name) == (last.index, last.name) and not call.arguments
            if call.name and not is_rest:
                yield replace(call.call, call_id="") if call.call_id in told else call.call
                told.add(call.call_id)
                last = call

    def _begin(self, index: int) -> _GrowingCall:
        call = _GrowingCall(index)
        self._calls.append(call)
        return call

    def _call_of(self, piece: CallPiece) -> _GrowingCall | None:
        at_index = None if piece.index is None else self._at.get(piece.index)
        if at_index is not None:
            return at_index
        same_id = next((call for call in self._calls if piece.call_id and call.call_id == piece.call_id), None)
        if piece.index is None:
            return same_id or (self._calls[-1] if self._calls else None)
        if same_id is None or same_id.is_whole:
            return None
        return same_id if not piece.name or (piece.name == same_id.name and same_id.arguments) else None


def _begins_another(call: _GrowingCall, piece: CallPiece) -> bool:
    """Whether a piece with the index of `call` begins another call: some engines give every call index 0, or none.

    A new id alone is no proof, since some engines give every piece a new id. Nor is a name that comes again.
    """
    has_new_id = bool(piece.call_id and call.call_id) and piece.call_id != call.call_id
    if piece.call_id and not has_new_id and call.call_id:
        return bool(piece.name and call.name) and piece.name != call.name and call.is_whole
    if has_new_id and piece.name and call.name and (piece.name != call.name or piece.index is None):
        return True
    names_more = bool(piece.name and call.name) and (piece.name != call.name or bool(piece.arguments.strip()))
    return (has_new_id or names_more) and call.is_whole
