"""A session's errors as OpenAI error objects, with the chains of causes of failed variables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import islice
from typing import Final

import msgspec

from plait.backends.errors import ConflictError, EngineError, FailedDependencyError, LimitError, PlaitError
from plait.gateway.guests.programs.core.held_call import HeldCall
from plait.policy.programs.request_graph_state import (
    FURTHEST_CAUSES,
    Cause,
    CycleError,
    DoubleProducerError,
    GraphError,
    InputFailed,
)

SHOWN_CAUSES = 2 * (FURTHEST_CAUSES - 1)
"""The longest chain of causes that is shown in full. The middle of a longer chain is left out.

The graph keeps one more of the furthest causes than are shown: it names the variable of the first one shown.
"""

SKIPPED: Final = "skipped"
"""The code of all errors that a skipped call leads to."""


class FailureCause(msgspec.Struct, frozen=True, kw_only=True):
    """One link of a chain of causes (`error.causes`). Fields that are unknown or do not apply are None."""

    call: str | None = None
    """The id of the call that failed."""

    engine: str | None = None
    """The engine at fault."""

    transform: str | None = None
    """The transform that refused the call's text."""

    variable: str | None = None
    """An output that failed with the call."""

    message: str
    """Shown to people."""

    transient: bool = False
    """Whether the same call may succeed when it is sent again."""

    code: str | msgspec.UnsetType = msgspec.UNSET
    """Set on the root: the code of all errors that it leads to. Unset: they have their usual codes."""

    def __str__(self) -> str:
        return self.message if self.call is None else f"{self.call}: {self.message}"


CANCELLED: Final = FailureCause(message="a client cancelled it", transient=True)
UNWANTED: Final = FailureCause(message="nobody waits for it any more", transient=True)
"""Causes of cancelled calls."""


def chain_text(causes: Iterable[FailureCause]) -> str:
    return ", because ".join(map(str, causes))


def skip_cause(call: HeldCall) -> FailureCause:
    """The root cause for the outputs and consumers of a skipped call."""
    return FailureCause(message=f"it was skipped: its condition {call.when} does not hold", code=SKIPPED)


def is_skip(cause: Cause) -> bool:
    """Whether a call or variable counts as skipped, not failed: the root cause is a condition that does not hold."""
    return isinstance(cause.root.what, FailureCause) and cause.root.what.code == SKIPPED


def failure_causes(cause: Cause, variable: str | None = None) -> list[FailureCause]:
    """A chain of causes, the nearest first and the root last. `variable` is the output that failed with the nearest."""
    causes = _shown(cause, variable)
    return [msgspec.structs.replace(link, transient=causes[-1].transient) for link in causes]


def _shown(cause: Cause, variable: str | None) -> list[FailureCause]:
    """The chain, without its middle if it is too long."""
    if cause.length <= SHOWN_CAUSES:
        return _linked(list(cause), variable)
    shown = SHOWN_CAUSES // 2
    between = FailureCause(message=f"{cause.length - SHOWN_CAUSES} more calls failed because an input failed")
    nearest = _linked(list(islice(cause, shown)), variable)
    return [*nearest, between, *_linked(cause.furthest, None)[-shown:]]


def input_failed(cause: Cause) -> FailedDependencyError:
    causes = failure_causes(cause)
    return FailedDependencyError(
        f"This call cannot run: {chain_text(causes)}.",
        causes,
        code=_code(causes, "input_failed"),
        transient=causes[-1].transient,
    )


def cancelled(call_id: str, cause: Cause) -> FailedDependencyError:
    """The error of a call that was itself cancelled or skipped."""
    causes = failure_causes(cause)
    if is_skip(cause):
        return FailedDependencyError(f"This call does not run: {chain_text(causes)}.", causes, code=SKIPPED)
    return FailedDependencyError(
        f"The call {call_id} was cancelled: {chain_text(causes)}.",
        causes,
        code="cancelled",
        transient=causes[-1].transient,
    )


def variable_failed(variable: str, cause: Cause) -> FailedDependencyError:
    causes = failure_causes(cause, variable)
    verb = "was skipped" if is_skip(cause) else "has failed"
    message = f"The variable '{variable}' {verb}: {chain_text(causes)}."
    code = _code(causes, "variable_failed")
    return FailedDependencyError(message, causes, code=code, param="semantic_var_id", transient=causes[-1].transient)


def text_changed(variable: str) -> EngineError:
    """The error for a getter that has streamed the beginning of a text before a retry generates a different text."""
    message = (
        f"The engine that generated '{variable}' has failed. The text of the retry differs from the text streamed so "
        "far; get the variable again."
    )
    return EngineError(message, code="text_changed", param="semantic_var_id")


def refused(error: GraphError) -> PlaitError:
    """The error for a request that contradicts the graph."""
    match error:
        case DoubleProducerError():
            message = (
                f"The variable '{error.variable}' already has a producer, {error.first}; use another name. "
                f"In a loop, number the names: '{error.variable}_2', '{error.variable}_3' and so on."
            )
            return ConflictError(message, code="double_producer", param="plait-output")
        case CycleError():
            message = f"The call would wait for its own output: {' -> '.join(error.path)}."
            return ConflictError(message, code="cycle", param="plait-inputs")
    return ConflictError(f"{error}.", code="conflict")


def nobody_produces(variable: str, known: Iterable[str]) -> FailedDependencyError:
    """The error for a call or getter of a variable without a producer. `known` are the session's variables."""
    names = [name for name in known if name != variable]
    nearest = get_close_matches(variable, names, n=3)
    hint = f"the nearest names are {', '.join(map(repr, nearest))}" if nearest else "no name in the session is like it"
    message = f"nobody produces '{variable}': it is no call's output, and no client has set it; {hint}."
    causes = [FailureCause(variable=variable, message=message.rstrip("."))]
    return FailedDependencyError(f"{message[0].upper()}{message[1:]}", causes, code="nobody_produces")


def not_computed(variable: str, *, closed: bool) -> FailedDependencyError:
    """The error of a native step whose client has not set the output in time, or before it `closed` the session."""
    end = "before the session was closed" if closed else "in time"
    message = f"the client has not computed '{variable}' {end}, although its inputs have values"
    causes = [FailureCause(variable=variable, message=message, code="not_computed")]
    return FailedDependencyError(f"{message[0].upper()}{message[1:]}.", causes, code="not_computed")


def inputs_missing(variable: str, missing: Iterable[str], *, param: str | None = None) -> ConflictError:
    """The error for the value of a native step whose inputs have no values yet. `param` is the value's field."""
    message = f"The inputs of '{variable}' have no values yet: {', '.join(missing)}. Get them before you set its value."
    return ConflictError(message, code="inputs_missing", param=param)


def session_closed(session_id: str) -> ConflictError:
    return ConflictError(
        f"The session '{session_id}' was closed: it takes no more calls and values. Use another one.",
        code="session_closed",
        param="session_id",
    )


def too_many(what: str, limit: int, code: str) -> PlaitError:
    """The error for a request beyond one of the tenant's limits."""
    message = f"A tenant may have {limit:,} {what} at once; end sessions that are not needed, or try again later."
    return LimitError(message, code=code)


def _code(causes: Sequence[FailureCause], usual: str) -> str:
    code = causes[-1].code
    return usual if isinstance(code, msgspec.UnsetType) else code


def _linked(chain: Sequence[Cause], variable: str | None) -> list[FailureCause]:
    """Each link with its call and its failed variable, which is the input that the link before names."""
    linked = []
    for link in chain:
        known = link.what if isinstance(link.what, FailureCause) else FailureCause(message=str(link.what))
        message = known.message.rstrip(".")
        linked.append(msgspec.structs.replace(known, call=link.where, variable=variable, message=message))
        variable = link.what.variable if isinstance(link.what, InputFailed) else None
    return linked
