"""The reasons for which a call waits, each from when on, and its changes of line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final, Literal, NamedTuple

WaitReason = Literal["slot", "prompts", "turn", "tenant_share", "session", "max_running", "store"]
"""What a call waits for.

- `slot`: a free sequence slot of its engine;
- `prompts`: prompts that its engine was sent and has not computed;
- `turn`: those that go before it in the line of its engine;
- `tenant_share`: room that others would have, but not its tenant, which has more than its share;
- `session`: room for its session's context in the engines' caches;
- `max_running`: an end of another call of its tenant, which has as many placed as it may;
- `store`: the gateways' store, which is asked for its tenant's rates.

Strings, and no enumeration: each look at an engine would read a member, which costs Python 3.11 a call.
"""


MOST_WAITS: Final = 64
"""So many are noted of a call. What it waits for then counts as the last one."""


class Wait(NamedTuple):
    """A call waits for this from `since_s` on: until its next wait, or until it is sent or given up."""

    why: WaitReason
    since_s: float


class LineChange(NamedTuple):
    """A call that waits has gone to another engine's line.

    `gain_s` is the delay that it was to save; None if its engine takes no calls any more.
    """

    from_id: str
    to_id: str
    at_s: float
    gain_s: float | None


class Firsts:
    """What the first call of each line waits for, since the call before it has gone.

    Which one that is shows only when it is sent: one that joins later may go before it.
    """

    def __init__(self) -> None:
        self._waits: dict[str, tuple[str, list[Wait]]] = {}  # tenant and waits, by engine

    def wait_for(self, engine_id: str, tenant: str, why: WaitReason, now_s: float) -> None:
        """The tenant is the first of an engine's line, and waits for this from now on."""
        first, waits = self._waits.get(engine_id, _NOBODY)
        if first != tenant:
            self._waits[engine_id] = tenant, [Wait(why, now_s)]
        elif waits[-1].why != why and len(waits) < MOST_WAITS:
            waits.append(Wait(why, now_s))

    def taken(self, engine_id: str, tenant: str) -> Iterable[Wait]:
        """A call of the tenant leaves an engine's line: returns what it has waited for as the first one."""
        if self._waits.get(engine_id, _NOBODY)[0] != tenant:
            return ()
        return self._waits.pop(engine_id)[1]


_NOBODY: Final[tuple[str | None, list[Wait]]] = (None, [])


def seconds_by_reason(waits: Sequence[Wait], end_s: float) -> dict[str, float] | None:
    """The seconds of waits until `end_s`, to the millisecond; None if there are none."""
    found: dict[str, float] = {}
    for wait, following in pairwise((*waits, Wait("turn", end_s))):
        found[wait.why] = found.get(wait.why, 0.0) + following.since_s - wait.since_s
    return {why: rounded for why, seconds in found.items() if (rounded := round(seconds, 3)) > 0} or None
