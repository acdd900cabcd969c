"""Finds JSON in a model's text: alone, in a fenced code block, or between sentences. `json_value` is the transform.

Invalid JSON is refused, never repaired.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import NoReturn

from plait.gateway.guests.programs.transforms.chain import Convert
from plait.gateway.guests.programs.transforms.code_block import Block, fenced_blocks
from plait.gateway.guests.programs.transforms.errors import RejectedTextError, excerpt, place, quoted

MAX_DEPTH = 64
"""The deepest nesting of objects and arrays: enough for any answer, and far below Python's recursion limit."""

_NEAR_CHARACTERS = 20

_BRACKET = re.compile(r"[{\[]")
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)
_NO_SPACE = re.compile(r"[^ \t\r\n]")


def find_json(text: str) -> object:
    """The only JSON value in a text: the whole text, its one JSON code block, or the one object or array in its prose.

    Raises `RejectedTextError` if there is no candidate, or if there are several, because a choice would be a guess.
    """
    with suppress(RejectedTextError):
        return _decoded(text, 0, len(text))
    block = _json_block(text)
    if block is not None:
        return _decoded(text, block.start, block.end)
    return _in_prose(text)


def dump_json(value: object) -> str:
    """A value as compact JSON. Characters beyond ASCII are not escaped."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _json_block(text: str) -> Block | None:
    """The code block in JSON, or else the one without a language; None: neither. Several raise `RejectedTextError`.

    The block may be unclosed, because a JSON value shows where it ends.
    """
    blocks = list(fenced_blocks(text))
    for language in ("json", ""):
        candidates = [block for block in blocks if block.language == language]
        if len(candidates) > 1:
            first = "code_block(json)" if language else "code_block"
            raise RejectedTextError(
                f"which of the {len(candidates)} code blocks is meant? Put {first} before json to take the first"
            )
        if candidates:
            return candidates[0]
    return None


def _in_prose(text: str) -> object:
    """The object or array that begins at the first bracket. Raises `RejectedTextError` if a bracket follows its end."""
    found = _BRACKET.search(text)
    if found is None:
        raise RejectedTextError("there is no JSON object or array")
    value, end = _value_at(text, found.start())
    other = _BRACKET.search(text, end)
    if other is not None:
        raise RejectedTextError(
            f"which JSON value is meant, the one at {place(text, found.start())} or the one at "
            f"{place(text, other.start())}?"
        )
    return value


def _decoded(text: str, start: int, end: int) -> object:
    """The value in `text[start:end]`. Raises `RejectedTextError` if it is not valid, or if more text follows it."""
    value, value_end = _value_at(text, _skip_space(text, start))
    rest = _skip_space(text, value_end)
    if rest < end:
        raise RejectedTextError(f"more text follows the JSON value at {place(text, rest)}")
    return value


def _skip_space(text: str, offset: int) -> int:
    found = _NO_SPACE.search(text, offset)
    return len(text) if found is None else found.start()


def _value_at(text: str, offset: int) -> tuple[object, int]:
    """The value that begins at the offset, and the offset after it."""
    _check_depth(text, offset)
    try:
        return _DECODER.raw_decode(text, offset)
    except json.JSONDecodeError as error:
        what = error.msg[:1].lower() + error.msg[1:].removesuffix(" at")
        near = quoted(text[error.pos : error.pos + _NEAR_CHARACTERS])
        where = place(text, error.pos)
        raise RejectedTextError(f"the JSON is not valid: {what} at {where}, near {near}") from None
    except ValueError:  # Python limits an integer's digits, since reading them takes quadratic time
        raise RejectedTextError("the JSON has an integer of thousands of digits") from None


def _check_depth(text: str, offset: int) -> None:
    """Raise `RejectedTextError` if the value at the offset is nested too deep for the decoder, which recurses."""
    depth = 0
    for found in _STRING_OR_BRACKET.finditer(text, offset):
        if found[0] in "{[":
            depth += 1
        elif found[0] in "}]":
            depth -= 1
        if depth > MAX_DEPTH:
            raise RejectedTextError(
                f"the JSON has more than {MAX_DEPTH} objects and arrays within each other at "
                f"{place(text, found.start())}"
            )
        if depth <= 0:
            return


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise RejectedTextError(f"the JSON has a number that is too large: {excerpt(digits)}")
    return value


def _no_constant(name: str) -> NoReturn:
    raise RejectedTextError(f"{name} is not a JSON value")


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_no_constant)


def json_value(path: str | None = None) -> Convert:
    """The only JSON value in a text, as compact JSON; with `path`, what the path selects in it.

    A path of only names and indexes selects one value, and a selected string is written without quotes. The result of
    any other path is a JSON array, which may be empty. Fails if there is no valid JSON, if there is more than one
    value, or if a path to one value finds none.
    """
    if path is None:
        return lambda text: iter((dump_json(find_json(text)),))
    from plait.gateway.guests.programs.transforms.json_path import (  # noqa: PLC0415 - 2 MB, for those who use paths
        compile_path,
        select,
    )

    query = compile_path(path)

    def convert(text: str) -> Iterator[str]:
        values = select(query, find_json(text))
        if query.singular_query():
            yield values[0] if isinstance(values[0], str) else dump_json(values[0])
            return
        yield "["
        for position, value in enumerate(values):
            yield f",{dump_json(value)}" if position else dump_json(value)
        yield "]"

    return convert
