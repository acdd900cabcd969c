"""The state diagrams of the docs, drawn from the tables. `python -m tests.state_diagrams` writes them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from plait.gateway.calls.delivery import DELIVERY_TRANSITIONS, DeliveryState
from plait.gateway.fleet.booking import BOOKING_TRANSITIONS, BookingState
from plait.gateway.fleet.health import TRANSITIONS, HealthState
from plait.policy.programs.request_graph_state import (
    CALL_TRANSITIONS,
    VARIABLE_TRANSITIONS,
    CallState,
    VariableState,
)

DOCS = Path(__file__).parents[1] / "docs"
PAGES = tuple(DOCS / f"{name}.md" for name in ("life_of_a_call", "failures", "semantic_variables_reference"))
BLOCK = re.compile(r"<!-- states: (?P<name>\w+) -->\n(?:```mermaid\n.*?```\n)?", re.DOTALL)

Edge = tuple[str, str, str]
"""From a state, to a state, on an event; the event is empty where the states say it."""


def diagram(first: Iterable[str], edges: Iterable[Edge], states: Iterable[str]) -> str:
    """A diagram in Mermaid; what no edge leaves is an end."""
    drawn = list(edges)
    lines = [f"    [*] --> {state}" for state in first]
    lines += [f"    {before} --> {after}{f': {event}' if event else ''}" for before, after, event in drawn]
    left = {before for before, _, _ in drawn}
    lines += [f"    {state} --> [*]" for state in states if state not in left]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"]) + "\n"


DIAGRAMS = {
    "delivery": diagram(
        [DeliveryState.READ],
        [
            (before, after, "")
            for before, steps in DELIVERY_TRANSITIONS.items()
            for after in DeliveryState
            if after in steps
        ],
        DeliveryState,
    ),
    "booking": diagram(
        [BookingState.WAITING, BookingState.SENT],
        [
            (before, after, "")
            for before, steps in BOOKING_TRANSITIONS.items()
            for after in BookingState
            if after in steps
        ],
        BookingState,
    ),
    "engine": diagram(
        [HealthState.UNTRIED],
        [(before, after, event) for (before, event), after in TRANSITIONS.items() if before is not after],
        HealthState,
    ),
    "call": diagram(
        [CallState.WAITING, CallState.READY],
        [(before, after, event) for (before, event), after in CALL_TRANSITIONS.items()],
        CallState,
    ),
    "variable": diagram(
        [VariableState.EMPTY, VariableState.PENDING],
        [(before, after, event) for (before, event), after in VARIABLE_TRANSITIONS.items()],
        VariableState,
    ),
}


def redrawn(page: str) -> str:
    """The page with every diagram as its table has it now. Raises KeyError for one that is not known."""
    return BLOCK.sub(lambda match: f"<!-- states: {match['name']} -->\n{DIAGRAMS[match['name']]}", page)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(redrawn(page.read_text(encoding="utf-8")), encoding="utf-8")
