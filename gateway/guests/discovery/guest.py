"""The guest that finds engines by DNS, and writes down those that were found."""

from __future__ import annotations

from functools import partial

from plait.gateway.doors import Guest, House
from plait.gateway.guests.discovery.discovery import Discovery
from plait.gateway.guests.discovery.found_config import FoundConfig


class DiscoveryGuest(Guest):
    """Follows `[[services]]`, and does what `plait serve --save` asks for."""

    def __init__(self, house: House) -> None:
        self._kernel, self._save_to = house.kernel, house.save_to
        self._discovery = Discovery(self._kernel.config.services, self._kernel.engines, self._kernel.supervisor)

    def start(self) -> None:
        kernel = self._kernel
        self._discovery.open()
        if self._save_to is not None:
            found = FoundConfig(kernel.config, kernel.router, kernel.tokenizers.specification)
            kernel.supervisor.start("save", partial(found.save, self._save_to))
