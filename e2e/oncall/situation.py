"""A situation of docs/oncall.md: brought about under a steady load, named in its time, and over once it is mended."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, ClassVar, Final

import httpx

from e2e.oncall.load import TENANTS, WORKERS, Load, of_all_kinds
from e2e.rolling_load import client
from e2e.server_process import Server
from e2e.servers import PATIENT, Fleet, Launcher
from tests.waiting import WITHIN_S

ADMIN: Final = {"authorization": "Bearer the-admin-key"}
LOOK_S: Final = 0.5
MODEL: Final = "demo"
MOST_S: Final = 2 * WITHIN_S
"""Until a problem is named, or over: a minute, for what has to last, and what may happen meanwhile."""

Named = tuple[str, str]
"""A code of a problem, and what it is about."""


class Watch:
    """Asks a gateway twice a second what is wrong. `seen` has all that was named, `now` what is."""

    def __init__(self, servers: list[Server]) -> None:
        self._servers = servers
        self.now: frozenset[Named] = frozenset()
        self.seen: dict[Named, str] = {}

    async def look(self) -> None:
        """Ask, until cancelled. A gateway that does not answer is asked again."""
        while True:
            try:
                async with client(self._servers[0]) as http:
                    answer = await http.get("/admin/status", headers=ADMIN)
            except httpx.HTTPError:
                await asyncio.sleep(LOOK_S)
                continue
            problems = answer.json()["problems"]
            self.now = frozenset((one["code"], one["about"]) for one in problems)
            for one in problems:
                self.seen.setdefault((one["code"], one["about"]), one["sentence"])
            await asyncio.sleep(LOOK_S)

    async def until(self, named: frozenset[Named], *, there: bool) -> float:
        """Seconds until all of these are named, or (not `there`) none. Raises `AssertionError` if that is never so."""
        begun_s = time.monotonic()
        while not named <= self.now if there else named & self.now:
            took_s = time.monotonic() - begun_s
            what = "not named" if there else "still named"
            assert took_s <= MOST_S, f"{sorted(named)} {what} after {took_s:.0f} s; named: {sorted(self.now)}"
            await asyncio.sleep(LOOK_S / 5)
        return time.monotonic() - begun_s


class Situation:
    """What goes wrong with a gateway over embedded engines, and how it is mended."""

    part: ClassVar[str]
    """The heading in docs/oncall.md."""

    problems: frozenset[Named] = frozenset()
    """What is to be named."""

    beside: ClassVar[frozenset[str]] = frozenset()
    """Codes that may be named, too: what follows from the situation."""

    before_s: ClassVar[float] = 8.0
    """Seconds of healthy load before."""

    loses_calls: ClassVar[bool] = False
    """Whether calls of the healthy load may fail."""

    callers: ClassVar[int] = WORKERS
    """Calls of the healthy load at one time."""

    quiet_s: ClassVar[float] = 0.0
    """If no problem is expected, none is named for so long."""

    def __init__(self, launch: Launcher, folder: Path) -> None:
        self.launch = launch
        self.folder = folder
        self.engines = self.make_engines()
        self.servers = self.make_gateways()
        self.load = Load(self.servers, of_all_kinds)
        self.watch = Watch(self.servers)

    @property
    def gateway(self) -> Server:
        """The gateway, the first of several."""
        return self.servers[0]

    def make_engines(self) -> dict[str, Server]:
        """Engines by their names."""
        return {name: self.launch.engine(name, time_scale=1) for name in ("a", "b", "c")}

    def make_gateways(self) -> list[Server]:
        """Gateways over them."""
        return [self.launch.gateway(self.engines.values(), **self.sections())]

    def sections(self) -> dict[str, Any]:
        """Of the configuration: the default one, with keys for the admin API and for tenants."""
        return {
            "server": {"admin_key": ADMIN["authorization"].removeprefix("Bearer ")},
            "upstream": PATIENT,
            "tenants": TENANTS,
        }

    def start(self) -> None:
        """Start all servers, and wait for them."""
        Fleet(self.gateway, self.engines).start()

    async def stop(self) -> None:
        """Stop what `launch` does not."""

    async def begin(self) -> None:
        """Bring the situation about."""
        raise NotImplementedError

    async def shows(self) -> None:
        """Check what else shows the situation once it is named."""

    async def mend(self) -> None:
        """Mend it."""
        raise NotImplementedError

    def admin(self, method: str, path: str, **options: Any) -> httpx.Response:
        """The answer of the gateway's admin API."""
        answer = self.gateway.request(method, f"/admin{path}", headers=ADMIN, **options)
        assert answer.status_code < 300, answer.text
        return answer
