"""The guest that stores sessions and responses, so that they outlive the gateway."""

from __future__ import annotations

from functools import partial

from plait.gateway.doors import Guest, House
from plait.gateway.guests.durability.durability import Durability
from plait.gateway.guests.peers.membership import Membership
from plait.gateway.guests.programs.chained_calls import ChainedCalls
from plait.gateway.guests.programs.core.record import Records
from plait.gateway.guests.responses.stored_responses import ResponseLog, StoredResponses
from plait.gateway.guests.store.store import Store


class DurabilityGuest(Guest):
    """Offers the records of sessions and responses. Needs a `Store`, and when it starts, programs and responses."""

    def __init__(self, house: House) -> None:
        self._house = house
        self.durability = house.offer(Durability, Durability(house[Store], house.find(Membership)))
        house.offer(Records, self.durability)
        house.offer(ResponseLog, self.durability)

    def start(self) -> None:
        house, kernel = self._house, self._house.kernel
        runner, responses = house[ChainedCalls].runner, house[StoredResponses]
        kernel.supervisor.start("store", partial(self.durability.recover, runner, responses, kernel.router))

    def begin_stop(self) -> None:
        self.durability.hand_over(self._house[ChainedCalls].runner)

    async def stop(self) -> None:
        await self.durability.close()
