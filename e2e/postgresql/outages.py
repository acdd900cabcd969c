"""Programs over several gateways while these, or their store, fail: what has to hold afterwards.

Clients send each request to a random gateway, and what gets no answer again, as SDKs do. Every program has to end with
the texts that an undisturbed run gives, and all that a client was told has to be there.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from e2e.killing import MAX_ATTEMPTS, PROGRAMS, WAYS, Client, Findings
from e2e.postgresql.server import new_database, shared_postgres
from e2e.programs import by_hand
from e2e.sdk import async_client
from e2e.server_process import Server, eventually
from e2e.servers import Fleet, Launcher
from plait.gateway.guests.durability.recorded import decoded
from plait.gateway.guests.programs.core.record import Started, Submitted
from plait.gateway.guests.store.postgres_keeper import PostgresKeeper
from plait.gateway.streams import SESSION
from tests.waiting import WITHIN_S

PROGRAMS_AT_ONCE: Final = 9
TAKEN_OVER_WITHIN_S: Final = 10.0
"""By a benchmark, on an idle machine. Tests wait until the sessions are taken over."""
CHAT: Final[dict[str, Any]] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
RESPONSE: Final[dict[str, Any]] = {"input": "Hi", "max_output_tokens": 4}
PLAIN: Final[Sequence[tuple[str, Mapping[str, Any], str]]] = (
    ("/v1/chat/completions", CHAT, r'"finish_reason"'),
    ("/v1/chat/completions", {**CHAT, "stream": True}, r"\[DONE\]\n\n$"),
    ("/v1/responses", RESPONSE, r'"status":"(completed|incomplete)"'),
    ("/v1/responses", {**RESPONSE, "stream": True}, r"event: response\.(completed|incomplete)"),
)
"""Requests that need no store, and what ends their answers."""


@dataclass
class Plain:
    """Plain calls and responses, one after the other: they must notice nothing, but that responses are not stored."""

    calls: int = 0
    unstored: int = 0
    """Responses that said so."""
    problems: list[str] = field(default_factory=list)


class Outages:
    """Three gateways over one database, which `kill`, `stop` and the like disturb. `chance` decides on the moments."""

    def __init__(self, launch: Launcher, chance: random.Random) -> None:
        self.url = new_database(shared_postgres())
        engines = [launch.engine(f"demo-{number}", time_scale=10) for number in range(2)]
        self.gateways = launch.gateways(engines, database=self.url, sessions={"max_attempts": MAX_ATTEMPTS})
        self.chance = chance
        self.findings = Findings()
        self.taken_over_s: list[float] = []
        """From the death of a gateway until another one answers for each of its sessions."""
        self.span_s = 0.0
        """An undisturbed round."""
        self._fleet = Fleet(self.gateways, {engine.name: engine for engine in engines})
        self._expected: dict[str, dict[str, str]] = {}
        self._sessions = 0

    async def start(self) -> None:
        """Start the servers, and run each program undisturbed."""
        await asyncio.to_thread(self._fleet.start)
        async with async_client(self.gateways) as client:
            for kind, program in PROGRAMS.items():
                self._expected[kind] = await by_hand(client, program)
        begun_s = time.monotonic()
        await self.round("undisturbed")
        self.span_s = time.monotonic() - begun_s

    async def round(self, name: str, disturb: Callable[[], Awaitable[None]] | None = None) -> None:
        """Programs, and what disturbs them. What clients had been told by then has to be there at the end."""
        async with httpx.AsyncClient(base_url=self.gateways.url, timeout=WITHIN_S, trust_env=False) as http:
            kinds = list(PROGRAMS)
            clients = [
                Client(http, self.findings, f"{name}-{n}", kinds[n % len(kinds)], {}) for n in range(PROGRAMS_AT_ONCE)
            ]
            self._sessions += len(clients)
            running = [asyncio.create_task(one.run(WAYS[n % len(WAYS)])) for n, one in enumerate(clients)]
            if disturb is not None:
                await asyncio.sleep(self.chance.uniform(0, self.span_s))
                await disturb()
            try:
                await asyncio.gather(*running)
            except AssertionError as failure:
                failure.add_note(await asyncio.to_thread(self._state, str(failure).partition(":")[0]))
                raise
            for one in clients:
                await one.check(self._expected[one.kind])
        self.findings.programs += len(clients)

    def _state(self, session: str) -> str:
        """What the store and the gateways say of a session."""
        tables = [shared_postgres().run(f"SELECT * FROM plait.{table}", self.url) for table in ("gateways", "streams")]
        said = [f"{one.url}: {one.get(f'/v1/sessions/{session}').text}" for one in self.gateways.members if one.running]
        return "\n".join([*tables, *said])

    # What disturbs.

    async def kill(self) -> None:
        """Kill a random gateway, wait until the others have its sessions, and start it again."""
        await asyncio.to_thread(self._kill, self.chance.choice(self.gateways.members))
        self.findings.kills += 1

    def _kill(self, gateway: Server) -> None:
        sessions = self.sessions_of(gateway)
        gateway.kill()
        died_s = time.monotonic()
        others = [one for one in self.gateways.members if one.running]
        for session in sessions:
            other = self.chance.choice(others)
            eventually(lambda session=session, other=other: other.get(f"/v1/sessions/{session}").status_code == 200)  # type: ignore[misc]
        self.taken_over_s.append(time.monotonic() - died_s)
        gateway.start()
        gateway.wait_until_ready()

    async def restart_one_by_one(self) -> None:
        """Restart all gateways as an update does."""
        for gateway in self.gateways.members:
            await asyncio.to_thread(gateway.terminate)
            await asyncio.to_thread(gateway.wait)
            gateway.start()
            await asyncio.to_thread(gateway.wait_until_ready)

    def sessions_of(self, gateway: Server) -> list[str]:
        """The sessions that a gateway has, by the store."""
        found = shared_postgres().run(
            "SELECT name FROM plait.streams JOIN plait.gateways ON epoch = owner "
            f"WHERE url = '{gateway.url}' AND kind = 'session'",
            self.url,
        )
        return found.split()

    @asynccontextmanager
    async def plain_calls(self) -> AsyncIterator[Plain]:
        """Plain calls beside all else."""
        plain, stops = Plain(), asyncio.Event()
        task = asyncio.create_task(self._call_plainly(plain, stops))
        try:
            yield plain
        finally:
            stops.set()
            await task

    async def _call_plainly(self, plain: Plain, stops: asyncio.Event) -> None:
        async with httpx.AsyncClient(base_url=self.gateways.url, timeout=WITHIN_S, trust_env=False) as http:
            while not stops.is_set():
                path, body, ending = PLAIN[plain.calls % len(PLAIN)]
                plain.calls += 1
                try:
                    answer = await http.post(path, json={"model": "demo", **body})
                except httpx.TransportError as error:
                    plain.problems.append(repr(error))
                else:
                    if answer.status_code != 200 or not re.search(ending, answer.text):
                        plain.problems.append(f"{path} {answer.status_code} {answer.text[-200:]}")
                    plain.unstored += "plait-durable" in answer.headers or '"durable":false' in answer.text
                await asyncio.sleep(0.02)

    # The end.

    def end(self) -> Findings:
        """Stop, and read from the log how often each call was started."""
        self.gateways.stop()
        keeper = PostgresKeeper(self.url, "http://end", release="", version=1)
        keeper.open()
        sessions = [stream for stream in keeper.read() if stream.key.kind == SESSION]
        keeper.close()
        for stream in sessions:
            events = [decoded(change) for change in stream.events]
            starts = Counter(event.call_id for event in events if isinstance(event, Started))
            for event in events:
                if isinstance(event, Submitted):
                    self.findings.starts[starts[event.call_id]] += 1
                    if starts[event.call_id] > MAX_ATTEMPTS:
                        self.findings.problems.append(f"{stream.key.name}: {event.call_id} was started too often")
        if len(sessions) != self._sessions:
            self.findings.problems.append(f"{self._sessions} sessions were made, and {len(sessions)} are there")
        return self.findings
