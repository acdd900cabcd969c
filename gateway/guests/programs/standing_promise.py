"""The present SLO, objective and task group of a call that may run, applied to each of its steps (outputs)."""

from __future__ import annotations

from secrets import token_hex

import msgspec

from plait.gateway.calls.call import Asked
from plait.gateway.calls.relay import Relay
from plait.gateway.guests.programs.core.held_call import Promise
from plait.policy.types import NO_SLO, Slo

SHORTEST_JCT_S = 0.001
"""A step's JCT if the call's JCT is over already."""


class StandingPromise:
    """A call's present promise. `set` also changes the step that is being delivered.

    `steps_left` counts the step that is being delivered, or comes next, and those after it.
    """

    __slots__ = ("_asked", "_promise", "_relay", "steps_left")

    def __init__(self, relay: Relay) -> None:
        self.steps_left = 1
        self._relay = relay
        self._promise: Promise
        self._asked: Asked | None = None

    @property
    def asked(self) -> Asked:
        assert self._asked is not None, "no step is on its way"
        return self._asked

    def set(self, promise: Promise) -> None:
        """Replace the promise. If a step is being delivered, its engine gets the change."""
        self._promise = promise
        if self._asked is not None:
            self._asked, handle = self._renewed(self._asked, self._asked.slot.handle), self._asked.slot.handle
            assert handle is not None
            self._relay.refine(handle, self._asked.call)

    def begin(self, asked: Asked) -> None:
        self._asked = self._renewed(asked, token_hex(16))

    def end(self) -> None:
        self._asked = None

    def slo_from(self, zero_s: float) -> Slo | None:
        """A step's SLO: the call's TTFT and TPOT, and the rest of its JCT divided by the steps left.

        Its times count from `zero_s`. None without an SLO.
        """
        slo, promised_s = self._promise.slo, self._promise.since_s
        if slo is None:
            return None
        since_s = max(zero_s, promised_s)
        if slo.jct_s is not None:
            left_s = promised_s + slo.jct_s - since_s
            slo = slo._replace(jct_s=max(SHORTEST_JCT_S, left_s / self.steps_left))
        return slo.from_zero(since_s - zero_s)

    def _renewed(self, asked: Asked, handle: str | None) -> Asked:
        """The step with the present promise and this handle."""
        promise, slo = self._promise, self.slo_from(asked.arrived_s) or NO_SLO
        call = asked.call._replace(slo=slo, objective=promise.objective, group=promise.group)
        return msgspec.structs.replace(asked, call=call, slot=msgspec.structs.replace(asked.slot, handle=handle))
