"""Repairs bodies of clients that cannot be decoded, although their meaning is clear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from plait.backends.errors import CallerError
from plait.backends.protocol.surrogates import with_whole_pairs

KindT = TypeVar("KindT")
BodyT = TypeVar("BodyT")

_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def mended(decode: Callable[[bytes, KindT], BodyT], body: bytes, kind: KindT) -> tuple[BodyT, bytes]:
    """The decoded body, and the body for the engine: unchanged if it can be decoded.

    Otherwise half a surrogate pair becomes U+FFFD, and a `model` of null is removed. Raises the errors of `decode`.
    """
    while True:
        try:
            return decode(body, kind), body
        except CallerError as error:
            better = _better(body, error)
            if better == body:
                raise
        body = better


def _better(body: bytes, error: CallerError) -> bytes:
    if error.code == "invalid_json":
        return bytes(with_whole_pairs(body))
    return _without_null_model(body) if error.param == "model" else body


def _without_null_model(body: bytes) -> bytes:
    try:
        fields = _FIELDS.decode(with_whole_pairs(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body
    if bytes(fields.get("model", b"")) != b"null":
        return body
    del fields["model"]
    return msgspec.json.encode(fields)
