"""Clients that wait for variables of a program in every way there is, and when each was told what."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from e2e.faults.raw_client import CHAT, Answer, Client
from e2e.faults.verdicts import events
from e2e.server_process import NO_TLS, Server

GET, PROGRAMS = "/v1/get", "/v1/programs"


@dataclass(frozen=True)
class Told:
    """What a waiter was told at `at_s`: the status of its answer, and the error in it; None if there was no error.

    `status` is None for an event in a stream, whose status was sent before.
    """

    how: str
    variable: str
    at_s: float
    status: int | None
    error: Mapping[str, Any] | None


class ProgramStream:
    """A client that has sent a program and reads the stream of its answer, until it goes."""

    def __init__(self, gateway: Server, body: Mapping[str, Any], how: str) -> None:
        self.told: dict[str, Told] = {}
        self.is_over = False
        self._url = gateway.url + PROGRAMS
        self._body = {**body, "stream": True}
        self._how = how
        self._begun = asyncio.Event()
        self._news = asyncio.Condition()
        self._task = asyncio.create_task(self._read())

    async def begun(self) -> None:
        """Return once the answer has begun: the program is in its session."""
        begun = asyncio.create_task(self._begun.wait())
        await asyncio.wait([begun, self._task], return_when=asyncio.FIRST_COMPLETED)
        if not self._begun.is_set():
            begun.cancel()
            await self._task  # raises what went wrong

    async def of(self, variables: Sequence[str]) -> list[Told]:
        """What it was told of these variables; waits until it was told of them all."""
        async with self._news:
            await self._news.wait_for(lambda: self.told.keys() >= set(variables))
        return [self.told[name] for name in variables]

    async def ended(self) -> None:
        """Return at the end of the stream."""
        await self._task

    async def go(self) -> None:
        """Break off the connection."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _read(self) -> None:
        async with (
            httpx.AsyncClient(verify=NO_TLS, trust_env=False, timeout=None) as client,
            client.stream("POST", self._url, json=self._body) as answer,
        ):
            assert answer.status_code == 200, await answer.aread()
            self._begun.set()
            kind = ""
            async for line in answer.aiter_lines():
                field, _, data = line.partition(": ")
                if field == "event":
                    kind = data
                elif field == "data":
                    await self._take(kind, msgspec.json.decode(data))

    async def _take(self, kind: str, data: dict[str, Any]) -> None:
        self.is_over |= kind == "done"
        if kind in {"value", "failed"}:
            assert data["name"] not in self.told, "told twice"
            self.told[data["name"]] = Told(self._how, data["name"], time.monotonic(), None, data.get("error"))
            async with self._news:
                self._news.notify_all()


@asynccontextmanager
async def program_stream(gateway: Server, body: Mapping[str, Any], how: str) -> AsyncIterator[ProgramStream]:
    """The client, once its answer has begun; it goes at the end of the context."""
    stream = ProgramStream(gateway, body, how)
    try:
        await stream.begun()
        yield stream
    finally:
        await stream.go()


class Waiters:
    """Clients on connections of their own that wait for variables of one branch."""

    def __init__(self, client: Client, session: str, variables: Sequence[str], tag: str) -> None:
        self._session = session
        waits = [*self._gets(client, variables), self._program(client, variables)]
        waits += [self._call(client, variables[-1], f"{tag}_{stream}", stream=stream) for stream in (False, True)]
        self._tasks = [asyncio.create_task(wait) for wait in waits]

    @property
    def answered(self) -> int:
        """How many have an answer."""
        return sum(task.done() for task in self._tasks)

    async def told(self) -> list[Told]:
        """What they were told, once all have their answers."""
        return [told for answers in await asyncio.gather(*self._tasks) for told in answers]

    async def go(self) -> None:
        """Break off their connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _gets(self, client: Client, variables: Iterable[str]) -> Iterator[Coroutine[Any, Any, list[Told]]]:
        for variable in variables:
            for stream in (False, True):
                body = {"session_id": self._session, "semantic_var_id": variable, "stream": stream}
                yield self._ask(f"get, stream={stream}", variable, client.post(GET, body))

    async def _program(self, client: Client, variables: Sequence[str]) -> list[Told]:
        """All of them with one request, which is answered once all have ended."""
        answer = await client.post(PROGRAMS, {"session": self._session, "gets": dict.fromkeys(variables)})
        body = msgspec.json.decode(answer.body)
        assert body["error"] == body["errors"][variables[0]]
        return [Told("program", name, answer.ended_s, answer.status, body["errors"].get(name)) for name in variables]

    def _call(self, client: Client, variable: str, output: str, *, stream: bool) -> Coroutine[Any, Any, list[Told]]:
        """A call on an OpenAI route that takes the variable."""
        text = {"model": "demo", "messages": [{"role": "user", "content": f"{{{{{variable}}}}}"}], "stream": stream}
        headers = {"plait-session": self._session, "plait-inputs": variable, "plait-output": output}
        return self._ask(f"call, stream={stream}", variable, client.post(CHAT, text, headers))

    async def _ask(self, how: str, variable: str, request: Awaitable[Answer]) -> list[Told]:
        answer = await request
        assert not answer.broken, answer
        last = events(answer)[-1] if _is_stream(answer) else msgspec.json.decode(answer.body)
        status = None if _is_stream(answer) else answer.status
        return [Told(how, variable, answer.ended_s, status, last.get("error"))]


def _is_stream(answer: Answer) -> bool:
    return (answer.header("content-type") or "").startswith("text/event-stream")
