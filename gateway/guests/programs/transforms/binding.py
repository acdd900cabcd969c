"""The transforms by the names that specifications use. `build` makes a step from a name and arguments.

A transform is a function whose parameters are those of the specification. The function checks their values and returns
the function that converts a text. It raises `ParameterError` for an invalid value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any, NamedTuple

from plait.gateway.guests.programs.transforms.chain import Convert, Step
from plait.gateway.guests.programs.transforms.code_block import code_block
from plait.gateway.guests.programs.transforms.errors import ParameterError, TransformSpecError, nearest, quoted
from plait.gateway.guests.programs.transforms.json_value import json_value
from plait.gateway.guests.programs.transforms.steps import (
    boolean,
    integer,
    item_list,
    one_of,
    regex,
    strip,
    template,
    xml_tag,
)

STEPS: dict[str, Callable[..., Convert]] = {
    "strip": strip,
    "code_block": code_block,
    "json": json_value,
    "regex": regex,
    "list": item_list,
    "xml": xml_tag,
    "boolean": boolean,
    "integer": integer,
    "enum": one_of,
    "template": template,
}

A_TRANSFORM = f"one of {', '.join(STEPS)}"

_SIGNATURES = {name: signature(function, eval_str=True).parameters for name, function in STEPS.items()}

# Values that the canonical form writes without quotes, as people do.
_BARE = re.compile(r"[\w$.\[\]*:@+-]+(?: [\w$.\[\]*:@+-]+)*")


class Argument(NamedTuple):
    """One argument of a specification, at the offset `position`. `parameter` is None for a positional argument."""

    value: str
    position: int
    parameter: str | None = None


def build(name: str, arguments: Sequence[Argument], *, start: int, end: int) -> Step:
    """Make the step of this name. Raises `TransformSpecError`.

    `start` and `end` are the step's offsets in the specification, for the positions in errors.
    """
    if name not in STEPS:
        raise TransformSpecError(f"unknown transform {quoted(name)}", start, A_TRANSFORM, nearest(name, STEPS))
    given: dict[str, list[Argument]] = {}
    for argument in arguments:
        given.setdefault(_parameter_of(name, argument, given), []).append(argument)
    texts: list[Any] = []
    named: dict[str, Any] = {}
    for parameter in _SIGNATURES[name].values():
        values = [_value(parameter, argument) for argument in given.get(parameter.name, ())]
        if parameter.kind is Parameter.VAR_POSITIONAL:
            texts = values
        elif values:
            named[parameter.name] = values[0]
        elif parameter.default is Parameter.empty:
            raise TransformSpecError(f"{name} without {parameter.name}", end, parameter.name)
    try:
        return Step(_canonical(name, texts, named), STEPS[name](*texts, **named))
    except ParameterError as error:
        position = given[error.parameter][0].position if error.parameter in given else start
        raise TransformSpecError(error.found, position, error.expected, error.nearest) from None


def _parameter_of(step: str, argument: Argument, given: Mapping[str, object]) -> str:
    """The parameter that an argument sets. A positional argument sets the first one that has no argument yet."""
    known, name, position = _SIGNATURES[step], argument.parameter, argument.position
    if name is None:
        positional = [one for one in known.values() if one.kind is not Parameter.KEYWORD_ONLY]
        for parameter in positional:
            if parameter.kind is Parameter.VAR_POSITIONAL or parameter.name not in given:
                return parameter.name
        expected = f"{len(positional)} at most" if positional else "none"
        raise TransformSpecError(f"parameter {len(positional) + 1} of {step}", position, expected)
    if name not in known:
        found, expected = f"unknown parameter {quoted(name)} of {step}", " or ".join(known) or "none"
        raise TransformSpecError(found, position, expected, nearest(name, known))
    if name in given:
        raise TransformSpecError(f"a second {name}", position, "each parameter once")
    return name


def _value(parameter: Parameter, argument: Argument) -> object:
    """The argument as the parameter's type: a flag, a text, or a text after the function in the type's metadata."""
    if parameter.annotation is not bool:
        (read,) = getattr(parameter.annotation, "__metadata__", (str,))
        return read(argument.value)
    if argument.value not in ("true", "false"):
        raise TransformSpecError(f"an invalid value of {parameter.name}", argument.position, "true or false")
    return argument.value == "true"


def _canonical(name: str, texts: Sequence[str], named: Mapping[str, str | bool]) -> str:
    """Texts by position, then the flags that are set."""
    written = [
        text if _BARE.fullmatch(text) else json.dumps(text, ensure_ascii=False)
        for text in (*texts, *named.values())
        if isinstance(text, str)
    ]
    written += [f"{flag}=true" for flag, value in named.items() if value is True]
    return f"{name}({', '.join(written)})" if written else name
