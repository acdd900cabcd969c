"""A program of independent branches, each of which is to fail in another way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

LINKS: Final = 10
"""Calls of a branch of which each takes the text of the one before it."""
LEAVES: Final = 10
"""Further calls that all take the text of the last link."""
CALLS: Final = LINKS + LEAVES
AWAITED: Final = (0, LINKS // 2, CALLS - 2, CALLS - 1)
"""The numbers of the calls whose outputs are waited for: the branch's first call, a link, and two leaves."""


@dataclass(frozen=True)
class Wanted:
    """The error of whoever waits for a branch.

    `root` are fields of the cause at the root of a 424: each value is in what the error says.
    """

    status: int
    code: str
    transient: bool
    message: str
    root: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Branch:
    """Calls that depend on one another and on no other branch. Its first call is to fail, as `wanted` says.

    `model` and `max_tokens` are those of the first call, `transforms` and `truncated` those of its output. With `takes`
    it waits for a variable that comes from outside, which is what fails if `fails_outside`. With `fail_alone` each call
    of the branch fails by itself.
    """

    name: str
    wanted: Wanted
    model: str = "demo"
    max_tokens: int = 8
    takes: bool = True
    fails_outside: bool = False
    fail_alone: bool = False
    transforms: str | None = None
    truncated: str = "keep"

    @property
    def input(self) -> str:
        """The variable that comes from outside."""
        return f"{self.name}_in"

    def output(self, number: int) -> str:
        """What the call of this number produces."""
        return f"{self.name}_{number}"

    @property
    def awaited(self) -> tuple[str, ...]:
        """The variables that are waited for."""
        return tuple(map(self.output, AWAITED))

    def calls(self) -> Iterator[dict[str, Any]]:
        """All of its calls, as `POST /v1/programs` takes them."""
        for number in range(CALLS):
            taken = self.output(min(number, LINKS) - 1) if number else self.input if self.takes else None
            yield self._call(number, taken)

    def path(self, variable: str) -> list[str]:
        """The variables that fail before it and with it, itself first and the root of all last."""
        if self.fail_alone:
            return [variable]
        number = int(variable.rpartition("_")[2])
        links = range(min(number, LINKS) - 1, -1, -1)
        return [variable, *map(self.output, links), *([self.input] if self.fails_outside else [])]

    def _call(self, number: int, taken: str | None) -> dict[str, Any]:
        output: dict[str, Any] = {"name": self.output(number), "in_out": True}
        fields: dict[str, Any] = {"model": "demo", "max_tokens": 8}
        if number == 0:
            fields = {"model": self.model, "max_tokens": self.max_tokens, "ignore_eos": True}
            output |= {"truncated": self.truncated}
            output |= {"transforms": self.transforms} if self.transforms else {}
        inputs = [] if taken is None else [{"name": taken}]
        prompt = " ".join(f"{{{{{one['name']}}}}}" for one in inputs)
        prompt = f"Step {number} of {self.name}: {prompt} {{{{{output['name']}}}}}"
        return {**fields, "prompt": prompt, "placeholders": [*inputs, output]}


def wanted_cause(message: str, *, transient: bool = False, **root: str) -> Wanted:
    """The error of who waits for a variable that has failed, with what the cause at its root says."""
    return Wanted(424, "variable_failed", transient, message, tuple(root.items()))
