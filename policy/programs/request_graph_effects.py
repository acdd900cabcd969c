"""The effects of an event on a request graph. From them the executor starts and answers calls (Parrot, 5.1)."""

from __future__ import annotations

from typing import NamedTuple

from plait.policy.programs.request_graph_state import CallState, Cause


class Ended(NamedTuple):
    """A call that has left the graph; `cause` is None if it finished."""

    call_id: str
    state: CallState
    cause: Cause | None


class Failed(NamedTuple):
    """A variable that will never have a value."""

    variable: str
    cause: Cause


class Link(NamedTuple):
    """A consumer waits for an output of a producer; one link for each variable between them."""

    producer: str
    consumer: str


class Effects(NamedTuple):
    """The changes that one event made, each in a deterministic order.

    `ready` calls are in the order in which they were added. `ended` and `variables_failed` begin with the call that
    failed first. `linked` are new links, `cut` are removed links. Both calls of a cut link may have ended. A call that
    fails when it is added was never linked.
    """

    added: str | None = None
    ready: tuple[str, ...] = ()
    variable_set: str | None = None
    variables_failed: tuple[Failed, ...] = ()
    ended: tuple[Ended, ...] = ()
    linked: tuple[Link, ...] = ()
    cut: tuple[Link, ...] = ()


NO_EFFECTS = Effects()
