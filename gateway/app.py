"""Composes the gateway from its kernel and its guests, as one ASGI application."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from secrets import token_bytes
from typing import Final

from starlette.applications import Starlette
from starlette.types import ASGIApp

from plait.gateway.admission.tenants import TenantIds
from plait.gateway.api.behind_a_proxy import behind_a_proxy
from plait.gateway.api.call_api import CallApi
from plait.gateway.api.error_answers import ErrorAnswers, UnknownPath
from plait.gateway.api.own_routes import OwnRoutes
from plait.gateway.config.sections import Config
from plait.gateway.doors import Guest, House
from plait.gateway.kernel import Kernel
from plait.gateway.others import Others, Workers
from plait.gateway.server.open_requests import OpenRequests


def always(_config: Config) -> bool:
    return True


def has_collector(config: Config) -> bool:
    """Whether spans are sent. Where only the environment says where, the extra that it takes may not be there."""
    if config.tracing.endpoint is None and "OTEL_EXPORTER_OTLP_ENDPOINT" in os.environ:
        with suppress(ModuleNotFoundError):
            return find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    return config.tracing.endpoint is not None


GUESTS: Final[Mapping[str, Callable[[Config], bool]]] = {
    "store": lambda config: config.store.path is not None,
    "peers": lambda config: config.store.url is not None,
    "receipts": always,
    "account": always,
    "durability": lambda config: config.store.path is not None or config.store.url is not None,
    "programs": always,
    "translation": always,
    "responses": always,
    "forms": always,
    "batches": always,
    "tracing": has_collector,
    "live": always,
    "engines": always,
    "discovery": lambda config: bool(config.services),
}
"""The guests, each behind those that it needs, and whether a configuration needs it.

`plait.gateway.guests.NAME.guest` has the class `NameGuest`, and is imported only where it is needed.
"""


def guests_of(config: Config, save_to: Path | None = None, workers: Workers | None = None) -> list[str]:
    """The names of the guests that a gateway needs."""
    asked = {"peers": workers is not None, "discovery": save_to is not None}
    return [name for name, needs in GUESTS.items() if needs(config) or asked.get(name)]


class Gateway:
    """The kernel with its guests, and `app`, the ASGI application.

    Processes with the same `secret` (None: a random one) derive the same tenant identities, and read the same seals.
    `save_to` is the file for `plait serve --save`, `workers` are the processes that serve the same clients (None: this
    one alone). `guests` are the names of guests; None: those that the configuration needs. `accounts` is the file of
    the accounts; None: they are in `[store] url`, or in memory. Raises ValueError for tokenizers, profiles or
    certificates that cannot be loaded.
    """

    def __init__(
        self,
        config: Config,
        secret: bytes | None = None,
        save_to: Path | None = None,
        workers: Workers | None = None,
        *,
        guests: Collection[str] | None = None,
        accounts: Path | None = None,
    ) -> None:
        self.config = config
        secret = secret or token_bytes(32)
        count, index = (1, 0) if workers is None else (workers.count, workers.index)
        self.kernel = kernel = Kernel(config, TenantIds(secret), workers=count, index=index)
        self.house = House(kernel, secret, save_to, workers, accounts)
        self.guests = [self._made(name) for name in (guests_of(config, save_to, workers) if guests is None else guests)]
        self._requests = OpenRequests(self._routes(), kernel.refusals.outermost, kernel.calls.errors_of)
        self.app = behind_a_proxy(self._requests, config.server.root_path, config.server.cors_origins)

    def _made(self, name: str) -> Guest:
        room = import_module(f"plait.gateway.guests.{name}.guest")
        guest: Guest = getattr(room, f"{name.capitalize()}Guest")(self.house)
        self.kernel.admit(guest.calls, guest.before, guest.readers, guest.receipts, guest.accompany)
        return guest

    def _routes(self) -> ASGIApp:
        """All routes. Calls go straight to the data path, all other requests through Starlette."""
        kernel = self.kernel
        self.routes = [
            *kernel.routes(self.house.find(Others) or Others()),
            *(route for guest in self.guests for route in guest.routes),
            UnknownPath(kernel.calls),
        ]
        rest: ASGIApp = Starlette(
            routes=self.routes,
            exception_handlers=ErrorAnswers(kernel.calls, kernel.refusals.elsewhere).handlers,
            lifespan=lambda _app: self.running(),
        )
        for guest in self.guests:
            rest = guest.around(rest)
        rest = OwnRoutes(
            rest, kernel.bodies, kernel.calls, tenant_of=kernel.keys.check, on_refused=kernel.refusals.elsewhere
        )
        preparers = {route.path: preparer for guest in self.guests for route, preparer in guest.calls.items()}
        calls = CallApi(kernel.completions, kernel.calls, preparers, kernel.keys, kernel.bodies, kernel.refusals, rest)
        app: ASGIApp = self.house.offer(CallApi, calls)
        for guest in self.guests:
            app = guest.in_front(app)
        return app

    def needs_keys(self) -> bool:
        """Whether a call needs an API key."""
        return not self.kernel.keys.is_open

    # The gateway stops in three steps.

    def begin_stop(self) -> None:
        """From now on `/ready` answers 503, so that load balancers stop sending. Calls are still served."""
        self.kernel.is_leaving = self._requests.stopping = True
        for guest in self.guests:
            guest.begin_stop()

    def on_closed(self) -> None:
        """The server takes no more requests."""
        for guest in self.guests:
            guest.on_closed()

    def cut(self) -> None:
        """End every remaining request: with a 503, or if its stream has begun, with an error event."""
        self.kernel.relay.is_stopping = True
        self._requests.cut()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The background tasks of the gateway run within this context."""
        self.kernel.open()
        for guest in reversed(self.guests):  # what is stored is read before what shares the store asks for it
            guest.start()
        for guest in self.guests:
            await guest.until_ready()
        yield
        self.kernel.relay.is_stopping = True
        for guest in reversed(self.guests):
            await guest.stop()
        await self.kernel.close()
