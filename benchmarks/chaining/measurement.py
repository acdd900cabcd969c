"""CPU times of single calls, plain and chained, in a gateway that holds many others or none."""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from itertools import count
from typing import NamedTuple

from benchmarks.chaining.served import Request, Served

HELD_SESSIONS = 1_000
CALLS_A_SESSION = 10
CHAIN_CALLS = 10
PROMPT = "Go on with this, and keep to what was said so far. " * 20
"""What a prompt holds beside its number and the value before it: 1,000 characters, and so has each answer."""
ANSWER = "x" * len(PROMPT)
HOLD_TURNS = 5
"""Turns of the event loop after which a request is held: it waits for nothing else on its way there."""


class Chained(NamedTuple):
    """CPU seconds of one call of a chain: to hold it; from its input's coming to its engine's having it, the settling
    of the call before included, which has as much to settle as this one.
    """

    hold_s: float
    wake_s: float

    @property
    def total_s(self) -> float:
        """From the request to the settled answer."""
        return self.hold_s + self.wake_s


class Measurement:
    """Sends calls to a gateway, one at a time where CPU time is taken; no two prompts begin alike."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._numbers = count(1)
        self._held: list[Request] = []

    async def plain(self, calls: int) -> list[float]:
        """CPU seconds of plain calls, each from its request to its answer, with the prompts that chained ones have."""
        served, times_s = self._served, []
        for _ in range(calls):
            prompt = self._prompt(ANSWER)
            began_s = time.process_time()
            request = served.complete(prompt)
            await served.engine.call()
            served.engine.answer(ANSWER)
            await request.task
            times_s.append(time.process_time() - began_s)
            assert request.status == 200
        return times_s

    async def chains(self, chains: int, objective: str | None) -> list[Chained]:
        """CPU times of the calls of so many chains, each in a session of its own and sent before its first is answered.

        The first call of each is left out, since it takes no input. The last is sent with the objective.
        """
        return [call for _ in range(chains) for call in await self._chain(objective)]

    async def hold(self) -> None:
        """Send the calls that are to be held: in each session a chain whose first call waits for what never comes."""
        for session in range(HELD_SESSIONS):
            for number in range(CALLS_A_SESSION):
                self._held.append(self._link(f"held-{session}", number, None))
            await _turns()
        assert await self._served.held_calls() == HELD_SESSIONS * CALLS_A_SESSION
        gc.collect()

    async def let_go(self) -> None:
        """End the sessions of the held calls."""
        for session in range(HELD_SESSIONS):
            await self._served.end(f"held-{session}")
        await asyncio.gather(*(request.task for request in self._held))
        self._held.clear()
        gc.collect()

    async def held_bytes(self) -> float:
        """Bytes of memory that a held call takes, its request as ASGI has it included."""
        gc.collect()
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            await self.hold()
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        await self.let_go()
        return (after - before) / (HELD_SESSIONS * CALLS_A_SESSION)

    async def _chain(self, objective: str | None) -> list[Chained]:
        served, session = self._served, f"chain-{next(self._numbers)}"
        requests = [served.complete(self._prompt(""), session=session, output="v1")]
        await _turns()
        holds_s = []
        for number in range(1, CHAIN_CALLS):
            began_s = time.process_time()
            requests.append(self._link(session, number, objective if number == CHAIN_CALLS - 1 else None))
            await _turns()
            holds_s.append(time.process_time() - began_s)
        wakes_s = []
        await served.engine.call()
        for _ in range(1, CHAIN_CALLS):
            began_s = time.process_time()
            served.engine.answer(ANSWER)
            await served.engine.call()
            wakes_s.append(time.process_time() - began_s)
        served.engine.answer(ANSWER)
        await asyncio.gather(*(request.task for request in requests))
        assert all(request.status == 200 for request in requests)
        await served.end(session)
        return list(map(Chained, holds_s, wakes_s))

    def _link(self, session: str, number: int, objective: str | None) -> Request:
        """Send a call of a chain: it takes the value before it and makes the next."""
        more = {} if objective is None else {"objective": objective}
        prompt = self._prompt(f"{{{{v{number}}}}}")
        return self._served.complete(prompt, session=session, inputs=f"v{number}", output=f"v{number + 1}", **more)

    def _prompt(self, value: str) -> str:
        return f"{next(self._numbers)} {PROMPT}{value}"


async def _turns() -> None:
    for _ in range(HOLD_TURNS):
        await asyncio.sleep(0)
