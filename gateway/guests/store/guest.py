"""The guest that has a store in a file. One that gateways share is opened by `gateway/guests/peers`."""

from __future__ import annotations

from pathlib import Path

from plait.gateway.doors import Guest, House, StoreState
from plait.gateway.guests.store.damage import Damage
from plait.gateway.guests.store.group_commit import GroupCommit
from plait.gateway.guests.store.metrics import StoreCollector
from plait.gateway.guests.store.sqlite_keeper import SqliteKeeper
from plait.gateway.guests.store.store import Store
from plait.gateway.streams import RECORD_VERSION


class StoreGuest(Guest):
    """Offers the `Store` at `[store] path`. Raises ValueError for one that can never be used."""

    def __init__(self, house: House) -> None:
        self._registry = house.kernel.registry
        settings, damage = house.kernel.config.store, Damage()
        assert settings.path is not None
        keeper = SqliteKeeper(Path(settings.path), settings.synchronous, version=RECORD_VERSION, damage=damage)
        keeper.check()
        self._store = house.offer(Store, Store(GroupCommit(keeper), keeper, damage, "SQLite"))
        house.offer(StoreState, self._store)

    def start(self) -> None:
        self._registry.register(StoreCollector(self._store.log))
        self._registry.register(self._store.damage)
