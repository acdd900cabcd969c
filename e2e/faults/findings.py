"""What a gateway made of one mode: calls under it, while the engine was out, and after it was well again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from e2e.faults.fleet import ScriptedEngine
from e2e.faults.modes import Kinds, Mode
from e2e.faults.raw_client import CHAT, Answer, Client
from e2e.faults.verdicts import is_good
from e2e.faults.watching import Watch

CALLS, CONCURRENCY = 64, 16
HEAVY_CALLS, HEAVY_CONCURRENCY = 24, 12
"""Of 12 calls under way each of the two engines has about six. Three failures in a row eject one."""
AFTERWARDS = 16
TRICKLE_S = 0.15
SETTLE_S = 3.0
"""A mode about probes has shown itself by then: they are a second apart."""
BUSY_RETRIES = 2
"""So often the official clients ask again."""


@dataclass(frozen=True)
class Asked:
    """A call and its answer."""

    body: dict[str, Any]
    answer: Answer

    @property
    def is_streamed(self) -> bool:
        return bool(self.body["stream"])

    @property
    def is_good(self) -> bool:
        return is_good(self.body, self.answer)


@dataclass
class Finding:
    """`out_s` and `back_s` are None if it did not happen. `hits` counts how often the mode struck."""

    mode: Mode
    calls: list[Asked] = field(default_factory=list)
    while_out: list[Asked] = field(default_factory=list)
    after: list[Asked] = field(default_factory=list)
    out_s: float | None = None
    back_s: float | None = None
    was_out: bool = False
    hits: int = 0
    state: str = ""
    outstanding: float = 0.0
    failures: list[str] = field(default_factory=list)
    """The lines of the gateway's log about calls that failed on the engine."""

    @property
    def all_calls(self) -> list[Asked]:
        return [*self.calls, *self.while_out, *self.after]


class Trial:
    """Runs one mode on one engine, beside a healthy one that serves the same model."""

    def __init__(self, mode: Mode, engine: ScriptedEngine, client: Client, watch: Watch) -> None:
        self._mode = mode
        self._engine = engine
        self._client = client
        self._watch = watch
        self._number = 0
        self._finding = Finding(mode)

    async def run(self) -> Finding:
        """All of it."""
        finding, watch, name = self._finding, self._watch, self._engine.name
        begun_s = time.monotonic()
        await self._engine.set_mode(self._mode.name)
        if self._mode.scope == "probes":
            await asyncio.sleep(SETTLE_S)
        calls, concurrency = (HEAVY_CALLS, HEAVY_CONCURRENCY) if self._mode.heavy else (CALLS, CONCURRENCY)
        is_ejected = self._mode.health == "ejected"
        async with self._trickle(finding.calls, is_wanted=is_ejected):
            waiting = asyncio.create_task(watch.until(lambda: watch.was_out(name, begun_s)))
            await self._load(finding.calls, calls, concurrency)
            if is_ejected:
                finding.out_s = await waiting
            waiting.cancel()
            with suppress(asyncio.CancelledError):
                await waiting
        await self._load(finding.while_out, AFTERWARDS, concurrency)
        await watch.look()
        finding.was_out, finding.state = watch.was_out(name, begun_s), watch.state(name)
        await self._heal()
        await self._load(finding.after, AFTERWARDS, concurrency)
        await watch.until(lambda: watch.outstanding.get(name) == 0)
        finding.outstanding = watch.outstanding.get(name, -1.0)
        return finding

    async def _heal(self) -> None:
        """Heal the engine and wait until it is up."""
        finding, watch, name = self._finding, self._watch, self._engine.name
        finding.hits = (await self._engine.stats())["hits"]
        await self._engine.heal()
        async with self._trickle(finding.after, is_wanted=True):
            finding.back_s = await watch.until(lambda: watch.state(name) == "up")

    async def _load(self, into: list[Asked], calls: int, concurrency: int) -> None:
        numbers = iter(range(calls))

        async def work() -> None:
            for _ in numbers:
                await self._call(into)

        await asyncio.gather(*(work() for _ in range(concurrency)))

    async def _call(self, into: list[Asked]) -> None:
        self._number += 1
        number, of = self._number, self._mode.of
        streamed = number % 2 == 0 if of is Kinds.BOTH else of is Kinds.STREAMED
        body: dict[str, Any] = {"model": self._mode.name, "max_tokens": 8, "stream": streamed}
        text = f"Question {number} about {self._mode.name}: what now?"
        is_chat = number % 3 > 0
        body |= {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
        into.append(Asked(body, await self._answer(CHAT if is_chat else "/v1/completions", body)))

    async def _answer(self, path: str, body: dict[str, Any]) -> Answer:
        """Where the gateway itself has no time, as beside others on a small machine, ask again as clients do."""
        for _ in range(BUSY_RETRIES):
            answer = await self._client.post(path, body)
            if b'"gateway_busy"' not in answer.body:
                return answer
            await asyncio.sleep(float(answer.header("retry-after") or 1.0))
        return await self._client.post(path, body)

    @asynccontextmanager
    async def _trickle(self, into: list[Asked], *, is_wanted: bool) -> Any:
        """A call now and then, until the end of the context."""
        is_over = False

        async def trickle() -> None:
            while is_wanted and not is_over:
                await asyncio.sleep(TRICKLE_S)
                await self._call(into)

        task = asyncio.create_task(trickle())
        try:
            yield
        finally:
            is_over = True
            await task


async def run_all(trials: Sequence[Callable[[], Awaitable[Finding]]], at_once: int, apart_s: float) -> list[Finding]:
    """Run so many trials at once, their beginnings apart."""
    slots = asyncio.Semaphore(at_once)

    async def run(number: int, trial: Callable[[], Awaitable[Finding]]) -> Finding:
        await asyncio.sleep(number * apart_s)
        async with slots:
            return await trial()

    return await asyncio.gather(*(run(number, trial) for number, trial in enumerate(trials)))


def wrong_calls(finding: Finding) -> Iterator[Asked]:
    """The calls that could have succeeded and did not."""
    for asked in finding.calls:
        if finding.mode.succeeds.has(streamed=asked.is_streamed) and not asked.is_good:
            yield asked
