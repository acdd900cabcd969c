"""Reads the fields of a decoded body. Every error names the field at fault, as in `input[2].content`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from plait.backends.errors import CallerError

Json = dict[str, Any]

Seal = Callable[[str], str]
"""Makes a text unreadable for clients, which bring it back in a later request."""

ENGINE_SPEAKS_CHAT: Final = "the engine speaks chat completions only"
"""The usual reason for a translation."""


def wrong(where: str, what: str) -> CallerError:
    return CallerError(f"'{where}' {what}", param=where)


class InexpressibleError(CallerError):
    """Chat completions cannot express a valid field. `what` is the feature, `reason` why the request is translated."""

    def __init__(self, where: str, what: str, reason: str = ENGINE_SPEAKS_CHAT) -> None:
        super().__init__(f"'{where}': {what} is not supported here, because {reason}.", param=where)
        self._asked = where, what

    def because(self, reason: str) -> InexpressibleError:
        return InexpressibleError(*self._asked, reason)


def unsupported(where: str, what: str) -> CallerError:
    """The error for a valid field that chat completions cannot express. `what` is the feature."""
    return InexpressibleError(where, what)


def an_object(value: object, where: str) -> Mapping[str, Any]:
    """The value as an object. After JSON it is a dict; a check for `Mapping` takes ten times as long."""
    if not isinstance(value, dict):
        raise wrong(where, "must be an object")
    return value


def a_text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise wrong(where, "must be a string")
    return value


def a_list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise wrong(where, "must be a list")
    return value


def texts(value: object, where: str) -> list[str]:
    return [a_text(item, f"{where}[{index}]") for index, item in enumerate(a_list(value, where))]


def objects(value: object, where: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """The objects of a list, each with its place. None is an empty list."""
    for index, item in enumerate([] if value is None else a_list(value, where)):
        place = f"{where}[{index}]"
        yield an_object(item, place), place


def an_object_or_none(value: object, where: str) -> Mapping[str, Any]:
    """The value as an object; None is an empty one."""
    return {} if value is None else an_object(value, where)


def a_limit(value: object, where: str) -> int:
    """A number of tokens, at least 1. Clients also send whole floats, such as 5.0."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise wrong(where, f"must be a whole number of at least 1, not {value!r}")
    return value


def without_nones(**fields: Any) -> Json:
    return {name: value for name, value in fields.items() if value is not None}


def streamed(fields: Mapping[str, Any], known: Mapping[str, Any]) -> Json:
    """The fields that request a stream with its usage, if `fields` do. `known` are further stream options."""
    if not fields.get("stream"):
        return {}
    return {"stream": True, "stream_options": {**known, "include_usage": True}}


def one_or_parts(parts: list[Json]) -> str | list[Json]:
    """A message's content. A single text is a string, which every engine takes."""
    if not parts:
        return ""
    if len(parts) == 1 and parts[0]["type"] == "text":
        return str(parts[0]["text"])
    return parts
