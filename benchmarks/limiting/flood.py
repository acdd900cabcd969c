"""A tenant that sends more than the gateway can take: `... limiting.flood PORT RATE SECONDS CHARACTERS`.

Open loop: calls begin at random times, so many a second, however many are open. A rate of 0 asks for what the gateway
can take: a few clients that wait for each answer. It prints what came of the calls as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import msgspec
import uvloop

from benchmarks.plain.answering_engine import MODEL
from e2e.faults.raw_client import CHAT, Answer, Client

KEY: Final = "flood"
CLIENTS: Final = 32
"""Of the closed loop."""
TIMEOUT_S: Final = 60.0
TOKENS: Final = 8
SEED: Final = 7


@dataclass(slots=True)
class Came:
    """What came of a flood's calls: how many by status, and those whose error is not of OpenAI's shape."""

    statuses: dict[str, int] = field(default_factory=dict)
    unshaped: int = 0
    seconds: float = 0.0
    shown: str = ""

    def add(self, answer: Answer) -> None:
        """Count an answer."""
        status = "none" if answer.broken else str(answer.status)
        self.statuses[status] = self.statuses.get(status, 0) + 1
        if answer.broken or (answer.status != 200 and not _is_shaped(answer)):
            self.unshaped += 1
            self.shown = self.shown or repr(answer)[:400]


def body(number: int, characters: int) -> dict[str, Any]:
    """A call whose prompt begins like no other."""
    text = f"{number} " + "Tell me how a gateway places calls. " * (1 + characters // 36)
    messages = [{"role": "user", "content": text[:characters]}]
    return {"model": MODEL, "messages": messages, "max_tokens": TOKENS}


async def _flood(port: int, rate: float, seconds: float, characters: int) -> Came:
    came, client, began_s = Came(), Client(port, TIMEOUT_S), time.monotonic()
    headers = {"authorization": f"Bearer {KEY}"}

    async def call(number: int) -> None:
        came.add(await client.post(CHAT, body(number, characters), headers))

    async def go_on(first: int) -> None:
        for number in range(first, sys.maxsize, CLIENTS):
            if time.monotonic() - began_s >= seconds:
                return
            await call(number)

    async with asyncio.TaskGroup() as calls:
        if not rate:
            for first in range(CLIENTS):
                calls.create_task(go_on(first))
        for number, due_s in enumerate(_dues_s(rate, seconds) if rate else ()):
            if began_s + due_s > time.monotonic():
                await asyncio.sleep(began_s + due_s - time.monotonic())
            calls.create_task(call(number))
    came.seconds = time.monotonic() - began_s
    return came


def _dues_s(rate: float, seconds: float) -> Iterator[float]:
    """Random times, so many a second."""
    times, due_s = random.Random(SEED), 0.0
    while (due_s := due_s + times.expovariate(rate)) < seconds:
        yield due_s


def _is_shaped(answer: Answer) -> bool:
    """Whether it is an error as OpenAI's API has them."""
    try:
        error = msgspec.json.decode(answer.body)["error"]
        return bool(error["message"] and error["type"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return False


if __name__ == "__main__":
    os.nice(10)  # a client has its own machine: it takes no CPU time from the gateway
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    port, rate, seconds, characters = sys.argv[1:]
    print(json.dumps(asdict(uvloop.run(_flood(int(port), float(rate), float(seconds), int(characters))))))
