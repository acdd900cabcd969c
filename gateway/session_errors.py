"""What a session refuses and how it tells of failures: graph errors and chains of causes as OpenAI error objects."""

from __future__ import annotations

from backends.errors import ConflictError, FailedDependencyError, LimitError, PlaitError
from policy.request_graph_state import Cause, CycleError, DoubleProducerError, GraphError

SHOWN_CAUSES = 8
"""Of a longer chain the middle is left out: it may be as long as the session's graph is deep."""


def chain_text(cause: Cause) -> str:
    """A chain of causes on one line, the nearest first and the root last."""
    links = [f"{link.where}: {link.what.rstrip('.')}" for link in cause]
    if len(links) > SHOWN_CAUSES:
        left_out = len(links) - SHOWN_CAUSES
        links[SHOWN_CAUSES // 2 : -(SHOWN_CAUSES // 2)] = [f"{left_out} more calls failed for want of an input"]
    return ", because ".join(links)


def input_failed(cause: Cause) -> PlaitError:
    """For a call whose cause this is: it will never run."""
    return FailedDependencyError(f"This call cannot run: {chain_text(cause)}.", code="input_failed")


def variable_failed(variable: str, cause: Cause) -> PlaitError:
    """For whoever waits for the variable."""
    message = f"The variable '{variable}' has failed: {chain_text(cause)}."
    return FailedDependencyError(message, code="variable_failed", param="semantic_var_id")


def refused(error: GraphError) -> PlaitError:
    """For an event that contradicts the graph."""
    match error:
        case DoubleProducerError():
            message = f"The variable '{error.variable}' is produced by {error.first} already."
            return ConflictError(message, code="double_producer", param="plait-output")
        case CycleError():
            message = f"The call would wait for its own output: {' -> '.join(error.path)}."
            return ConflictError(message, code="cycle", param="plait-inputs")
    return ConflictError(f"{error}.", code="conflict")


def too_many(what: str, limit: int, code: str) -> PlaitError:
    """For what goes beyond one of the tenant's limits."""
    return LimitError(f"There are {limit:,} {what} already, the most that a tenant may have at once.", code=code)
