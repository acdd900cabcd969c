"""A session's errors as OpenAI error objects: refused calls, failed variables, and their chains of causes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import msgspec

from plait.backends.errors import ConflictError, EngineError, FailedDependencyError, LimitError, PlaitError
from plait.gateway.programs.failure_cause import FailureCause, chain_text
from plait.policy.programs.request_graph_state import (
    FURTHEST_CAUSES,
    Cause,
    CycleError,
    DoubleProducerError,
    GraphError,
    InputFailed,
)

SHOWN_CAUSES = 2 * (FURTHEST_CAUSES - 1)
"""The longest chain that is shown in full. A longer one loses its middle: a chain can be as long as the graph is deep.

The far half needs one cause more than it shows: that cause names the variable of the first one shown.
"""


def failure_causes(cause: Cause, variable: str | None = None) -> list[FailureCause]:
    """A chain of causes, the nearest first and the root last. `variable` failed with the nearest one."""
    if cause.length <= SHOWN_CAUSES:
        return _linked(list(cause), variable)
    shown = SHOWN_CAUSES // 2
    between = FailureCause(message=f"{cause.length - SHOWN_CAUSES} more calls failed for want of an input")
    nearest = _linked(list(islice(cause, shown)), variable)
    return [*nearest, between, *_linked(cause.furthest, None)[-shown:]]


def input_failed(cause: Cause) -> FailedDependencyError:
    """The error of a call that will never run because of this cause."""
    causes = failure_causes(cause)
    return FailedDependencyError(f"This call cannot run: {chain_text(causes)}.", causes, code="input_failed")


def cancelled(call_id: str, cause: Cause) -> FailedDependencyError:
    """The error of a call that was cancelled itself, not because an input failed."""
    causes = failure_causes(cause)
    return FailedDependencyError(f"The call {call_id} was cancelled: {chain_text(causes)}.", causes, code="cancelled")


def variable_failed(variable: str, cause: Cause) -> FailedDependencyError:
    """The error for getters of the variable."""
    causes = failure_causes(cause, variable)
    message = f"The variable '{variable}' has failed: {chain_text(causes)}."
    return FailedDependencyError(message, causes, code="variable_failed", param="semantic_var_id")


def text_changed(variable: str) -> EngineError:
    """The error for a getter that has streamed a text's beginning, if a retry then generates a different text."""
    message = (
        f"The engine that generated '{variable}' has failed, and the text that another engine generates differs from "
        "what was streamed; get the variable again."
    )
    return EngineError(message, code="text_changed", param="semantic_var_id")


def refused(error: GraphError) -> PlaitError:
    """The error for a request that contradicts the graph."""
    match error:
        case DoubleProducerError():
            message = f"The variable '{error.variable}' is produced by {error.first} already."
            return ConflictError(message, code="double_producer", param="plait-output")
        case CycleError():
            message = f"The call would wait for its own output: {' -> '.join(error.path)}."
            return ConflictError(message, code="cycle", param="plait-inputs")
    return ConflictError(f"{error}.", code="conflict")


def too_many(what: str, limit: int, code: str) -> PlaitError:
    """The error for a request beyond one of the tenant's limits."""
    return LimitError(f"There are {limit:,} {what} already, the most that a tenant may have at once.", code=code)


def _linked(chain: Sequence[Cause], variable: str | None) -> list[FailureCause]:
    """Each link with the variable that failed with it: the input that the link before it lacks."""
    linked = []
    for link in chain:
        known = link.what if isinstance(link.what, FailureCause) else FailureCause(message=str(link.what))
        message = known.message.rstrip(".")
        linked.append(msgspec.structs.replace(known, call=link.where, variable=variable, message=message))
        variable = link.what.variable if isinstance(link.what, InputFailed) else None
    return linked
