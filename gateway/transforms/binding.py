"""The known transforms. `build` makes a step from its name and its arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from plait.gateway.transforms.chain import Kind, Parameter, Step
from plait.gateway.transforms.code_block import CodeBlock
from plait.gateway.transforms.errors import ParameterError, TransformSpecError, nearest, quoted
from plait.gateway.transforms.json_value import Json
from plait.gateway.transforms.steps import Boolean, Integer, ItemList, OneOf, Regex, Strip, Template, XmlTag

_CLASSES: tuple[type[Step], ...] = (
    *(Strip, CodeBlock, Json, Regex, ItemList),
    *(XmlTag, Boolean, Integer, OneOf, Template),
)

STEPS: dict[str, type[Step]] = {step.name: step for step in _CLASSES}
"""All transforms, by the names that specifications use."""

A_TRANSFORM = f"one of {', '.join(STEPS)}"

# A JSON string may contain half of a surrogate pair, which no UTF-8 text can.
_SURROGATE = re.compile(r"[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a specification, at the offset `position`.

    `parameter` is the name that the specification gives to it; None: a positional argument.
    """

    value: str
    position: int
    parameter: str | None = None


def build(name: str, arguments: Sequence[Argument], *, start: int, end: int) -> Step:
    """Make the step of this name. Raises `TransformSpecError`.

    `start` and `end` are the step's offsets in the specification, for the positions in errors.
    """
    step = STEPS.get(name)
    if step is None:
        hint = nearest(name, STEPS)
        raise TransformSpecError(
            f"unknown transform {quoted(name)}", position=start, expected=A_TRANSFORM, nearest=hint
        )
    given: dict[str, list[Argument]] = {}
    for argument in arguments:
        parameter = _parameter_of(step, argument, given)
        given.setdefault(parameter.name, []).append(argument)
    for parameter in step.parameters:
        if parameter.required and parameter.name not in given:
            raise TransformSpecError(f"{name} without {parameter.name}", position=end, expected=parameter.name)
    make: Callable[..., Step] = step
    try:
        return make(**{p.name: _value(p, given[p.name]) for p in step.parameters if p.name in given})
    except ParameterError as error:
        position = given[error.parameter][0].position if error.parameter in given else start
        raise TransformSpecError(
            error.found, position=position, expected=error.expected, nearest=error.nearest
        ) from None


def _parameter_of(step: type[Step], argument: Argument, given: dict[str, list[Argument]]) -> Parameter:
    """The parameter that an argument sets. A positional argument sets the first one that has no argument yet.

    A flag is never positional. A parameter of kind `TEXTS` takes all positional arguments that are left.
    """
    if argument.parameter is None:
        for parameter in step.parameters:
            if parameter.kind is Kind.TEXTS or (parameter.kind is Kind.TEXT and parameter.name not in given):
                return parameter
        most = sum(parameter.kind is not Kind.FLAG for parameter in step.parameters)
        found, expected = f"parameter {most + 1} of {step.name}", f"{most} at most" if most else "none"
        raise TransformSpecError(found, position=argument.position, expected=expected)
    known = {parameter.name: parameter for parameter in step.parameters}
    if argument.parameter not in known:
        raise TransformSpecError(
            f"unknown parameter {quoted(argument.parameter)} of {step.name}",
            position=argument.position,
            expected=" or ".join(known) or "none",
            nearest=nearest(argument.parameter, known),
        )
    if argument.parameter in given:
        found = f"a second {argument.parameter}"
        raise TransformSpecError(found, position=argument.position, expected="each parameter once")
    return known[argument.parameter]


def _value(parameter: Parameter, arguments: list[Argument]) -> str | tuple[str, ...] | bool:
    """The value of the step's field, by the parameter's kind. Only `TEXTS` may have several arguments."""
    if parameter.kind is Kind.TEXTS:
        return tuple(_text(parameter, argument) for argument in arguments)
    text = _text(parameter, arguments[0])
    if parameter.kind is Kind.TEXT:
        return text
    if text not in ("true", "false"):
        raise _not_a("true or false", parameter, arguments[0])
    return text == "true"


def _text(parameter: Parameter, argument: Argument) -> str:
    if _SURROGATE.search(argument.value):
        raise _not_a("valid Unicode text", parameter, argument)
    return argument.value


def _not_a(expected: str, parameter: Parameter, argument: Argument) -> TransformSpecError:
    found = f"an invalid value of {parameter.name}"
    return TransformSpecError(found, position=argument.position, expected=expected)
