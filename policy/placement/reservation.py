"""Reservations: places on engines for the calls of a task group that are still to come.

See docs/design/placement.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import inf

from plait.policy.types import Call, Placement


@dataclass(frozen=True, slots=True)
class Reservation:
    """A group's allocation. `places` counts the places left on each engine. `running` calls have taken a place each.

    `seen_s` is the time at which a call of the group was last booked.
    """

    places: Mapping[str, int]
    running: int = 0
    seen_s: float = -inf


NOTHING_RESERVED = Reservation({})


class Reservations:
    """The reservations of a fleet, by group and model, since an engine serves only some models. The router owns them.

    A reservation exists while it has places or running calls. Each booked call of the group renews it. The places are
    given up if `window_s` pass without a booked call, or if one of their engines is lost.
    """

    __slots__ = ("_groups", "_window_s")

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._groups: dict[tuple[str, str], Reservation] = {}

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def running(self) -> int:
        """How many calls of task groups are booked on engines."""
        return sum(reservation.running for reservation in self._groups.values())

    def of(self, call: Call) -> Reservation | None:
        """The reservation of the call's group; None for a call without one."""
        return None if call.group is None else self._of((call.group.group_id, call.model))

    def book(self, call: Call, placement: Placement, now_s: float) -> None:
        """A call was booked. If it has a group, keep the places that its placement left for the group's other calls."""
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
        """Give up the places of each group whose last call was booked more than the window ago."""
        for key, reservation in list(self._groups.items()):
            if reservation.seen_s < now_s - self._window_s:
                self._keep(key, replace(reservation, places={}))

    def restrict(self, eligible: Mapping[str, Collection[str]]) -> None:
        """Give up all places of a group if one of them is on an engine that is no longer `eligible` for its model.

        The group's next call then allocates new places.
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
