"""The parameters of a function that a program calls with texts and variables."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from plait.client.errors import TemplateError
from plait.client.variable import RUNNING, Argument, Scope, texts_of

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Signature:
    """The parameters of `function`, which messages call `name`.

    Raises `TemplateError` for a parameter that cannot be passed by name.
    """

    def __init__(self, function: Callable[..., object], name: str) -> None:
        self._name = name
        self._signature = inspect.signature(function)
        parameters = self._signature.parameters.values()
        wrong = next((parameter for parameter in parameters if parameter.kind not in _NAMED), None)
        if wrong is not None:
            raise TemplateError(f"the parameter {wrong} cannot be an input; use parameters that can be passed by name")

    @property
    def names(self) -> list[str]:
        """The parameters' names in order."""
        return list(self._signature.parameters)

    def bind(
        self, args: Sequence[object], kwargs: Mapping[str, object], *, with_defaults: bool = True
    ) -> dict[str, Argument]:
        """Each parameter's argument. Raises `TypeError` for arguments that do not fit the parameters."""
        bound = self._signature.bind(*args, **kwargs)
        if with_defaults:
            bound.apply_defaults()
        return cast("dict[str, Argument]", bound.arguments)

    def session_of(self, arguments: Mapping[str, Argument]) -> Scope:
        """The session of the first variable among the arguments, or else that of `Client.run`.

        Raises `TemplateError` if there is neither.
        """
        variables = (text for given in arguments.values() for text in texts_of(given) if not isinstance(text, str))
        first = next(variables, None)
        session = RUNNING.get() if first is None else first.session
        if session is None:
            raise TemplateError(
                f"no argument is a semantic variable: name the session, as in {self._name}.on(session)(...)"
            )
        return session

    def __str__(self) -> str:
        return str(self._signature)
