"""Gateways that are killed in the middle of programs, and the clients that come back to the next one.

Each round starts programs, kills the gateway (SIGKILL) at a random moment, and starts it again at once. Clients send
what has got no answer again, as SDKs do. Every program has to end with the texts that an undisturbed run gives, and all
that a client was told has to be there. Those that come as streams have no seed: their texts differ each time, so that a
value which was told and not stored is another one later. The log then says how often each call was started.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from e2e.programs import Program, ProgramCall, chained_by_client, map_reduce, texts, whole
from e2e.sdk import async_client
from e2e.server_process import Server
from e2e.servers import Fleet, Launcher
from plait.gateway.guests.durability.recorded import decoded
from plait.gateway.guests.programs.core.record import Started, Submitted, ValueSet
from plait.gateway.guests.store.sqlite_keeper import SqliteKeeper
from plait.gateway.streams import SESSION, StoredStream
from tests.waiting import WITHIN_S

MAX_ATTEMPTS = 3
AGAIN_S = 0.02
GIVES_UP_S = 3 * WITHIN_S
"""A store may be away for as long as a test waits for most things."""
PROGRAMS_A_ROUND = 9
WAYS = ("program", "submits", "headers", "stream")
"""Of the programs that come as streams, engines give another text each time."""


def software_team(files: int) -> Program:
    """MetaGPT's shape: an architect, a coder for each file, reviewers who see all code, and coders who revise by all
    reviews.
    """
    names = range(files)
    code, reviews = (" ".join(f"{{{{{kind}{n}}}}}" for n in names) for kind in ("code", "review"))
    return [
        ProgramCall("design", "Design a game.", max_tokens=40),
        *(ProgramCall(f"code{n}", f"{{{{design}}}} Write file {n}.", n, 40) for n in names),
        *(ProgramCall(f"review{n}", f"{code} Review file {n}.", n, 30) for n in names),
        *(ProgramCall(f"revised{n}", f"{{{{code{n}}}}} Revise by {reviews}", n, 40) for n in names),
    ]


PROGRAMS: Mapping[str, Program] = {"team": software_team(4), "map-reduce": map_reduce(8)}


@dataclass
class Findings:
    """What the rounds have shown."""

    kills: int = 0
    programs: int = 0
    told: int = 0
    """Values and acceptances that clients were told of."""
    again: int = 0
    """Requests that were sent again."""
    recovery_s: list[float] = field(default_factory=list)
    """From the start of the process until the first answer of a session."""
    starts: Counter[int] = field(default_factory=Counter)
    """How many calls were started so often, by the log."""
    problems: list[str] = field(default_factory=list)


class Client:
    """One program's client, which sends again what gets no answer."""

    def __init__(
        self, http: httpx.AsyncClient, findings: Findings, session: str, kind: str, fields: Mapping[str, Any]
    ) -> None:
        self._fields = fields
        self._http = http
        self._findings = findings
        self._way = ""
        self.session = session
        self.kind = kind
        self.told: dict[str, str | None] = {}
        """Each variable that was told of; without a value if its call was accepted only."""

    async def run(self, way: str) -> None:
        """Run the program."""
        program, self._way = PROGRAMS[self.kind], way
        if way == "program":
            await self._whole(program)
        elif way == "stream":
            await self._streamed(program)
        elif way == "submits":
            await asyncio.gather(
                *(self._submit(call, body) for call, body in zip(program, whole(program), strict=True))
            )
        else:
            await asyncio.gather(*(self._chat(call) for call in program))

    async def get(self, variable: str) -> str:
        """A variable's value."""
        body = {"session_id": self.session, "semantic_var_id": variable}
        return str((await self._post("/v1/get", body)).json()["value"])

    async def check(self, expected: Mapping[str, str]) -> None:
        """The program has the values of an undisturbed run, and all that was told is one of them."""
        if self._way == "stream":
            expected = {call.output: await self.get(call.output) for call in PROGRAMS[self.kind]}
        for variable, value in self.told.items():
            self._findings.told += 1
            if value != expected[variable]:
                self._findings.problems.append(f"{self.session}: told {variable} = {value!r}")
        for call in PROGRAMS[self.kind]:
            if await self.get(call.output) != expected[call.output]:
                self._findings.problems.append(f"{self.session}: {call.output} is not what it has to be")

    async def _whole(self, program: Program) -> None:
        gets = {call.output: None for call in program[-4:]}
        calls = [{**call, **self._fields} for call in whole(program)]
        answer = await self._post("/v1/programs", {"session": self.session, "calls": calls, "gets": gets})
        self.told |= answer.json()["values"]

    async def _streamed(self, program: Program) -> None:
        """Take each value as it comes, also of a stream that breaks off before its end, and then ask again."""
        calls = [{**call, **self._fields, "seed": None} for call in whole(program)]
        body = {
            "session": self.session,
            "calls": calls,
            "gets": {call.output: None for call in program},
            "stream": True,
        }
        ends_s = time.monotonic() + GIVES_UP_S
        while time.monotonic() < ends_s:
            with suppress(httpx.TransportError):
                async with self._http.stream("POST", "/v1/programs", json=body) as answer:
                    if answer.status_code == 200 and await self._told_by(answer):
                        return
            self._findings.again += 1
            await asyncio.sleep(AGAIN_S)
        raise AssertionError(f"{self.session}: no end of a stream")

    async def _told_by(self, answer: httpx.Response) -> bool:
        """Whether a stream ends as it should. A variable whose value it says twice has to keep it."""
        kind = ""
        async for line in answer.aiter_lines():
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            elif line.startswith("data: ") and kind == "value":
                told = json.loads(line.removeprefix("data: "))
                if self.told.setdefault(told["name"], told["value"]) != told["value"]:
                    self._findings.problems.append(f"{self.session}: {told['name']} was told twice, and differs")
        return kind == "done"

    async def _submit(self, call: ProgramCall, body: Mapping[str, Any]) -> None:
        await self._post("/v1/submit", {**body, **self._fields, "session_id": self.session})
        self.told[call.output] = None
        self.told[call.output] = await self.get(call.output)

    async def _chat(self, call: ProgramCall) -> None:
        headers = {"plait-session": self.session, "plait-output": call.output}
        if call.inputs:
            headers["plait-inputs"] = ",".join(call.inputs)
        answer = await self._post("/v1/chat/completions", {**call.request(call.prompt), **self._fields}, headers)
        self.told[call.output] = answer.json()["choices"][0]["message"]["content"]

    async def _post(self, path: str, body: object, headers: Mapping[str, str] | None = None) -> httpx.Response:
        """The answer, however often it has to be asked for."""
        ends_s = time.monotonic() + GIVES_UP_S
        while time.monotonic() < ends_s:
            try:
                answer = await self._http.post(path, json=body, headers=headers)
            except httpx.TransportError:
                pass
            else:
                if answer.status_code != 503:
                    if answer.status_code != 200:
                        self._findings.problems.append(f"{self.session} {path}: {answer.status_code} {answer.text}")
                        answer.raise_for_status()
                    return answer
            self._findings.again += 1
            await asyncio.sleep(AGAIN_S)
        raise AssertionError(f"{self.session}: no answer of {path}")


class Killing:
    """Rounds over one gateway, whose store is the file `path`. `chance` decides on the moments.

    Each call has these `fields`, too.
    """

    def __init__(self, gateway: Server, path: Path, chance: random.Random, **fields: Any) -> None:
        self.path = path
        self.gateway = gateway
        self._fields = fields
        self._chance = chance
        self._expected: dict[str, dict[str, str]] = {}
        self._span_s = 0.0
        self.findings = Findings()
        self._clients: list[Client] = []

    async def start(self) -> None:
        """Run each program undisturbed. The servers run."""
        async with async_client(self.gateway) as client:
            for kind, program in PROGRAMS.items():
                self._expected[kind] = texts(await chained_by_client([client], program, **self._fields))
        begun_s = time.monotonic()
        await self._round("undisturbed", kill_after_s=None)
        self._span_s = time.monotonic() - begun_s

    async def kill(self, number: int) -> None:
        """A round: programs, and a kill in the middle of them."""
        try:
            await self._round(f"kill-{number}", kill_after_s=self._chance.uniform(0, self._span_s))
        except AssertionError as failure:
            state = "runs" if self.gateway.running else "has ended"
            failure.add_note(f"the gateway {state}:\n{self.gateway.log_tail(40)}")
            raise
        self.findings.kills += 1

    async def _round(self, name: str, kill_after_s: float | None) -> None:
        async with httpx.AsyncClient(base_url=self.gateway.url, timeout=WITHIN_S, trust_env=False) as http:
            clients = [
                Client(http, self.findings, f"{name}-{n}", ("team", "map-reduce")[n % 2], self._fields)
                for n in range(PROGRAMS_A_ROUND)
            ]
            self._clients += clients
            running = [asyncio.create_task(one.run(WAYS[n % len(WAYS)])) for n, one in enumerate(clients)]
            if kill_after_s is not None:
                await asyncio.sleep(kill_after_s)
                await self._restart(http)
            await asyncio.gather(*running)
            for one in clients:
                await one.check(self._expected[one.kind])
        self.findings.programs += len(clients)

    async def _restart(self, http: httpx.AsyncClient) -> None:
        """Kill the gateway and start it again. What clients had been told by then has to be there."""
        await asyncio.to_thread(self.gateway.kill)
        told = {one: dict(one.told) for one in self._clients[-PROGRAMS_A_ROUND:]}
        begun_s = time.monotonic()
        self.gateway.start()
        probe = Client(http, self.findings, self._clients[0].session, self._clients[0].kind, {})
        await probe.get(PROGRAMS[probe.kind][-1].output)
        self.findings.recovery_s.append(time.monotonic() - begun_s)
        for one, known in told.items():
            for variable, value in known.items():
                if (found := await one.get(variable)) != value and value is not None:
                    self.findings.problems.append(f"{one.session}: {variable} was {value!r} and is {found!r}")

    def end(self) -> Findings:
        """Stop, and read from the log how often each call was started."""
        self.gateway.stop()
        keeper = SqliteKeeper(self.path)
        keeper.open()
        sessions = [stream for stream in keeper.read() if stream.key.kind == SESSION]
        keeper.close()
        for stream in sessions:
            self._count(stream)
        if len(sessions) != len(self._clients):
            self.findings.problems.append(f"{len(self._clients)} sessions were made, and {len(sessions)} are there")
        return self.findings

    def _count(self, stream: StoredStream) -> None:
        events = [decoded(change) for change in stream.events]
        starts = Counter(event.call_id for event in events if isinstance(event, Started))
        made = Counter(event.call_id for event in events if isinstance(event, ValueSet))
        for event in events:
            if isinstance(event, Submitted):
                self.findings.starts[starts[event.call_id]] += 1
                if starts[event.call_id] > MAX_ATTEMPTS:
                    self.findings.problems.append(f"{stream.key.name}: {event.call_id} was started too often")
                if made[event.call_id] != 1:
                    self.findings.problems.append(
                        f"{stream.key.name}: {event.call_id} has {made[event.call_id]} values"
                    )


async def killed(launch: Launcher, folder: Path, kills: int, seed: int, report: Sequence[Any] = ()) -> Findings:
    """So many rounds on embedded engines. Each of `report` is called with the findings after each."""
    path = folder / "store" / "sessions.db"
    engines = [launch.engine(f"demo-{number}", time_scale=10, options=("--random",)) for number in range(2)]
    gateway = launch.gateway(engines, store={"path": str(path)}, sessions={"max_attempts": MAX_ATTEMPTS})
    await asyncio.to_thread(Fleet(gateway, {engine.name: engine for engine in engines}).start)
    killing = Killing(gateway, path, random.Random(seed))
    await killing.start()
    for number in range(kills):
        await killing.kill(number)
        for tell in report:
            tell(killing.findings)
    return await asyncio.to_thread(killing.end)
