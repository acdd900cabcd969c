"""The load, a process of its own: `python -m benchmarks.faulting.load PORT MODEL CALLS CONCURRENCY TIMEOUT_S`.

It prints the outcome of the first CALLS calls as a line of JSON, and sends further calls until a line comes in.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

import msgspec

from e2e.faults.raw_client import CHAT, Answer, Client
from e2e.faults.verdicts import is_good

MAX_TOKENS = 8
SLOW_S = 1.2
"""A call that takes longer has waited for something: engines need 0.2 s."""


@dataclass
class Outcome:
    """Times in seconds, by the machine's monotonic clock.

    `begun_s` are those of all calls, in order. `hurt_s` are the ends of the measured calls that failed
    or were slow, `abandoned` counts those that the client gave up.
    """

    began_s: float
    ended_s: float = 0.0
    calls: int = 0
    good: int = 0
    times_s: list[float] = field(default_factory=list)
    begun_s: list[float] = field(default_factory=list)
    hurt_s: list[float] = field(default_factory=list)
    abandoned: int = 0
    wrong: dict[str, int] = field(default_factory=dict)


class Load:
    """Sends calls at a concurrency, half of them streamed, each with a prompt of its own."""

    def __init__(self, port: int, model: str, calls: int, timeout_s: float) -> None:
        self._client = Client(port, timeout_s)
        self._model = model
        self._calls = calls
        self._numbers = count()
        self.outcome = Outcome(time.monotonic())
        self.is_measured = asyncio.Event()
        self._wrong: Counter[str] = Counter()

    async def work(self) -> None:
        """Send one call after the other."""
        while True:
            number = next(self._numbers)
            body = self._body(number)
            self.outcome.begun_s.append(time.monotonic())
            answer = await self._client.post(CHAT, body)
            if number < self._calls:
                self._count(answer, is_good=is_good(body, answer))

    def _body(self, number: int) -> dict[str, Any]:
        text = f"Question {number}: what is {number * 7919 % 10_007} times {number % 97}? " + "Be exact. " * 8
        messages = [{"role": "user", "content": text}]
        return {"model": self._model, "messages": messages, "max_tokens": MAX_TOKENS, "stream": number % 2 == 0}

    def _count(self, answer: Answer, *, is_good: bool) -> None:
        outcome = self.outcome
        outcome.calls += 1
        outcome.good += is_good
        outcome.times_s.append(answer.time_s)
        if not is_good or answer.time_s > SLOW_S:
            outcome.hurt_s.append(answer.ended_s)
        outcome.abandoned += answer.broken.startswith("no end")
        if not is_good:
            self._wrong[answer.broken or f"status {answer.status}"] += 1
        if outcome.calls == self._calls:
            outcome.ended_s = time.monotonic()
            outcome.wrong = dict(self._wrong)
            self.is_measured.set()


async def main() -> None:
    """Send the calls, print the outcome, go on until told to stop."""
    port, model, calls, concurrency, timeout_s = sys.argv[1:]
    load = Load(int(port), model, int(calls), float(timeout_s))
    tasks = [asyncio.create_task(load.work()) for _ in range(int(concurrency))]
    await load.is_measured.wait()
    sys.stdout.write(msgspec.json.encode(asdict(load.outcome)).decode() + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.readline)
    sys.stdout.write(msgspec.json.encode(load.outcome.begun_s).decode() + "\n")
    sys.stdout.flush()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main())
