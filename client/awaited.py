"""Variables whose values a program waits for at once, in one request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plait.client.delivery import Delivery, Result, raised
from plait.client.flow import Flow
from plait.client.objectives import Wanted, criteria
from plait.client.variable import SemanticVariable


@dataclass(frozen=True, slots=True)
class Awaited:
    """The variables, some of which may have their values already."""

    variables: tuple[SemanticVariable, ...]
    objective: Wanted
    timeout_s: float

    def delivered(self, delivery: Delivery) -> Flow[dict[str, Result]]:
        """Sends what was collected, and gets the values that are missing. Raises the error of a refused call."""
        waiting = [variable.name for variable in self.variables if variable.value is None]
        for name in waiting:
            delivery.collected.check(name)
        return delivery.delivered(dict.fromkeys(waiting, criteria(self.objective)), self.timeout_s)

    def kept(self, results: Mapping[str, Result]) -> tuple[str, ...]:
        """The values of all variables, which keep them. Raises the error of the first variable that has none."""
        for variable in self.variables:
            result = results.get(variable.name)
            if isinstance(result, str):
                variable.keep(result)
        return tuple(raised(results[one.name] if one.value is None else one.value) for one in self.variables)
