"""Functions that a program calls with texts and variables, semantic and native ones.

The bodies of semantic functions are prompts that the model executes (Parrot, section 4.1). Native functions are Python
functions that run in the client, between two calls of a program.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, Generic, ParamSpec, TypeVar, Unpack, cast, get_args, get_origin, overload

from plait.client.errors import TemplateError
from plait.client.native import Function, Native
from plait.client.objectives import Figures, Objective, Slo, figures
from plait.client.prompt import Output, Prompt, Sampling, call_annotations, sampling_fields
from plait.client.template import Template, parse_template
from plait.client.variable import RUNNING, Argument, Condition, Scope, SemanticVariable, texts_of

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


P = ParamSpec("P")
R = TypeVar("R")


class SemanticFunction(Generic[P, R]):
    """A function that collects a call and at once returns the variable of its output, or a tuple of several.

    The call belongs to the session of the variables among its arguments. Without such a variable, it belongs to the
    session given to `on`, or to that of `Client.run`.
    """

    def __init__(self, function: Callable[P, R], prompt: Prompt, signature: Signature) -> None:
        functools.update_wrapper(self, function)
        self.prompt = prompt
        self._signature = signature

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Collect a call. Raises `TemplateError` for wrong arguments."""
        arguments = self._signature.bind(args, kwargs)
        return self._submitted(self._signature.session_of(arguments), arguments)

    def on(self, session: Scope) -> Callable[P, R]:
        """The function, bound to a session, so that all arguments may be plain strings."""

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return self._submitted(session, self._signature.bind(args, kwargs))

        return call

    def when(self, condition: Condition) -> Callable[P, R]:
        """The function, whose call is skipped if the condition does not hold, in the session of its variable.

        A get of a skipped call's output raises `SkippedError`, and so does a get of a variable that needs the output.
        """

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return self._submitted(condition.variable.session, self._signature.bind(args, kwargs), condition)

        return call

    def _submitted(self, session: Scope, arguments: Mapping[str, Argument], when: Condition | None = None) -> R:
        outputs = session.submit(self.prompt, arguments, when)
        return cast("R", outputs[0] if len(outputs) == 1 else outputs)

    def __repr__(self) -> str:
        return f"<SemanticFunction {self.prompt.name}{self._signature}>"


def semantic_function(
    *,
    model: str | None = None,
    objective: Objective | str | None = None,
    slo: Slo | Figures | None = None,
    slo_ttft_ms: float | None = None,
    slo_tpot_ms: float | None = None,
    slo_jct_ms: float | None = None,
    priority: int | None = None,
    system: str | None = None,
    chat: bool = True,
    separator: str = "\n\n",
    **sampling: Unpack[Sampling],
) -> Callable[[Callable[P, R]], SemanticFunction[P, R]]:
    """Decorate a function whose docstring is the prompt. The function's body never runs.

    In the docstring, `{{name}}` is an input if the function has a parameter `name`, and otherwise an output: the model
    generates text there. Every parameter must occur. Sampling fields are for all outputs; an `Output` in the result's
    annotation has the settings of one. `model` defaults to the client's. `objective`, the SLO (in milliseconds, or as
    `slo`) and `priority` override the objectives that the gateway deduces for the call. `system` is a message before
    the prompt, which may have inputs too. `chat` and `separator` are as in `Prompt`.

    Raises `TemplateError` for a function that breaks these rules.
    """
    if system is not None and not chat:
        raise TemplateError("a system message needs a chat: leave out chat=False, or write the message in the prompt")
    fields = sampling_fields(sampling)
    given = {"slo_ttft_ms": slo_ttft_ms, "slo_tpot_ms": slo_tpot_ms, "slo_jct_ms": slo_jct_ms}
    said = call_annotations(objective, {**figures(slo), **figures(given)}, priority)

    def decorate(function: Callable[P, R]) -> SemanticFunction[P, R]:
        name = getattr(function, "__name__", "a semantic function")
        signature, template, outputs = _parsed(function, name, system)
        prompt = Prompt(name, template, outputs, model, fields, said, chat, separator)
        return SemanticFunction(function, prompt, signature)

    return decorate


def _parsed(
    function: Callable[..., object], name: str, system: str | None
) -> tuple[Signature, Template, dict[str, Output]]:
    try:
        signature = Signature(function, name)
        template = parse_template(_docstring(function), signature.names, system)
        return signature, template, _outputs(function, template.outputs)
    except TemplateError as error:
        raise TemplateError(f"{name}: {error}") from None


def _docstring(function: Callable[..., object]) -> str:
    text = inspect.getdoc(function)
    if not text:
        raise TemplateError("there is no docstring: write the prompt there (and run Python without -OO)")
    return text


def _outputs(function: Callable[..., object], names: Sequence[str]) -> dict[str, Output]:
    """The settings of the outputs in the result's annotation. Raises `TemplateError` if it does not fit the prompt."""
    annotation = _result_annotation(function)
    said = {output.name: output for output in _outputs_in(annotation)}
    for name in said:
        if name not in names:
            raise TemplateError(f"Output({name!r}) is not an output of the prompt; its outputs are {', '.join(names)}")
    is_tuple = get_origin(annotation) is tuple
    if (is_tuple and len(get_args(annotation)) != len(names)) or (said and not is_tuple and len(names) > 1):
        expected = f"annotate the result as a tuple of {len(names)}" if len(names) > 1 else "do not annotate a tuple"
        raise TemplateError(f"the prompt has the outputs {', '.join(names)}; {expected}")
    return said


def _outputs_in(annotation: object) -> list[Output]:
    if isinstance(annotation, Output):
        return [annotation]
    return [output for part in get_args(annotation) for output in _outputs_in(part)]


def _result_annotation(function: Callable[..., object]) -> object:
    """The evaluated annotation of the result.

    The parameters' annotations are not evaluated: their names may not exist at run time.
    """
    annotation: Any = getattr(function, "__annotations__", {}).get("return")
    if not isinstance(annotation, str):
        return annotation
    alone = FunctionType((lambda: None).__code__, getattr(function, "__globals__", {}))
    alone.__annotations__ = {"return": annotation}
    try:
        return inspect.get_annotations(alone, eval_str=True)["return"]
    except NameError as error:
        raise TemplateError(f"the annotation of the result cannot be evaluated: {error}") from error


_LONGEST_S = 86_400.0  # the gateway's limit


class NativeFunction:
    """A function that collects a native step and at once returns the variable of its result.

    The Python function runs in the client, once the step was sent and its inputs have values. An argument is a text, or
    a list of texts, which the function gets as a list of strings. The session is found as for `SemanticFunction`.
    """

    def __init__(self, native: Native, signature: Signature) -> None:
        functools.update_wrapper(self, native.function)
        self.native = native
        self._signature = signature

    def __call__(self, *args: Argument, **kwargs: Argument) -> SemanticVariable:
        """Collect a step. Raises `TemplateError` for wrong arguments."""
        arguments = self._signature.bind(args, kwargs, with_defaults=False)
        return self._signature.session_of(arguments).compute(self.native, arguments)

    def on(self, session: Scope) -> Callable[..., SemanticVariable]:
        """The function, bound to a session, so that all arguments may be plain strings."""

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
    """Decorate a function, or a coroutine function, from strings to a string.

    `seconds` is how long the function takes. The gateway divides a JCT among the calls without this time.

    Raises `TemplateError` for parameters that cannot be passed by name, and for a time beyond the gateway's limit.
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
