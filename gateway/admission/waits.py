"""Why a call waits, since when, and its changes of line: for the log, receipts and metrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final, Literal, NamedTuple

WaitReason = Literal["slot", "prompts", "turn", "tenant_share", "session", "max_running", "rate", "store", "gateway"]
"""What a call waits for.

- `slot`: a free sequence slot of its engine;
- `prompts`: sent prompts that its engine has not computed;
- `turn`: the calls before it in the line of its engine;
- `tenant_share`: there is room for other tenants, but its own is over its share;
- `session`: room for its session's context in the engines' caches;
- `max_running`: the end of another call of its tenant, which is at its limit of running calls;
- `rate`: its turn by its tenant's rates of calls or tokens, for a call of a program;
- `store`: the shared store's answer on its tenant's rates;
- `gateway`: the gateway itself, which had too little CPU time or was stopped. Known once the call has ended.

These are strings because reading a member of an `Enum` is a function call in Python 3.11, and every look at an engine
would read one.
"""


MOST_WAITS: Final = 64
"""The most waits that are recorded of a call. The last one then lasts until the end."""


class Wait(NamedTuple):
    """A call waits for `why` from `since_s` to its next wait, or until it is sent or refused."""

    why: WaitReason
    since_s: float


class LineChange(NamedTuple):
    """A waiting call has moved from one engine to another.

    `gain_s` is the predicted gain in delay; None: the call moved because its engine no longer takes calls.
    """

    from_id: str
    to_id: str
    at_s: float
    gain_s: float | None


class Firsts:
    """What the first call of each line waits for, since it is the first.

    The waits are recorded by line and tenant, and given to the call that is then sent: until that moment a later call
    may still become the first.
    """

    def __init__(self) -> None:
        self._waits: dict[str, tuple[str, list[Wait]]] = {}  # by engine: (tenant, waits)

    def wait_for(self, engine_id: str, tenant: str, why: WaitReason, now_s: float) -> None:
        """The tenant is the first of an engine's line, and waits for `why` from now on."""
        first, waits = self._waits.get(engine_id, _NOBODY)
        if first != tenant:
            self._waits[engine_id] = tenant, [Wait(why, now_s)]
        elif waits[-1].why != why and len(waits) < MOST_WAITS:
            waits.append(Wait(why, now_s))

    def taken(self, engine_id: str, tenant: str) -> Iterable[Wait]:
        """A call of the tenant leaves an engine's line: return its waits as the first one."""
        if self._waits.get(engine_id, _NOBODY)[0] != tenant:
            return ()
        return self._waits.pop(engine_id)[1]


_NOBODY: Final[tuple[str | None, list[Wait]]] = (None, [])


def seconds_by_reason(waits: Sequence[Wait], end_s: float) -> dict[str, float] | None:
    """The seconds of each reason until `end_s`, to the millisecond; None without any."""
    found: dict[str, float] = {}
    for wait, following in pairwise((*waits, Wait("turn", end_s))):
        found[wait.why] = found.get(wait.why, 0.0) + following.since_s - wait.since_s
    return {why: rounded for why, seconds in found.items() if (rounded := round(seconds, 3)) > 0} or None
