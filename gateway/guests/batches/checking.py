"""Reads the lines of an input file in one pass: where each is, in which order they run, and what is wrong with them."""

from __future__ import annotations

from array import array
from codecs import BOM_UTF8
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, Final

import msgspec

from plait.backends.protocol.surrogates import with_whole_pairs
from plait.gateway.guests.batches.batch import BatchError
from plait.policy.batches.line_order import chain_of

MOST_LINES: Final = 50_000
MOST_BLANK: Final = 1_000_000
"""A file has at most so many lines, blank ones counted, which take a microsecond each."""
MOST_LINE_BYTES: Final = 16 * 2**20
MOST_ERRORS: Final = 100
MOST_ID: Final = 512
MOST_INPUTS: Final = 50_000
"""Of all lines with embeddings together."""

PROMPT_FIELDS: Final = ("tools", "system", "instructions", "messages", "prompt", "input")
"""The fields of a body that make the prompt, in the order in which engines put them there."""


class Line(msgspec.Struct, frozen=True):
    """A line of an input file. `body` is not decoded."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Body(msgspec.Struct, frozen=True):
    model: str | None = None
    stream: bool | None = None
    background: bool | None = None
    plait: Any = None


_LINE: Final = msgspec.json.Decoder(Line)
_BODY: Final = msgspec.json.Decoder(_Body)
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_INPUT: Final = msgspec.json.Decoder(list[Any])


def read_line(data: bytes) -> Line:
    """A line of a file. As in a call, half a surrogate pair becomes U+FFFD."""
    return _LINE.decode(with_whole_pairs(data))


class CheckedLines:
    """The lines of a file that is fed in pieces. `serves` says whether a model is served here."""

    def __init__(self, endpoint: str, most_lines: int, serves: Callable[[str], bool]) -> None:
        self.errors: list[BatchError] = []
        self.model: str | None = None
        self.chains: list[bytes] = []
        self.begins = array("Q")
        self.lengths = array("Q")
        self.is_done = False
        """Whether the rest of the file would change nothing: there are too many lines, or errors."""
        self._endpoint = endpoint
        self._most_lines = most_lines
        self._serves = serves
        self._ids = set[bytes]()  # digests: the ids may have 512 characters each
        self._inputs = 0
        self._number = 0  # of the line in the file, blank ones counted
        self._at = 0
        self._rest: list[bytes] = []  # of the line that has not ended
        self._rest_bytes = 0

    def __len__(self) -> int:
        return len(self.begins)

    def feed(self, piece: bytes) -> None:
        first, *more = piece.split(b"\n")
        self._go_on(first)
        for following in more:
            self._end_line()
            self._go_on(following)

    def end(self) -> None:
        self._end_line()
        self._ids.clear()
        if not self.begins and not self.errors:
            self._wrong("empty_file", "The input file has no line.", number=None)

    def _go_on(self, piece: bytes) -> None:
        if self._rest_bytes <= MOST_LINE_BYTES:
            self._rest.append(piece)
        self._rest_bytes += len(piece)

    def _end_line(self) -> None:
        data, size = b"".join(self._rest), self._rest_bytes
        self._rest.clear()
        self._rest_bytes = 0
        self._take(data)
        self._at += size + 1

    def _take(self, data: bytes) -> None:
        self._number += 1
        skipped = len(BOM_UTF8) if self._number == 1 and data.startswith(BOM_UTF8) else 0
        data = data[skipped:]
        is_blank = not data.strip()
        if self._number > MOST_BLANK or (not is_blank and len(self.begins) == self._most_lines):
            self._wrong("too_many_lines", f"A batch has at most {self._most_lines} lines.")
            self.is_done = True
        if self.is_done or is_blank:
            return
        if len(data) > MOST_LINE_BYTES:
            self._wrong("line_too_long", f"A line has at most {MOST_LINE_BYTES} bytes.")
            return
        try:
            line = read_line(data)
            body, fields = _BODY.decode(line.body), _FIELDS.decode(line.body)
            self._inputs += _inputs(fields.get("input")) if self._endpoint.endswith("/embeddings") else 0
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._wrong("invalid_json_line", f"The line is no request of a batch: {error}.")
            return
        self._check(line, body)
        self.begins.append(self._at + skipped)
        self.lengths.append(len(data))
        self.chains.append(chain_of(b"".join([bytes(fields[name]) for name in PROMPT_FIELDS if name in fields])))

    def _check(self, line: Line, body: _Body) -> None:
        model = body.model or ""
        if self.model is None:
            self.model = model
            if not self._serves(model):
                self._wrong("model_not_found", "No engine serves the model.", "body.model")
        digest = blake2b(line.custom_id.encode(), digest_size=16).digest()
        has_id = 1 <= len(line.custom_id) <= MOST_ID
        for is_wrong, code, message, param in (
            (not has_id, "invalid_custom_id", f"Expected 1 to {MOST_ID} characters.", "custom_id"),
            (digest in self._ids, "duplicate_custom_id", "An earlier line has the same custom_id.", "custom_id"),
            (line.method != "POST", "invalid_method", "Expected POST.", "method"),
            (line.url != self._endpoint, "mismatched_endpoint", f"The batch is for {self._endpoint}.", "url"),
            (body.stream, "stream_not_supported", "Nobody reads a stream of a batch.", "body.stream"),
            (body.background, "background_not_supported", "Lines run in the background anyway.", "body.background"),
            (body.plait is not None, "annotations_not_supported", "Lines are no part of a program.", "body.plait"),
            (model != self.model, "model_mismatch", "All lines of a batch have one model.", "body.model"),
            (self._inputs > MOST_INPUTS, "too_many_inputs", f"A batch has at most {MOST_INPUTS} inputs.", "body.input"),
        ):
            if is_wrong:
                self._wrong(code, message, param)
        self._ids.add(digest)

    def _wrong(self, code: str, message: str, param: str | None = None, *, number: int | None = -1) -> None:
        if not self.is_done:
            self.errors.append(BatchError(code, message, self._number if number == -1 else number, param))
            self.is_done = len(self.errors) == MOST_ERRORS


def _inputs(given: msgspec.Raw | None) -> int:
    """How many inputs a body for embeddings has."""
    if given is None or bytes(given)[:1] != b"[":
        return 1
    found = _INPUT.decode(given)
    return len(found) if found and not isinstance(found[0], int) else 1
