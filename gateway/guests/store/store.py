"""The store that a gateway has opened."""

from __future__ import annotations

from dataclasses import dataclass

from plait.gateway.doors import StoreState
from plait.gateway.guests.store.damage import Damage
from plait.gateway.guests.store.event_log import Keeper
from plait.gateway.guests.store.group_commit import GroupCommit


@dataclass(frozen=True)
class Store(StoreState):
    """An event log, what keeps it, and what of it was found damaged."""

    log: GroupCommit
    keeper: Keeper
    damage: Damage
    kind: str

    @property
    def problem(self) -> str | None:
        return self.log.problem
