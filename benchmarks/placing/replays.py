"""Replays of placements in virtual time: a call goes to the next best engine instead, and all else is as it was.

The same calls come at the same times. All later placements are the policy's own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Final, NamedTuple

from benchmarks.filling.systems import FleetSize, simulated
from plait.gateway.admission.room import AHEAD_S
from plait.gateway.guests.receipts.receipt import WEIGHTS
from plait.lab.simulation.simulate import CallRecord, Ended, SimulatedCall, Simulation
from plait.policy.costs.delay import DelayCost
from plait.policy.costs.situation import Situation, placed
from plait.policy.placement.least_delay import least_delay
from plait.policy.placement.policies import Policy
from plait.policy.types import Call, Placement

WINDOWS_S: Final = (0.0, 2.0, 8.0)
"""A replay counts the calls that are there, and those that come within so many seconds of the decision."""
OWN, THERE = ("queue", "prefill", "decode"), ("stall", "slow")
"""The parts of a cost that are of the call itself, and of the calls that are there."""


class Parts(NamedTuple):
    """Seconds of delay of the call itself, of the calls that are there, and of later ones."""

    own_s: float
    there_s: float
    later_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return sum(self)


@dataclass(frozen=True, slots=True)
class Decision:
    """A placement by `plait`: when, what the call costs on the chosen engine, and what more on the next best one."""

    call: int
    at_s: float
    cost_s: float
    margin: Parts


@dataclass(frozen=True, slots=True)
class Replay:
    """What the next best engine costs more by the TTFTs and E2Es of all counted calls, by window."""

    decision: Decision
    more: tuple[Parts, ...]


class Recorder:
    """The policy `plait`, with the decisions of these calls. One that it `forces` goes to the next best engine."""

    def __init__(self, calls: Collection[int], *, forces: bool = False) -> None:
        self.decisions: list[Decision] = []
        self.policy = Policy("plait", "plait", self.place, keeps_sessions=True, moves_waiting=True)
        self._calls = calls
        self._forces = forces

    def place(self, call: Call, situation: Situation) -> Placement:
        """The placement of a call."""
        number = int(call.call_id.removeprefix("call-"))
        if number not in self._calls:
            return least_delay(call, situation)
        found = least_delay(call, situation)
        assert found.compared is not None
        other = found.compared.next_best
        assert other is not None
        assert isinstance(found.cost, DelayCost)
        assert isinstance(other.cost, DelayCost)
        margin = less(parts(other.cost), parts(found.cost))
        self.decisions.append(Decision(number, situation.now_s, found.cost.total_s, margin))
        if not self._forces:
            return found
        engine = next(one for one in situation.engines if one.engine_id == other.engine.engine_id)
        return placed(call, engine, None, other.cached_blocks, other.cost, decode_s=other.cost.decode_s)


def replay(engines: int, calls: Sequence[SimulatedCall], base: Sequence[CallRecord], decision: Decision) -> Replay:
    """The calls again, with another decision. `base` has their records with this one."""
    arrivals_s = [call.arrives_s for call in calls]
    counted = [bisect_right(arrivals_s, decision.at_s + window_s) for window_s in WINDOWS_S]
    forcing = Recorder([decision.call], forces=True)
    forced = run(engines, calls, forcing.policy, counted[-1])
    assert forcing.decisions == [decision]
    more = (less(replayed(forced[:count], decision), replayed(base[:count], decision)) for count in counted)
    return Replay(decision, tuple(more))


def parts(cost: DelayCost) -> Parts:
    """What the policy predicts: evictions and copies are of later calls."""
    own_s, there_s = (sum(WEIGHTS[part] * getattr(cost, f"{part}_s") for part in names) for names in (OWN, THERE))
    return Parts(own_s, there_s, cost.total_s - own_s - there_s)


def replayed(records: Sequence[CallRecord], decision: Decision) -> Parts:
    """The delays of calls."""
    call = decision.call
    return Parts(*map(delays_s, (records[call : call + 1], records[:call], records[call + 1 :])))


def less(these: Parts, those: Parts) -> Parts:
    """What these are more."""
    return Parts(*(one - other for one, other in zip(these, those, strict=True)))


def delays_s(records: Sequence[CallRecord]) -> float:
    """The sum of TTFT and E2E: a second before a first token counts twice, as in the policy's cost."""
    return sum(record.ttft_s + record.e2e_s for record in records)


def run(
    engines: int, calls: Sequence[SimulatedCall], policy: Policy, awaited: int | None = None
) -> Sequence[CallRecord]:
    """The records of the calls in their order, with admission as it ships. Ends once the first `awaited` have ended."""
    _, simulation = simulated(FleetSize(engines=engines), policy, AHEAD_S, inf)
    awaited = len(calls) if awaited is None else awaited
    ended = _Countdown(awaited)
    for number, call in enumerate(calls):
        on_ended = ended if number < awaited else _nobody
        simulation.at(call.arrives_s, partial(_send, simulation, call, on_ended))
    with suppress(_AllEnded):
        simulation.run()
    return simulation.records


class _AllEnded(Exception):  # noqa: N818 - no error
    """All awaited calls have ended."""


class _Countdown:
    """Told of the end of each of so many calls, raises `_AllEnded` after the last."""

    def __init__(self, left: int) -> None:
        self._left = left

    def __call__(self, _ended: CallRecord) -> None:
        self._left -= 1
        if not self._left:
            raise _AllEnded


def _send(simulation: Simulation, call: SimulatedCall, on_ended: Ended, _now_s: float) -> None:
    simulation.send(call, on_ended)


def _nobody(_ended: CallRecord) -> None:
    pass
