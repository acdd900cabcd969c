"""Finds fields in a form (`multipart/form-data`, RFC 7578) as it comes. Files are skipped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from plait.backends.errors import CallerError

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MOST_PARTS: Final = 1_000
"""The most parts of a form. Engines have the same limit."""

MOST_VALUE_BYTES: Final = 1_024
MOST_NAME_BYTES: Final = 1_024


class FormField(NamedTuple):
    """The value of a field, and the place of its first byte in the form."""

    value: str
    at: int


class FormReader:
    """Finds the values of the fields with these `names` in a form with this `content_type`.

    The contents of the field `file` come in pieces, in `taken`, which the caller empties; `filename` is its name there.
    Raises `CallerError` if the content type is not that of a form.
    """

    def __init__(self, content_type: str, names: frozenset[bytes], file: bytes | None = None) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not boundary:
            raise _malformed("send multipart/form-data with a boundary")
        self.found: dict[str, FormField] = {}
        self.taken: list[bytes] = []
        self.filename: str | None = None
        self._file = file
        self._is_file = False
        self._names = names
        self._fed = 0  # bytes before the piece that is read now
        self._piece = b""
        self._parts = 0
        self._has_ended = False
        self._header = b""  # the name of a header
        self._disposition = b""
        self._dispositions = 0
        self._field: bytes | None = None  # the name of the part, if its value is looked for
        self._value = bytearray()
        self._at: int | None = None
        callbacks: MultipartCallbacks = {
            "on_part_begin": self._begin,
            "on_header_field": self._on_header,
            "on_header_value": self._on_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._on_data,
            "on_part_end": self._end,
            "on_end": self._end_form,
        }
        try:
            self._parser = MultipartParser(boundary, callbacks)
        except FormParserError as error:
            raise _malformed("its boundary is too long") from error

    def feed(self, piece: bytes) -> None:
        """Parse the next piece of the form. Raises `CallerError`."""
        self._piece = piece
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise _malformed(str(error)) from error
        self._fed += len(piece)

    def end(self) -> None:
        """End the form. Raises `CallerError` if it is incomplete."""
        if not self._has_ended:
            raise _malformed("it ends without its last boundary")

    # Called by the parser.

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise CallerError(f"A form has at most {MOST_PARTS} fields.", code="too_many_fields")
        self._header = self._disposition = b""
        self._dispositions, self._field, self._at = 0, None, None
        self._value.clear()

    def _on_header(self, data: bytes, begin: int, end: int) -> None:
        self._header += data[begin:end]

    def _on_value(self, data: bytes, begin: int, end: int) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition += data[begin:end]
            if len(self._disposition) > MOST_NAME_BYTES:
                raise _malformed("the name of a field is too long")

    def _end_header(self) -> None:
        """A header ends. Two dispositions are refused, because an engine might use the other one."""
        self._dispositions += self._header.lower() == b"content-disposition"
        if self._dispositions > 1:
            raise _malformed("a field has two names")
        self._header = b""

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"")
        if name.partition(b"[")[0] == b"plait":
            message = "a form's annotations are headers: plait-priority"
            raise CallerError(message, param="plait", code="invalid_annotation")
        self._field = name if name in self._names and b"filename" not in options else None
        self._is_file = name == self._file
        if self._is_file:
            if self.filename is not None:
                raise CallerError(f"'{name.decode()}' is there twice", param=name.decode())
            self.filename = options.get(b"filename", b"").decode(errors="replace")

    def _on_data(self, data: bytes, begin: int, end: int) -> None:
        """Add bytes to a value. Bytes that at first looked like a boundary come from a buffer, not from the piece."""
        if self._is_file:
            self.taken.append(data[begin:end])
        if self._field is None:
            return
        if self._at is None and data is self._piece:
            self._at = self._fed + begin - len(self._value)
        self._value += data[begin:end]
        if len(self._value) > MOST_VALUE_BYTES:
            name = self._field.decode()
            raise CallerError(f"'{name}' has more than {MOST_VALUE_BYTES} bytes", param=name)

    def _end(self) -> None:
        """A value ends. An empty value is ignored."""
        if self._field is None or not self._value:
            return
        name = self._field.decode()
        if name in self.found:  # an engine might read the other one
            raise CallerError(f"'{name}' is there twice", param=name)
        try:
            value = self._value.decode()
        except UnicodeDecodeError as error:
            raise CallerError(f"'{name}' must be UTF-8", param=name) from error
        if self._at is None:  # all of the value looked like a boundary, so its place is unknown
            raise CallerError(f"'{name}' is no name of a model", param=name)
        self.found[name] = FormField(value, self._at)

    def _end_form(self) -> None:
        self._has_ended = True


def _malformed(why: str) -> CallerError:
    return CallerError(f"The body is no form: {why}.", code="malformed_form")
