"""An engine's completion as the gateway reads it: its usage, its endings, its error. Nothing in it is trusted."""

from __future__ import annotations

from collections.abc import Collection
from math import isnan
from typing import Any

import msgspec

from plait.backends.errors import EngineBrokenError, EngineError, EngineGarbledError, EngineStatusError
from plait.backends.protocol.openai import check_unicode
from plait.gateway.fleet.booking import CallUsage

MOST_TOKENS = 2**24
"""The most tokens that a call may report where the model's context is not known."""

LONG_BYTES = 2**20
"""Of an answer: the texts of a longer one are not decoded where nobody needs them."""

FAILED_ENDINGS = frozenset(("abort", "error"))
"""Finish reasons of a text that its engine gave up."""

_EXCERPT_CHARACTERS = 300


class CompletionBody(msgspec.Struct, frozen=True):
    """A response, or the data of an event. The fields that matter can hold anything, so that any JSON object fits."""

    usage: Any = None
    choices: Any = None
    error: Any = None

    @property
    def only_usage(self) -> bool:
        """Whether it carries nothing but the usage."""
        return self.usage is not None and self.choices == []


class _Ending(msgspec.Struct, frozen=True):
    finish_reason: Any = None
    index: Any = 0


class _LongBody(msgspec.Struct, frozen=True):
    """What matters of a long answer. Its texts are skipped: as a value they would take as much memory again."""

    usage: Any = None
    choices: list[_Ending] | None = None
    error: Any = None


class UsageBounds(msgspec.Struct, frozen=True):
    """The most tokens that a call can have used."""

    prompt_tokens: int = MOST_TOKENS
    output_tokens: int = MOST_TOKENS


UNKNOWN = UsageBounds()
_DECODER = msgspec.json.Decoder(CompletionBody)
_LONG_DECODER = msgspec.json.Decoder(_LongBody)


def decode(data: bytes | bytearray) -> CompletionBody | None:
    """The body of a response or the data of an event; None if it is not a JSON object."""
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def decode_whole(answer: bytes | bytearray) -> CompletionBody | None:
    """The body of a response, where the choices of a long one have their endings only; None if it is no JSON object."""
    if len(answer) <= LONG_BYTES:
        return decode(answer)
    try:
        check_unicode(answer)
        body = _LONG_DECODER.decode(answer)
    except msgspec.ValidationError:  # it is valid JSON, but another object
        return decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    given = body.choices
    choices = None if given is None else [{"finish_reason": one.finish_reason, "index": one.index} for one in given]
    return CompletionBody(body.usage, choices, body.error)


def endings(body: CompletionBody) -> list[tuple[int, str]]:
    """The finish reasons in it, each after the index of its choice."""
    found: list[tuple[int, str]] = []
    for choice in body.choices if isinstance(body.choices, list) else ():
        if isinstance(choice, dict) and (reason := choice.get("finish_reason")) is not None:
            index = choice.get("index", 0)
            found.append(
                (index if isinstance(index, int) else 0, reason if type(reason) is str else _reason_text(reason))
            )
    return found


def ending_problem(engine_id: str, ended: Collection[str], choices: int) -> EngineError | None:
    """The error of an answer that should have `choices` endings and has those in `ended`; None if it is whole."""
    given_up = FAILED_ENDINGS.intersection(ended)
    if given_up:
        return EngineBrokenError(f"engine {engine_id} gave the call up: its finish reason is '{min(given_up)}'")
    if len(ended) < choices:
        missing = "no finish reason" if choices == 1 else f"{len(ended)} finish reasons for {choices} choices"
        return EngineBrokenError(f"engine {engine_id} ended its answer with {missing}")
    return None


def read_usage(usage: object, bounds: UsageBounds) -> tuple[CallUsage | None, bool]:
    """The usage within its bounds, and whether it had to be corrected. It is None if it does not hold numbers."""
    if not isinstance(usage, dict):
        return None, usage is not None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    prompt_tokens, output_tokens = usage.get("prompt_tokens", 0), usage.get("completion_tokens") or 0
    prompt, output = _within(prompt_tokens, bounds.prompt_tokens), _within(output_tokens, bounds.output_tokens)
    if prompt is None or output is None:
        return None, True
    found = None if cached is None else _within(cached, prompt)
    if found is None and cached is not None:
        return None, True
    read = CallUsage(prompt, output, found)
    return read, read != (prompt_tokens, output_tokens, cached)


def reported_error(engine_id: str, error: object) -> EngineError | str:
    """The error that an engine sent inside an answer: its own fault (a code of 500 or above), or the caller's."""
    fields = error if isinstance(error, dict) else {"message": str(error)}
    message, code = str(fields.get("message") or "an error without a message"), fields.get("code")
    if isinstance(code, int) and 400 <= code < 500:
        return excerpt(message)
    return EngineStatusError(f"engine {engine_id}: {excerpt(message)}", 502)


def error_text(answer: bytes) -> tuple[bool, str]:
    """Whether the body of an error is OpenAI's error object, and the message in it; empty if it has none.

    Other servers put the message at the top level, or under `detail`. What is not JSON has no message: it may be the
    page of a proxy.
    """
    try:
        fields = msgspec.json.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False, ""
    if not isinstance(fields, dict):
        return False, ""
    error = fields.get("error")
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return True, excerpt(error["message"])
    message = next((fields[key] for key in ("message", "detail", "error") if isinstance(fields.get(key), str)), "")
    return False, excerpt(message)


def garbled(engine_id: str, what: str) -> EngineGarbledError:
    """The error of an answer that is not a completion."""
    return EngineGarbledError(f"engine {engine_id} sent {what}")


def excerpt(text: str) -> str:
    """A text of an engine, short enough for a message."""
    return text if len(text) <= _EXCERPT_CHARACTERS else f"{text[:_EXCERPT_CHARACTERS]}..."


def _reason_text(reason: object) -> str:
    """A finish reason; SGLang once sent an object with a `type`."""
    return str(reason.get("type", "")) if isinstance(reason, dict) else str(reason)


def _within(value: object, limit: int) -> int | None:
    """The number, at least 0 and at most the limit; None if it is no number."""
    if type(value) is int:  # nearly always, and no bool
        return min(max(value, 0), limit)
    return int(min(max(value, 0), limit)) if isinstance(value, float) and not isnan(value) else None
