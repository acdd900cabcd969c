"""The error in an answer."""

from __future__ import annotations

import msgspec

from plait.backends.errors import CallerError, PlaitError


class _ErrorBody(msgspec.Struct):
    error: dict[str, object] = {}


def error_of(status: int, answer: bytes) -> PlaitError:
    """The error in an answer, which has OpenAI's shape."""
    try:
        fields = msgspec.json.decode(answer, type=_ErrorBody).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        fields = {}
    message, param, code = (fields.get(name) for name in ("message", "param", "code"))
    error: PlaitError = (CallerError if status < 500 else PlaitError)(
        str(message or f"The engine answered with status {status}."),
        param=param if isinstance(param, str) else None,
        code=code if isinstance(code, str) else None,
    )
    error.status = status
    return error
