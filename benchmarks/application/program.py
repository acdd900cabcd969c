"""Programs of LLM calls as token ids: what a call's prompt is made of, what it makes, and what the client waits for."""

from __future__ import annotations

from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from plait.policy.types import Objective

ID_BYTES = 3
"""A token id in a value's text: 3 bytes are 4 characters of base64, which is what the executor takes a token to be."""
FIRST_CONSTANT_ID = 1 << (8 * ID_BYTES)
"""Generated ids lie below, those of constant segments from here on: they never match by accident."""

Segment = range | str
"""A part of a prompt: constant token ids, or the name of the variable whose value stands there."""


@dataclass(frozen=True, slots=True)
class ProgramCall:
    """One call: it makes `output`, exactly `output_tokens` long."""

    segments: tuple[Segment, ...]
    output: str
    output_tokens: int

    @property
    def inputs(self) -> tuple[str, ...]:
        """The variables that it takes, each once."""
        return tuple(dict.fromkeys(segment for segment in self.segments if isinstance(segment, str)))

    @property
    def constant_tokens(self) -> int:
        """Prompt tokens that are known before any call has run."""
        return sum(len(segment) for segment in self.segments if isinstance(segment, range))

    def prompt(self, values: Mapping[str, Sequence[int]]) -> array[int]:
        """The prompt's token ids; `values` of all inputs."""
        tokens = array("I")
        for segment in self.segments:
            tokens.extend(values[segment] if isinstance(segment, str) else segment)
        return tokens


@dataclass(frozen=True, slots=True)
class Program:
    """The calls of an application, producers first, and the variables that its client waits for."""

    calls: tuple[ProgramCall, ...]
    awaited: tuple[str, ...]

    @property
    def output_tokens(self) -> int:
        """Of all calls."""
        return sum(call.output_tokens for call in self.calls)


@dataclass(frozen=True, slots=True)
class Launch:
    """A client starts a program `at_s` seconds from the start. `kind` names what is measured together.

    `objective` is what the client gets the awaited variables with, where the system understands it; None: a plain call
    without any annotation.
    """

    at_s: float
    kind: str
    program: Program
    objective: Objective | None = None


Scenario = tuple[Launch, ...]
"""Everything that clients do in one run."""


class Vocabulary:
    """Hands out token ids for constant segments: no id twice, so that only what is meant to be shared is."""

    def __init__(self) -> None:
        self._next = FIRST_CONSTANT_ID

    def fresh(self, tokens: int) -> range:
        """So many ids that nothing else has."""
        self._next += tokens
        return range(self._next - tokens, self._next)


def text_of(ids: Sequence[int]) -> str:
    """A value as text, four characters a token."""
    return b64encode(b"".join(token.to_bytes(ID_BYTES, "big") for token in ids)).decode()


def ids_of(text: str) -> list[int]:
    """The token ids of a value's text."""
    return list(_ids(b64decode(text)))


def _ids(data: bytes) -> Iterator[int]:
    return (int.from_bytes(data[start : start + ID_BYTES], "big") for start in range(0, len(data), ID_BYTES))
