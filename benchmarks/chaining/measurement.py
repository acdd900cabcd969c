"""CPU times of single calls, plain and chained, in a gateway that holds many others or none."""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, Final, NamedTuple

from benchmarks.chaining.served import Request, Served, completion

HELD_SESSIONS = 1_000
CALLS_A_SESSION = 10
CHAINS, CHAIN_CALLS = 8, 8
"""Of a program: 64 calls in a session, and a get of each chain's end."""
CRITERIA: Final[Mapping[str, Any]] = {
    "none": None,
    "throughput": "throughput",
    "latency": "latency",
    "ttft_ms, tpot_ms": {"slo_ttft_ms": 500, "slo_tpot_ms": 40},
    "jct_ms": {"slo_jct_ms": 600_000},
}
"""What each get of a program asks for, by name."""
PROMPT = "Go on with this, and keep to what was said so far. " * 20
"""What a prompt holds beside its number and the value before it: 1,000 characters, and so has each answer."""
TEXT = "x" * len(PROMPT)
ANSWER = completion(TEXT)
ALL_HELD_S = 60.0
HOLD_TURNS = 5
"""Turns of the event loop after which a request is held: it waits for nothing else on its way there."""


class Hop(NamedTuple):
    """CPU seconds of a call that takes another's value.

    `hold_s` is for holding its request. `wake_s` is from the answer that it waits for to its own being at the engine;
    the settling of the call before is in it, which is as much as this one has.
    """

    hold_s: float
    wake_s: float


class Measurement:
    """Sends calls to a gateway, one at a time where time is taken; no two prompts begin alike.

    Times are those of `clock`, in seconds: of the process's CPU, unless it is another.
    """

    def __init__(self, served: Served, clock: Callable[[], float] = time.process_time) -> None:
        self._served = served
        self._clock = clock
        self._numbers = count(1)
        self._held: list[Request] = []
        self._held_sessions: list[str] = []

    async def plain(self, calls: int) -> list[float]:
        """CPU seconds of plain calls, each from its request to its answer, with the prompts that chained ones have."""
        served, times_s = self._served, []
        for _ in range(calls):
            prompt = self._prompt(TEXT)
            began_s = self._clock()
            request = served.complete(prompt)
            await served.engine.calls(1)
            served.engine.answer(ANSWER)
            await request.task
            times_s.append(self._clock() - began_s)
            assert request.status == 200
        return times_s

    async def program(self, criteria: Any) -> list[Hop]:
        """The hops of a program: chains beside each other in one session, whose ends clients wait for with `criteria`.

        All is sent before the first call is answered.
        """
        served, session = self._served, f"program-{next(self._numbers)}"
        gets = [served.get(session, f"v{chain}_{CHAIN_CALLS}", criteria) for chain in range(CHAINS)]
        requests = [served.complete(self._prompt(""), session=session, output=f"v{chain}_1") for chain in range(CHAINS)]
        await _turns()
        holds_s = []
        for number in range(1, CHAIN_CALLS):
            for chain in range(CHAINS):
                began_s = self._clock()
                requests.append(self._link(session, f"v{chain}_", number))
                await _turns()
                holds_s.append(self._clock() - began_s)
        await served.engine.calls(CHAINS)
        wakes_s = []
        for _ in holds_s:
            began_s = self._clock()
            served.engine.answer(ANSWER)
            await served.engine.calls(CHAINS)
            wakes_s.append(self._clock() - began_s)
        for _ in range(CHAINS):
            served.engine.answer(ANSWER)
        await asyncio.gather(*(request.task for request in (*requests, *gets)))
        assert {request.status for request in (*requests, *gets)} == {200}
        await served.end(session)
        return list(map(Hop, holds_s, wakes_s))

    async def hold(self) -> None:
        """Send the calls that are to be held: in each session a chain whose first call waits for what never comes."""
        self._held_sessions = [f"held-{next(self._numbers)}" for _ in range(HELD_SESSIONS)]
        for session in self._held_sessions:
            self._held += [self._link(session, "v", number) for number in range(CALLS_A_SESSION)]
            await _turns()
        async with asyncio.timeout(ALL_HELD_S):  # while memory is traced, requests wait for their turns
            while await self._served.held_calls() < HELD_SESSIONS * CALLS_A_SESSION:
                await _turns()
        gc.collect()

    async def let_go(self) -> None:
        """End the sessions of the held calls."""
        for session in self._held_sessions:
            await self._served.end(session)
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

    def _link(self, session: str, name: str, number: int) -> Request:
        """Send a call of a chain: it takes the value before it and makes the next."""
        taken, made = f"{name}{number}", f"{name}{number + 1}"
        return self._served.complete(self._prompt(f"{{{{{taken}}}}}"), session=session, inputs=taken, output=made)

    def _prompt(self, value: str) -> str:
        return f"{next(self._numbers)} {PROMPT}{value}"


async def _turns() -> None:
    for _ in range(HOLD_TURNS):
        await asyncio.sleep(0)
