"""A steady load of calls that share a document, at a pace that leaves the engines idle at times."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from e2e.rolling_load import REFUSED, Ended, client, post
from e2e.server_process import Server
from tests.waiting import WITHIN_S

HEALTHY, OTHER, THIRD = "blue", "red", "green"
TENANTS: Final = [{"name": name, "api_keys": [f"{name}-key"]} for name in (HEALTHY, OTHER, THIRD)]
DOCUMENT: Final = "A document that all questions share, of some length. " * 60
WORKERS, PAUSE_S = 6, 0.5

Body = Callable[[str], dict[str, Any]]
"""The request of a name that no other has."""


def asked(text: str, max_tokens: int = 32, **fields: Any) -> dict[str, Any]:
    """A chat completion of a whole answer."""
    messages = [{"role": "user", "content": text}]
    return {"model": "demo", "messages": messages, "max_tokens": max_tokens, "ignore_eos": True, **fields}


def of_all_kinds(name: str) -> dict[str, Any]:
    """Questions whose beginning is cached, and prompts that no engine has seen; of each, one of two is streamed."""
    kind = int(name.rpartition("-")[2]) % 4
    if kind % 2:
        return unlike_any_other(name, stream=kind == 1)
    return asked(f"{DOCUMENT} Question {name}?", stream=kind == 0)


def unlike_any_other(name: str, times: int = 60, **fields: Any) -> dict[str, Any]:
    """A prompt whose beginning is in no cache."""
    return asked(f"{name}. " + f"Another document, {name}, which nobody shares. " * times, **fields)


@dataclass
class Load:
    """Workers that each send one call after the other to the first of `servers` that takes it.

    `body` makes the next request, which is to have its first token within `ttft_ms`: a time that a busy machine keeps,
    too. `ended` has how calls ended.
    """

    servers: list[Server]
    body: Body
    tenant: str = HEALTHY
    pause_s: float = PAUSE_S
    ttft_ms: int | None = round(1e3 * WITHIN_S)
    ended: Counter[str] = field(default_factory=Counter)
    stopping: bool = False

    async def work(self, number: int) -> None:
        """Send calls until stopped."""
        await asyncio.sleep(number * self.pause_s / WORKERS)
        for turn in itertools.count():
            if self.stopping:
                return
            ended = await self._send(f"{self.tenant}-{number}-{turn}")
            self.ended[ended.how] += 1
            await asyncio.sleep(self.pause_s)

    async def _send(self, name: str) -> Ended:
        headers = {"authorization": f"Bearer {self.tenant}-key"}
        if self.ttft_ms is not None:
            headers["plait_slo_ttft_ms"] = str(self.ttft_ms)
        body = self.body(name)
        for server in list(self.servers):
            async with client(server) as http:
                ended = await post(http, body, **headers)
            if ended.how != REFUSED:
                break
        return ended

    def lost(self) -> dict[str, int]:
        """The calls that did not get a whole answer."""
        return {how: count for how, count in self.ended.items() if how != "complete"}


@asynccontextmanager
async def sending(load: Load, workers: int = WORKERS) -> AsyncIterator[Load]:
    """Calls while the context lasts; at its end the last ones are awaited."""
    tasks = [asyncio.create_task(load.work(number)) for number in range(workers)]
    try:
        yield load
    finally:
        load.stopping = True
        async with asyncio.timeout(2 * WITHIN_S):
            await asyncio.gather(*tasks)


class Crowd:
    """Calls of a tenant, as many at once as there are `callers`; `go` ends them, answered or not."""

    def __init__(self, load: Load, callers: int) -> None:
        self._load = load
        self._callers = callers
        self._tasks: list[asyncio.Task[None]] = []

    def come(self) -> None:
        """Begin to call."""
        self._tasks = [asyncio.create_task(self._load.work(number)) for number in range(self._callers)]

    async def go(self) -> None:
        """Give all calls up."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
