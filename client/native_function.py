"""Native functions: Python functions that run in the client, between two calls of a program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import overload

from plait.client.errors import TemplateError
from plait.client.native import Function, Native
from plait.client.signature import Signature
from plait.client.variable import Argument, Scope, SemanticVariable

_LONGEST_S = 86_400.0  # what the gateway takes


class NativeFunction:
    """Calling it collects a native step and returns the variable of its result at once.

    The function runs when its inputs have values, after the step was sent. An argument is a text, or a list of texts,
    which the function gets as a list of strings. The step belongs to the session of the variables among its arguments.
    Without such a variable, `on` names the session, or it is the session of `Client.run`.
    """

    def __init__(self, native: Native, signature: Signature) -> None:
        functools.update_wrapper(self, native.function)
        self.native = native
        self._signature = signature

    def __call__(self, *args: Argument, **kwargs: Argument) -> SemanticVariable:
        """Collect the step. Raises `TemplateError` for arguments that it cannot take."""
        arguments = self._signature.bind(args, kwargs, with_defaults=False)
        return self._signature.session_of(arguments).compute(self.native, arguments)

    def on(self, session: Scope) -> Callable[..., SemanticVariable]:
        """The function bound to a session, so that all arguments may be strings."""

        def call(*args: Argument, **kwargs: Argument) -> SemanticVariable:
            return session.compute(self.native, self._signature.bind(args, kwargs, with_defaults=False))

        return call

    def __repr__(self) -> str:
        return f"<NativeFunction {self.native.name}{self._signature}>"


@overload
def native_function(function: Function, /) -> NativeFunction: ...


@overload
def native_function(*, seconds: float | None = None) -> Callable[[Function], NativeFunction]: ...


def native_function(
    function: Function | None = None, /, *, seconds: float | None = None
) -> NativeFunction | Callable[[Function], NativeFunction]:
    """Decorate a function of strings whose result is a str. It may be a coroutine function.

    `seconds` is the time that it takes: a JCT is divided among the calls without it.

    Raises `TemplateError` for a function whose parameters cannot be passed by name, or for a time that the gateway does
    not take.
    """
    if seconds is not None and not 0 <= seconds <= _LONGEST_S:
        raise TemplateError(f"seconds is {seconds}; expected 0 to {_LONGEST_S:,.0f}")

    def decorate(function: Function) -> NativeFunction:
        name = getattr(function, "__name__", "a native function")
        try:
            signature = Signature(function, name)
        except TemplateError as error:
            raise TemplateError(f"{name}: {error}") from None
        return NativeFunction(Native(name, function, seconds), signature)

    return decorate if function is None else decorate(function)
