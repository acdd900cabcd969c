"""The guest by which an operator changes engines."""

from __future__ import annotations

from plait.gateway.doors import Guest, House
from plait.gateway.guests.engines.admin import AdminApi


class EnginesGuest(Guest):
    """The routes under `/admin/engines`."""

    def __init__(self, house: House) -> None:
        kernel = house.kernel
        self.routes = AdminApi(kernel.engines, kernel.admin, kernel.bodies).routes
