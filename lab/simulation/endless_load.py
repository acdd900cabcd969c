"""The demo's endless load: questions about shared documents and tools, and conversations."""

from __future__ import annotations

import asyncio
import math
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import msgspec

from plait.backends.errors import PlaitError
from plait.backends.http.client import HttpClient
from plait.lab.simulation.shared_prefixes import load_prefixes
from plait.lab.simulation.workload import popular

DEFAULT_CALLS_PER_S: Final = 30.0

MOST_OPEN: Final = 400
"""The most open calls. Further ones are not sent."""

CONVERSATIONS: Final = 12
MOST_TURNS: Final = 8
CONVERSATION_SHARE: Final = 0.3
"""The share of calls that continue a conversation. The others ask about a shared prefix."""

COLD_SHARE: Final = 0.08
"""The share of calls about a new document, whose whole prompts have to be computed while other calls wait."""

SWING: Final = 0.6
WAVE_S: Final = 60.0
"""The rate swings by this share of itself with this period, so that queues grow and drain."""

ZIPF: Final = 1.1

LATE_S: Final = 0.25
"""A gateway that takes longer to say that it lives gets too little of the machine."""
LOOK_S: Final = 1.0
LEAST_SHARE, MORE_SHARE = 1 / 32, 0.05
"""While the gateway is late, half as many calls are sent each time, then gradually more."""


class EndlessLoad:
    """An endless sequence of prompts, the same for the same seed. The state is `CONVERSATIONS` conversations."""

    def __init__(self, seed: int = 1) -> None:
        self._rng = random.Random(seed)  # noqa: S311 - a reproducible workload, not a secret
        prefixes = load_prefixes(None)
        self._asked = popular(prefixes, self._rng, ZIPF)
        self._documents = [prefix for prefix in prefixes if prefix.kind == "document"]
        self._conversations: list[list[dict[str, str]]] = [[] for _ in range(CONVERSATIONS)]

    def next_body(self, model: str) -> dict[str, Any]:
        rng = self._rng
        tools: list[dict[str, Any]] = []
        kind = rng.random()
        if kind < CONVERSATION_SHARE:
            messages = self._next_turn()
        elif kind < CONVERSATION_SHARE + COLD_SHARE:
            document = rng.choice(self._documents)
            messages = replace(document, text=f"Edition {self._number()}. {document.text}").messages_for("Sum it up.")
        else:
            prefix = next(self._asked)
            messages, tools = prefix.messages_for(f"{self._number()} {rng.choice(prefix.questions)}"), [*prefix.tools]
        return {
            "model": model,
            "messages": messages,
            "max_tokens": max(4, round(rng.lognormvariate(3.2, 0.5))),
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | ({"tools": tools} if tools else {})

    def pause_s(self, calls_per_s: float, since_s: float, swing: float) -> float:
        """The time until the next call, `since_s` seconds after the first."""
        wave = 1.0 + swing * math.sin(2 * math.pi * since_s / WAVE_S)
        return self._rng.expovariate(calls_per_s * wave)

    def _next_turn(self) -> list[dict[str, str]]:
        place = self._rng.randrange(CONVERSATIONS)
        conversation = self._conversations[place]
        if len(conversation) >= 2 * MOST_TURNS:
            conversation = self._conversations[place] = []
        if not conversation:
            conversation += next(self._asked).messages_for(f"{self._number()} What is this about?")
        else:
            conversation += [
                {"role": "assistant", "content": f"It is as the text says, see note {self._number()}."},
                {"role": "user", "content": f"{self._rng.choice(next(self._asked).questions)} {self._number()}"},
            ]
        return list(conversation)

    def _number(self) -> int:
        return self._rng.randrange(10_000, 1_000_000)


async def send_endlessly(
    url: str, model: str, calls_per_s: float, swing: float = SWING, on_late: Callable[[], object] = lambda: None
) -> None:
    """Send calls to a gateway until cancelled. Failures are only in the gateway's log.

    `on_late` is called once, when the machine first takes less than half of the load.
    """
    load, client, loop = EndlessLoad(), HttpClient(url), asyncio.get_running_loop()
    began_s = next_s = loop.time()
    share = 1.0

    async def follow() -> None:
        nonlocal share, on_late
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                async with asyncio.timeout(LATE_S):
                    await (await client.request("GET", "/health", [])).gather()
                share = min(1.0, share + MORE_SHARE)
            except (TimeoutError, PlaitError):  # late, or too much at once for it
                share = max(LEAST_SHARE, share / 2)
            if share < 1 / 2:
                on_late()
                on_late = lambda: None  # noqa: E731

    tasks = {loop.create_task(follow())}
    try:
        while True:
            next_s = max(next_s, loop.time() - LATE_S)  # what a late loop has missed is not sent all at once
            next_s += load.pause_s(share * calls_per_s, next_s - began_s, swing)
            await asyncio.sleep(max(0.0, next_s - loop.time()))
            if len(tasks) < MOST_OPEN:
                task = loop.create_task(_send(client, load.next_body(model)))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.aclose()


async def _send(client: HttpClient, body: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json")]
    try:
        response = await client.request("POST", "/v1/chat/completions", headers, msgspec.json.encode(body))
        while await response.read_chunk():
            pass
    except PlaitError:
        pass  # the gateway stops


@contextmanager
def running_load(
    url: str, model: str, calls_per_s: float | None, swing: float = SWING, on_late: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Run the load in a thread for the duration of the context; None: no load."""
    if calls_per_s is None:
        yield
        return
    loop = asyncio.new_event_loop()
    task = loop.create_task(send_endlessly(url, model, calls_per_s, swing, on_late))
    thread = threading.Thread(target=_run, args=(loop, task), daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()


def _run(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    try:
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    finally:
        loop.close()
