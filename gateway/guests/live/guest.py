"""The guest that shows the fleet: the live page, and what is wrong now."""

from __future__ import annotations

from plait.gateway.doors import Guest, House, StoreState
from plait.gateway.guests.live.feed import Feed
from plait.gateway.guests.live.routes import LiveApi
from plait.gateway.guests.live.signs import SeenFleet
from plait.gateway.guests.live.status import StatusApi, Watched, fingerprint
from plait.gateway.others import Others


class LiveGuest(Guest):
    """Offers its `Feed`, and what is `Watched`."""

    def __init__(self, house: House) -> None:
        kernel, others = house.kernel, house.find(Others) or Others()
        self._supervisor = kernel.supervisor
        keeps_receipts = kernel.relay.told_receipt is not None and kernel.config.receipts.max_bytes > 0
        feed = Feed(kernel.router, kernel.relay, kernel.tenants.label, keeps_receipts=keeps_receipts)
        house.offer(Feed, feed)
        seen = SeenFleet(
            kernel.router,
            kernel.admission,
            kernel.metrics,
            kernel.tenants.label,
            [model.name for model in kernel.config.models],
            kernel.reloading,
            house.find(StoreState) or StoreState(),
            others,
        )
        self._watched = house.offer(Watched, Watched(seen))
        kernel.registry.register(self._watched)
        self.routes = [
            *LiveApi(kernel.router, kernel.admission, feed, kernel.admin, is_stopping=kernel.is_stopping).routes,
            *StatusApi(self._watched, kernel.admin, others, fingerprint(house.secret)).routes,
        ]

    def start(self) -> None:
        self._supervisor.start("problems", self._watched.watch)
