"""A native step of a session: a native function with its arguments, and the variable of its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plait.client.delivery import Delivery
from plait.client.entry import Entry
from plait.client.errors import AnswerError
from plait.client.flow import Flow, Request, answered
from plait.client.native import Failure, Native
from plait.client.variable import Text

PATH = "/variables"
_LONGEST_ERROR = 2000  # characters; what the gateway takes
_IN_VAIN = frozenset({404, 409, 410})
"""Statuses of a value that nobody waits for any more: its session has ended, or it has a value."""


@dataclass(frozen=True, slots=True, eq=False)
class NativeStep:
    """The step's variables are `inputs` and `output`. `entry` is how it was collected.

    `arguments` has a text, or several for a list, for each parameter.
    """

    native: Native
    arguments: Mapping[str, Text | tuple[Text, ...]]
    inputs: tuple[str, ...]
    output: str
    entry: Entry

    def given(self, values: Mapping[str, str]) -> dict[str, str | list[str]]:
        """What the function gets: a text for a text, a list for a list."""

        def value(text: Text) -> str:
            return text if isinstance(text, str) else values[text.name]

        return {
            name: [value(text) for text in argument] if isinstance(argument, tuple) else value(argument)
            for name, argument in self.arguments.items()
        }

    def reported(self, result: str | Failure, delivery: Delivery) -> Flow[None]:
        """Gives the gateway the value, or the reason why there is none. What needs the output fails for that reason.

        The gateway may refuse a value, such as one that is too large. Then that is the reason.
        """
        variable = {"session_id": delivery.session["session"], "semantic_var_id": self.output}
        if isinstance(result, str):
            try:
                yield from answered(Request("POST", PATH, {**variable, "value": result}), delivery.retries)
            except AnswerError as error:
                if error.status in _IN_VAIN:
                    raise
                result = Failure(f"the result of {self.native.name} was refused: {error.message}", error)
        if isinstance(result, Failure):
            delivery.failures[self.output] = result.error
            told = result.message[:_LONGEST_ERROR].encode(errors="replace").decode()
            yield from answered(Request("POST", PATH, {**variable, "error": told}), delivery.retries)
        delivery.collected.settle([self.entry])
