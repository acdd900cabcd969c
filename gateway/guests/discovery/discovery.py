"""Engines found by name: one for each address of a DNS name, such as a headless service of Kubernetes.

The name is looked up periodically. A new address becomes an engine; the engine of a missing address is removed when it
has no calls. If a lookup fails or finds nothing, all engines stay: the DNS fails more often than all engines at once.
Where a name has IPv4 and IPv6 addresses, an engine may have one of each: only those of IPv4 are used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from urllib.parse import urlsplit

import msgspec
import structlog

from plait.backends.errors import ConflictError
from plait.backends.http.host import addresses, is_ipv6
from plait.gateway.config.sections import EngineConfig, ServiceConfig
from plait.gateway.membership.engine_set import EngineSet
from plait.gateway.supervision import Supervisor

Lookup = Callable[[str, int], Awaitable[Collection[str]]]
"""The addresses of a host. Raises OSError."""

LEFT_OUT = "an engine with an IPv4 and an IPv6 address would be used as two"

log = structlog.get_logger(__name__)


class Discovery:
    """Keeps the engines of `services` in line with DNS, until its tasks are cancelled."""

    def __init__(
        self,
        services: Collection[ServiceConfig],
        engines: EngineSet,
        supervisor: Supervisor,
        lookup: Lookup = addresses,
    ) -> None:
        self._services = services
        self._engines = engines
        self._supervisor = supervisor
        self._lookup = lookup
        self._found: dict[str, dict[str, EngineConfig]] = {service.name: {} for service in services}
        self._said: dict[str, str] = {}

    def open(self) -> None:
        for service in self._services:
            self._supervisor.start(f"discovery:{service.name}", partial(self._follow, service))

    async def _follow(self, service: ServiceConfig) -> None:
        while True:
            await self.look_up(service)
            await asyncio.sleep(service.interval_s)

    async def look_up(self, service: ServiceConfig) -> None:
        """Look a name up once, and apply the changes."""
        parts = urlsplit(service.url)
        assert parts.hostname is not None
        try:
            found = await self._lookup(parts.hostname, parts.port or 80)
        except OSError as error:
            self._say(service, str(error.strerror or error))
            return
        if not found:
            self._say(service, "the name has no address")
            return
        known, wanted = self._found[service.name], {one for one in found if not is_ipv6(one)} or set(found)
        self._say_what_is_left_out(service, set(found) - wanted)
        coming = [engine_at(service, address) for address in sorted(wanted - known.keys())]
        going = [known.pop(address) for address in sorted(known.keys() - wanted)]
        for address, engine in zip(sorted(wanted - known.keys()), coming, strict=True):
            self._add(engine)
            known[address] = engine
        for engine in going:
            if engine.name in self._engines:
                self._engines.leave(engine.name, [other.name for other in coming])

    def _add(self, engine: EngineConfig) -> None:
        try:
            self._engines.put(engine)
        except (ConflictError, ValueError) as error:
            log.error("engine not taken over", engine=engine.name, problem=str(error))  # noqa: TRY400 - not a defect

    def _say(self, service: ServiceConfig, problem: str) -> None:
        """Log a problem once, until the name is found again or the problem is another one."""
        if self._said.get(service.name) != problem:
            self._said[service.name] = problem
            log.warning("name not found, its engines stay", service=service.name, url=service.url, problem=problem)

    def _say_what_is_left_out(self, service: ServiceConfig, left_out: Collection[str]) -> None:
        """Log once that addresses are left out. Logs again after a lookup that failed or left out none."""
        if not left_out:
            self._said.pop(service.name, None)
        elif self._said.get(service.name) != LEFT_OUT:
            self._said[service.name] = LEFT_OUT
            log.warning(
                "only addresses of one family are used",
                service=service.name,
                url=service.url,
                used="IPv4",
                left_out=sorted(left_out),
                problem=LEFT_OUT,
                hint="give the service a name that has addresses of one family",
            )


def at_address(url: str, address: str) -> str:
    parts = urlsplit(url)
    host = f"[{address}]" if ":" in address else address
    return parts._replace(netloc=host if parts.port is None else f"{host}:{parts.port}").geturl()


def engine_at(service: ServiceConfig, address: str) -> EngineConfig:
    fields = {name: getattr(service, name) for name in EngineConfig.__struct_fields__}
    fields |= {"url": at_address(service.url, address), "name": f"{service.name}-{address}"}
    return msgspec.convert(fields, EngineConfig)
