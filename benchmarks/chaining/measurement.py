"""CPU times of single calls, plain and chained."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

from benchmarks.chaining.served import Request, Served, completion

CHAINS, CHAIN_CALLS = 8, 8
"""Of a program: 64 calls in a session, and a get of each chain's end."""
PROMPT = "Go on with this, and keep to what was said so far. " * 20
"""What a prompt holds beside its number and the value before it: 1,000 characters, and so has each answer."""
TEXT = "x" * len(PROMPT)
ANSWER = completion(TEXT)
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

    def _link(self, session: str, name: str, number: int) -> Request:
        """Send a call of a chain: it takes the value before it and makes the next."""
        taken, made = f"{name}{number}", f"{name}{number + 1}"
        return self._served.complete(self._prompt(f"{{{{{taken}}}}}"), session=session, inputs=taken, output=made)

    def _prompt(self, value: str) -> str:
        return f"{next(self._numbers)} {PROMPT}{value}"


async def _turns() -> None:
    for _ in range(HOLD_TURNS):
        await asyncio.sleep(0)
