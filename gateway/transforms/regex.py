"""The transform that matches a regular expression, with an engine that takes linear time for every expression."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import re2  # type: ignore[import-untyped]

from plait.gateway.transforms.errors import ParameterError, RejectedTextError, quoted
from plait.gateway.transforms.json_text import dump_json
from plait.gateway.transforms.step import Parameter, Step

_MAX_PROGRAM_BYTES = 1 << 20
"""The memory limit of a compiled expression. RE2 keeps up to 128 of them."""

_MAX_WORK = 100_000_000
"""The limit of instructions times bytes. If the automaton does not fit its memory, RE2 simulates every instruction at
every byte. Each takes some 4 ns on one core of a current server, and other threads cannot run meanwhile."""

_MAX_GROUPS = 20
"""Each group makes the simulation slower: 50 groups triple the time."""

_ALL_GROUPS = "*"


@dataclass(frozen=True, slots=True)
class Regex(Step):
    """The first match of a pattern in RE2's syntax: one group of it, or all named groups as a JSON object.

    `group` is a number (0 is the whole match), a name, or `*` for all. Without it, the result is the only group, or the
    whole match if there is no group.
    """

    name: ClassVar[str] = "regex"
    parameters: ClassVar[tuple[Parameter, ...]] = (Parameter("pattern"), Parameter("group", required=False))

    pattern: str
    group: str | None = None

    def __post_init__(self) -> None:
        compiled = _compiled(self.pattern)
        if compiled.groups > _MAX_GROUPS:
            expected = f"{_MAX_GROUPS} at most; (?:...) groups without capturing"
            raise ParameterError("pattern", f"{compiled.groups} groups", expected=expected)
        if self.group is None:
            if compiled.groups > 1:
                raise ParameterError("group", f"{compiled.groups} groups", expected=f"which one: {_groups(compiled)}")
        elif self.group == _ALL_GROUPS:
            if not compiled.groupindex:
                raise ParameterError("group", '"*" without named groups', expected="groups such as (?P<name>...)")
        elif self.group not in {*map(str, range(compiled.groups + 1)), *compiled.groupindex}:
            raise ParameterError("group", quoted(self.group), expected=_groups(compiled))

    def convert(self, text: str) -> Iterator[str]:
        """Fails if nothing matches, if the group took no part in the match, or if matching would take too long."""
        compiled = _compiled(self.pattern)
        longest_bytes = _MAX_WORK // compiled.programsize
        if len(text.encode()) > longest_bytes:
            raise RejectedTextError(f"the text is longer than the {longest_bytes:,} bytes that this pattern may search")
        found = compiled.search(text)
        if found is None:
            raise RejectedTextError("the pattern matches nowhere")
        if self.group == _ALL_GROUPS:
            by_number = sorted(compiled.groupindex, key=compiled.groupindex.__getitem__)  # RE2 sorts by name
            yield dump_json({name: found[name] for name in by_number})
            return
        taken = found[self._group(compiled)]
        if taken is None:
            raise RejectedTextError(f"the pattern matches, but group {self._group(compiled)} takes no part in it")
        yield taken

    def _group(self, compiled: Any) -> int | str:
        if self.group is None:
            return int(compiled.groups)
        return int(self.group) if self.group.isdecimal() else self.group


def _compiled(pattern: str) -> Any:
    """The compiled pattern. RE2 caches it, so a second call is cheap. Raises `ParameterError`."""
    options = re2.Options()
    options.max_mem = _MAX_PROGRAM_BYTES
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0]
        shown = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
        expected = "a pattern in RE2's syntax, which has no backreferences and no look-around"
        raise ParameterError("pattern", f"an invalid regular expression ({shown})", expected=expected) from None


def _groups(compiled: Any) -> str:
    numbers = f"a number from 0 to {compiled.groups}"
    return f"{numbers}, {', '.join(compiled.groupindex)} or *" if compiled.groupindex else numbers
