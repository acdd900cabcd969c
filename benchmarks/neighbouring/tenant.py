"""The tenant that behaves: short calls at a steady rate, and some prompts of 20 kB."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, Final

from e2e.faults.raw_client import CHAT, Client
from e2e.faults.verdicts import is_good

SHORT_EVERY_S: Final = 0.02
LONG_EVERY_S: Final = 0.1
LONG_TEXT: Final = "another prompt " * 1_400
"""20 kB: such prompts are tokenized in threads (`OFF_LOOP_BYTES`)."""
TIMEOUT_S: Final = 30.0


@dataclass
class Times:
    """Seconds of calls from the moment at which each was due, and how many of them failed."""

    short_s: list[float] = field(default_factory=list)
    long_s: list[float] = field(default_factory=list)
    failed: int = 0


class Tenant:
    """Sends calls for `model` with its own API key. A call is sent when it is due, also if others are still open."""

    def __init__(self, port: int, model: str, key: str) -> None:
        self._client = Client(port, TIMEOUT_S)
        self._model = model
        self._headers = {"authorization": f"Bearer {key}"}

    async def call(self, time_s: float) -> Times:
        """Call for so long, and wait for the last answers."""
        times, began_s = Times(), time.monotonic()
        dues = [(began_s + n * SHORT_EVERY_S, "Hello", times.short_s) for n in range(round(time_s / SHORT_EVERY_S))]
        dues += [(began_s + n * LONG_EVERY_S, LONG_TEXT, times.long_s) for n in range(round(time_s / LONG_EVERY_S))]
        async with asyncio.TaskGroup() as calls:
            for number, (due_s, text, into) in enumerate(sorted(dues, key=lambda due: due[0])):
                await asyncio.sleep(due_s - time.monotonic())
                calls.create_task(self._one(due_s, f"{number} {text}", times, into))
        await self._client.close()
        return times

    async def _one(self, due_s: float, text: str, times: Times, into: list[float]) -> None:
        body: dict[str, Any] = {"model": self._model, "messages": [{"role": "user", "content": text}], "max_tokens": 4}
        answer = await self._client.post(CHAT, body, self._headers)
        into.append(answer.ended_s - due_s)
        times.failed += not is_good(body, answer)
