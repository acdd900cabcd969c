"""A restarted gateway takes over another gateway's engines, so that it has all changes by the admin API.

Only other gateways may ask for the list of engines, because the list has the engines' API keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import msgspec
import structlog
from starlette.types import ASGIApp, Receive, Scope, Send

from plait.gateway.asgi import send_whole
from plait.gateway.guests.peers.forwarding import Forwarding
from plait.gateway.membership.engine_set import EngineMember
from plait.gateway.others import ADMIN_KEY, Checked, Forwarded, is_of_peer

PATH: Final = "/admin/engine-set"
MAX_BYTES: Final = 2**24

log = structlog.get_logger(__name__)


class Engines(Protocol):
    def members(self) -> list[EngineMember]:
        """All engines, with the settings to connect to them."""

    def take_over(self, members: Sequence[EngineMember]) -> None:
        """Replace all engines by those of another gateway."""


class SharedEngines:
    """ASGI middleware that answers other gateways with the list of `engines`. `take_over` asks for theirs."""

    def __init__(self, app: ASGIApp, forwarding: Forwarding, engines: Engines) -> None:
        self._app = app
        self._forwarding = forwarding
        self._engines = engines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == PATH and is_of_peer(scope):
            await send_whole(send, 200, (), msgspec.msgpack.encode(self._engines.members()))
        else:
            await self._app(scope, receive, send)

    async def take_over(self) -> None:
        """Take over the engines of a gateway that answers. If none answers, the configured engines stay."""
        told = await self._forwarding.ask_all(Forwarded("GET", PATH, [], Checked(ADMIN_KEY)), MAX_BYTES)
        for name, answer in told.items():
            if answer is not None and answer.status == 200:
                members = msgspec.msgpack.decode(answer.body, type=list[EngineMember])
                self._engines.take_over(members)
                log.info("engines taken over", gateway=name, engines=len(members))
                return
