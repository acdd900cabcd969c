"""Reservations: the engines on which a task group's calls that are still to come will run.

See docs/design/placement.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import inf

from plait.policy.types import Call, Placement


@dataclass(frozen=True, slots=True)
class Reservation:
    """A group's allocation: `places` by engine for calls to come; `running` calls have taken theirs."""

    places: Mapping[str, int]
    running: int = 0
    seen_s: float = -inf


NOTHING_RESERVED = Reservation({})


class Reservations:
    """The reservations of a fleet, by group and model, since an engine serves only some models. The router owns them.

    A reservation exists while it has places or running calls. Each booked call of the group renews it. Its places end
    when all are taken, when `window_s` pass without a booked call, or when an engine is lost.
    """

    __slots__ = ("_groups", "_window_s")

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._groups: dict[tuple[str, str], Reservation] = {}

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def running(self) -> int:
        """Calls of task groups that are on engines."""
        return sum(reservation.running for reservation in self._groups.values())

    def of(self, call: Call) -> Reservation | None:
        """The reservation of the call's group; None for a call without one."""
        return None if call.group is None else self._of((call.group.group_id, call.model))

    def book(self, call: Call, placement: Placement, now_s: float) -> None:
        """A call was booked. If it has a group, reserve the places that its placement decided for the others."""
        if call.group is None:
            return
        key = call.group.group_id, call.model
        before = self._of(key)
        places = before.places if placement.places is None else placement.places
        self._keep(key, Reservation(places, before.running + 1, now_s))

    def leave(self, call: Call) -> None:
        """A booked call has ended."""
        if call.group is None:
            return
        key = call.group.group_id, call.model
        before = self._of(key)
        self._keep(key, replace(before, running=before.running - 1))

    def age(self, now_s: float) -> None:
        """Give up the places of groups without a booked call for longer than the window."""
        for key, reservation in list(self._groups.items()):
            if reservation.seen_s < now_s - self._window_s:
                self._keep(key, replace(reservation, places={}))

    def restrict(self, eligible: Mapping[str, Collection[str]]) -> None:
        """Give up all places of a group if some are on an engine that is no longer `eligible` for its model.

        The rest of the group is then allocated anew.
        """
        for key, reservation in list(self._groups.items()):
            if not set(reservation.places) <= set(eligible.get(key[1], ())):
                self._keep(key, replace(reservation, places={}))

    def check(self) -> None:
        """Assert the invariants; for tests."""
        for reservation in self._groups.values():
            assert reservation.running >= 0
            assert all(places > 0 for places in reservation.places.values())
            assert reservation.running or reservation.places, "an empty reservation was left behind"

    def _of(self, key: tuple[str, str]) -> Reservation:
        return self._groups.get(key, NOTHING_RESERVED)

    def _keep(self, key: tuple[str, str], reservation: Reservation) -> None:
        if reservation.running or reservation.places:
            self._groups[key] = reservation
        else:
            self._groups.pop(key, None)
