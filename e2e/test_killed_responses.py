"""Responses in the background over gateways that are killed: none is lost, none ends twice, and no event is missed.

Those that are followed as streams have a seed, so that a text that is cut is generated again. The others have none: a
response that were made again after its end would be another one.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import openai
import pytest
from openai import AsyncOpenAI

from e2e.sdk import async_client
from e2e.server_process import Server, eventually
from e2e.servers import GATEWAYS, Fleet, Launcher
from e2e.several_gateways import Gateways
from tests.waiting import WITHIN_S

A_ROUND = 20
"""Responses between two kills."""

TOKENS = 200
ENDED = {"completed", "incomplete", "failed", "cancelled"}
AGAIN = (openai.APIConnectionError, openai.InternalServerError, openai.RateLimitError)
"""What a client asks again after: no answer, every 503, and 429 of a gateway that is busy."""

T = TypeVar("T")


async def again(ask: Callable[[], Awaitable[T]]) -> T:
    """What the SDK answers, however often it has to be asked."""
    async with asyncio.timeout(3 * WITHIN_S):
        while True:
            try:
                return await ask()
            except AGAIN:
                await asyncio.sleep(0.05)


class Client:
    """The client of one response, which notes what it was told and what is wrong."""

    def __init__(self, sdk: AsyncOpenAI, number: int, problems: list[str]) -> None:
        self._sdk = sdk
        self._number = number
        self._problems = problems
        self.end: Any = None

    async def run(self, chance: random.Random) -> None:
        """Begin a response, and follow it to its end."""
        ways = (self._polled, self._polled, self._streamed, self._cancelled)
        await ways[self._number % len(ways)](chance.uniform(0, 1.0))

    async def check(self) -> None:
        """The response is what its client was told."""
        found = await again(lambda: self._sdk.responses.retrieve(self.end.id))
        if found != self.end:
            self._problems.append(f"{self._number}: {found!r} was {self.end!r}")

    async def _begin(self, **fields: Any) -> Any:
        return await again(
            lambda: self._sdk.responses.create(
                model="demo",
                input=f"Tell {self._number}.",
                background=True,
                max_output_tokens=TOKENS,
                extra_body={"ignore_eos": True, **fields},
            )
        )

    async def _ended(self, response_id: str) -> Any:
        async with asyncio.timeout(3 * WITHIN_S):
            while True:
                found = await again(lambda: self._sdk.responses.retrieve(response_id))
                if found.status in ENDED:
                    return found
                await asyncio.sleep(0.1)

    async def _polled(self, _after_s: float) -> None:
        self.end = await self._ended((await self._begin()).id)
        if self.end.status != "incomplete":
            self._problems.append(f"{self._number}: {self.end!r}")

    async def _cancelled(self, after_s: float) -> None:
        response = await self._begin()
        await asyncio.sleep(after_s)
        self.end = await again(lambda: self._sdk.responses.cancel(response.id))
        if self.end.status not in {"cancelled", "incomplete"}:
            self._problems.append(f"{self._number}: {self.end!r}")

    async def _streamed(self, _after_s: float) -> None:
        response, events = await self._begin(seed=self._number), list[Any]()
        while not events or events[-1].type != "response.incomplete":
            await again(lambda: self._follow(response.id, events))
        if [event.sequence_number for event in events] != list(range(len(events))):
            self._problems.append(f"{self._number}: {[event.sequence_number for event in events]}")
        self.end = await self._ended(response.id)
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        if (text, events[-1].response) != (self.end.output_text, self.end):
            self._problems.append(f"{self._number}: {text!r} is not {self.end.output_text!r}")

    async def _follow(self, response_id: str, events: list[Any]) -> None:
        """Take the stream up after the last event."""
        after = {"starting_after": events[-1].sequence_number} if events else {}
        try:
            async with await self._sdk.responses.retrieve(response_id, stream=True, **after) as stream:
                async for event in stream:
                    events.append(event)  # noqa: PERF401 - one that breaks off has brought those before
        except openai.APIError as error:
            if isinstance(error, openai.APIStatusError | openai.APIConnectionError):
                raise
        except Exception as error:
            raise openai.APIConnectionError(request=None) from error  # type: ignore[arg-type]


def members(gateway: Server) -> list[Server]:
    return [*gateway.members] if isinstance(gateway, Gateways) else [gateway]


def restart(gateway: Server) -> None:
    """Kill it, and start it again."""
    gateway.kill()
    gateway.start()
    gateway.wait_until_ready()


def total(fleet: Fleet, metric: str) -> float:
    return sum(engine.metric(f"plait_engine_{metric}") for engine in fleet.engines.values())


@pytest.mark.parametrize("kills", [5, pytest.param(30, marks=pytest.mark.nightly)])
async def test_none_is_lost_and_none_ends_twice(launch: Launcher, tmp_path: Path, kills: int) -> None:
    chance, problems, clients = random.Random(kills), list[str](), list[Client]()
    engines = [launch.engine(f"demo-{number}", time_scale=3, options=("--random",)) for number in range(2)]
    store: Any = {} if GATEWAYS > 1 else {"store": {"path": str(tmp_path / "store" / "sessions.db")}}
    gateway = launch.gateway(engines, sessions={"max_attempts": 100}, **store)
    fleet = Fleet(gateway, {engine.name: engine for engine in engines})
    await asyncio.to_thread(fleet.start)
    async with async_client(gateway) as sdk:
        async with asyncio.TaskGroup() as running:
            for _ in range(kills):
                new = [Client(sdk, len(clients) + number, problems) for number in range(A_ROUND)]
                clients += new
                for client in new:
                    running.create_task(client.run(chance))
                await asyncio.sleep(chance.uniform(0.2, 1.5))
                await asyncio.to_thread(restart, chance.choice(members(gateway)))
        for client in clients:
            await client.check()
    assert problems == []
    assert {client.end.status for client in clients} == {"cancelled", "incomplete"}
    cancelled = sum(client.end.status == "cancelled" for client in clients)
    assert total(fleet, "aborted_calls_total") > cancelled, "no call was interrupted"
    eventually(lambda: total(fleet, "calls_running") == total(fleet, "calls_waiting") == 0)
    assert total(fleet, "output_tokens_total") == total(fleet, "output_tokens_total")
