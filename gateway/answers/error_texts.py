"""Reads the messages in the bodies of engines' errors, which have several forms.

vLLM and SGLang send OpenAI's error object, or an object with the message at the top level. FastAPI sends a text or a
list under `detail`, a proxy a text or an HTML page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from plait.backends.errors import CallerError, ContextLengthError, PlaitError
from plait.backends.protocol.context_overflow import is_overflow, overflow_error

_EXCERPT_CHARACTERS = 300

_LONGEST_BYTES: Final = 10_000
"""Clients get an excerpt of a longer error, such as that of a validator that repeats the whole request."""

_PLACES: Final = frozenset(("body", "query", "path", "header"))
"""The first item of FastAPI's `loc`: the part of the request that has the field at fault."""

_MESSAGES: Final = ("message", "msg", "detail", "error", "errors")
"""The fields that may have an error's message, as a text or deeper within. The first that is there counts."""

_LEVELS: Final = 4
"""How deep a message is looked for."""


_CALLERS: Final = frozenset(("BadRequestError", "invalid_request_error"))
"""The types of errors that are the caller's fault, for errors without a code."""


class ErrorText(NamedTuple):
    """An engine's error. `message` is empty if it has none, `param` names the field at fault.

    `is_openai`: the body is OpenAI's error object, and not too long for clients.
    """

    is_openai: bool = False
    message: str = ""
    param: str | None = None


def error_text(answer: bytes) -> ErrorText:
    """The message of an error's body; empty for an HTML page, because a proxy's page may show internal addresses."""
    try:
        said = msgspec.json.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        text = answer[: 4 * _EXCERPT_CHARACTERS].decode("utf-8", "ignore").strip()
        return ErrorText(message="" if text.startswith("<") else excerpt(text))
    error = said.get("error") if isinstance(said, dict) else None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return ErrorText(is_openai=len(answer) <= _LONGEST_BYTES, message=excerpt(error["message"]))
    found = list(_found(said, _LEVELS))
    param = next((param for _, param in found if param is not None), None)
    return ErrorText(message=excerpt("; ".join([text for text, _ in found])), param=param)


def error_of(status: int, answer: bytes) -> PlaitError:
    """The error of an engine's answer, in whatever form it says it."""
    is_openai, said, place = error_text(answer)
    fields = msgspec.json.decode(answer, type=_ErrorBody).error if is_openai else {"message": said, "param": place}
    message, param, code = (fields.get(name) for name in ("message", "param", "code"))
    if status == 400 and (code == ContextLengthError.default_code or is_overflow(str(message))):
        return overflow_error(str(message), param if isinstance(param, str) else None)
    error: PlaitError = (CallerError if status < 500 else PlaitError)(
        str(message or f"The engine answered with status {status}."),
        param=param if isinstance(param, str) else None,
        code=code if isinstance(code, str) else None,
    )
    error.status = status
    return error


def error_within(body: Mapping[str, Any]) -> Any:
    """The error in an answer of status 200; None without one. Older vLLMs and FastChat put it at the top level."""
    error = body.get("error")
    return body if error is None and body.get("object") == "error" else error


def stated_status(error: object) -> int:
    """The HTTP status that an error object states by its code or its type; 502 without one."""
    fields = error if isinstance(error, dict) else {}
    code = fields.get("code")
    if isinstance(code, str) and code.isdecimal() and len(code) < 6:
        code = int(code)
    if isinstance(code, int) and 40_000 <= code < 60_000:  # FastChat's, which it sends with status 400
        code = 400 if code < 42_900 else code // 100
    if isinstance(code, int) and 400 <= code < 600:
        return code
    return 400 if fields.get("type") in _CALLERS else 502


def excerpt(text: str) -> str:
    """A text of an engine, short enough for a message."""
    return text if len(text) <= _EXCERPT_CHARACTERS else f"{text[:_EXCERPT_CHARACTERS]}..."


class _ErrorBody(msgspec.Struct):
    error: dict[str, object] = {}


def _found(said: object, levels: int) -> Iterator[tuple[str, str | None]]:
    """The messages within `said`, each with the name of the field at fault, or None."""
    if isinstance(said, str) and said:
        yield said, None
    elif levels and isinstance(said, list):
        for item in said:
            yield from _found(item, levels - 1)
    elif levels and isinstance(said, dict):
        key = next((name for name in _MESSAGES if said.get(name)), None)
        param = said.get("param") if isinstance(said.get("param"), str) else _param(said.get("loc"))
        for message, inner in () if key is None else _found(said[key], levels - 1):
            yield (message if param is None or inner else f"{message} (in {param})"), inner or param


def _param(loc: Any) -> str | None:
    """The field at a place such as `["body", "messages", 0, "role"]`, as `messages[0].role`."""
    if not isinstance(loc, Sequence) or isinstance(loc, str):
        return None
    names = loc[1:] if loc and loc[0] in _PLACES else loc
    return "".join([f"[{name}]" if isinstance(name, int) else f".{name}" for name in names]).removeprefix(".") or None
