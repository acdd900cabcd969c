"""JSON values that come in parts, as the fields of a stream's events do, and the whole values.

A part is raw JSON that is not null. `add` returns about how many bytes more the value takes in memory. It raises
`ValueError` or `msgspec.DecodeError` if the part is not of the value's kind. Only what must be understood is decoded:
numbers stay as they were written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from plait.gateway.programs.growing_text import GrowingText, utf8_bytes

FIELD_BYTES = 256
"""What a field takes besides its value: a few Python objects."""

PIECE_BYTES = 64
"""What a piece of a list takes besides its JSON."""

Fields = dict[str, msgspec.Raw]

NULL = msgspec.Raw(b"null")
_FIELDS = msgspec.json.Decoder(Fields)
_OBJECTS = msgspec.json.Decoder(list[Fields])
_TEXT = msgspec.json.Decoder(str)
_INDEX = msgspec.json.Decoder(int)


class Value(Protocol):
    """A value in parts."""

    def add(self, raw: msgspec.Raw) -> int:
        """The next part comes; returns how many bytes more the value takes."""

    def json(self) -> msgspec.Raw:
        """The value so far."""


class Latest:
    """A value that comes whole, perhaps several times. The latest counts."""

    __slots__ = ("_raw",)

    def __init__(self) -> None:
        self._raw = b""

    def add(self, raw: msgspec.Raw) -> int:
        """The value comes."""
        before, self._raw = len(self._raw), bytes(raw)
        return len(self._raw) - before

    def json(self) -> msgspec.Raw:
        """The latest value."""
        return msgspec.Raw(self._raw)


class Text:
    """A text that grows."""

    __slots__ = ("_text",)

    def __init__(self) -> None:
        self._text = GrowingText()

    def add(self, raw: msgspec.Raw) -> int:
        """The next piece comes."""
        piece = _TEXT.decode(raw)
        if piece:
            self._text.add(piece)
        return utf8_bytes(piece)

    def json(self) -> msgspec.Raw:
        """The text so far."""
        return msgspec.Raw(msgspec.json.encode(str(self._text)))


class Items:
    """A list that grows. Its items are not decoded."""

    __slots__ = ("_pieces",)

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def add(self, raw: msgspec.Raw) -> int:
        """More items come."""
        written = bytes(raw)
        if not written.startswith(b"["):
            raise ValueError("a list goes on as something else")
        piece = written[1:-1].strip()
        if not piece:
            return 0
        self._pieces.append(piece)
        return PIECE_BYTES + len(piece)

    def json(self) -> msgspec.Raw:
        """The list so far."""
        return msgspec.Raw(b"[%b]" % b",".join(self._pieces))


class Object:
    """An object whose fields come in parts. `kind` makes a field's value from its name and its first raw part."""

    __slots__ = ("_kind", "fields")

    def __init__(self, kind: Callable[[str, bytes], Value]) -> None:
        self._kind = kind
        self.fields: dict[str, Value | None] = {}

    def add(self, raw: msgspec.Raw) -> int:
        """Fields come."""
        return self.merge(_FIELDS.decode(raw))

    def merge(self, fields: Fields) -> int:
        """As `add`, of decoded fields. A null is the value of a field that has no other."""
        grown_bytes = 0
        for name, raw in fields.items():
            value = self.fields.get(name)
            if value is None:
                if name not in self.fields:
                    self.fields[name] = None
                    grown_bytes += FIELD_BYTES + len(name)
                if raw == NULL:
                    continue
                value = self.fields[name] = self._kind(name, bytes(raw))
            elif raw == NULL:
                continue
            grown_bytes += value.add(raw)
        return grown_bytes

    def items(self) -> Fields:
        """The fields so far."""
        return {name: NULL if value is None else value.json() for name, value in self.fields.items()}

    def json(self) -> msgspec.Raw:
        """The object so far."""
        return msgspec.Raw(msgspec.json.encode(self.items()))


class Objects:
    """A list of objects that come in parts. The field `index` of a part names the object; `make` makes a new one."""

    __slots__ = ("_by_index", "_keeps_index", "_make")

    def __init__(self, make: Callable[[], Object], *, keeps_index: bool) -> None:
        self._make = make
        self._keeps_index = keeps_index
        self._by_index: dict[int, Object] = {}

    def add(self, raw: msgspec.Raw) -> int:
        """Parts of objects come. A part without an index has its place in `raw`."""
        grown_bytes = 0
        for place, fields in enumerate(_OBJECTS.decode(raw)):
            index = _INDEX.decode(fields["index"]) if "index" in fields else place
            if not self._keeps_index:
                fields.pop("index", None)
            one = self._by_index.get(index)
            if one is None:
                one = self._by_index[index] = self._make()
                grown_bytes += FIELD_BYTES
            grown_bytes += one.merge(fields)
        return grown_bytes

    def json(self) -> msgspec.Raw:
        """The list so far, by index."""
        return msgspec.Raw(msgspec.json.encode([one.items() for _, one in sorted(self._by_index.items())]))
