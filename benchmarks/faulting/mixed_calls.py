"""A mixed load: whole answers, streams, and programs of chained calls. Each call's fate is counted.

A call's time begins when its inputs are there: in a program, when the call before it was answered.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from itertools import count
from typing import Any, Final

from e2e.faults.completions import completion_of
from e2e.faults.modes import REFUSAL
from e2e.faults.raw_client import CHAT, Answer, Client
from e2e.faults.verdicts import complaints, is_good

MODEL: Final = "demo"
LINKS: Final = 5
"""Calls of a program."""
PAUSE_S: Final = 0.1
"""After an answer, so that the load leaves some of the machine to others."""


class MixedCalls:
    """`fates` counts the calls: `good`, `refused` by an engine, `failed cleanly` with their status, or `unclean`."""

    def __init__(self, port: int, workers: int, dice: random.Random, timeout_s: float) -> None:
        self.fates: Counter[str] = Counter()
        self.unclean: list[str] = []
        self.worst_s = 0.0
        self._client = Client(port, timeout_s)
        self._workers = workers
        self._dice = dice
        self._numbers = count()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_over = False

    def start(self) -> None:
        """Send calls until `stop`."""
        self._is_over = False
        self._tasks = [asyncio.create_task(self._work()) for _ in range(self._workers)]

    async def stop(self) -> None:
        """Wait until all calls have ended."""
        self._is_over = True
        await asyncio.gather(*self._tasks)
        await self._client.close()

    async def _work(self) -> None:
        while not self._is_over:
            number = next(self._numbers)
            if self._dice.random() < 1 / LINKS:
                await self._program(number)
            else:
                await self._plain(number)
            await asyncio.sleep(PAUSE_S)

    async def _plain(self, number: int) -> None:
        body = _body(f"Question {number}?", is_streamed=self._dice.random() < 0.5)
        self._count(body, await self._client.post(CHAT, body))

    async def _program(self, number: int) -> None:
        """A chain, all of its calls sent at once; each takes the text of the one before it."""
        session, asked, sent, text = f"s{number}", [], [], ""
        for link in range(LINKS):
            is_streamed = self._dice.random() < 0.5
            headers = {"plait-session": session, "plait-output": f"v{link}"}
            before = ""
            if link:
                headers["plait-inputs"], before = f"v{link - 1}", f"{{{{v{link - 1}}}}}"
            sent.append(self._client.post(CHAT, _body(f"{before} Step {link}.", is_streamed=is_streamed), headers))
            asked.append(_body(f"{text} Step {link}.", is_streamed=is_streamed))
            text = completion_of(asked[-1]).text
        before_s = 0.0
        for body, answer in zip(asked, await asyncio.gather(*sent), strict=True):
            self._count(body, answer, before_s)
            before_s = answer.time_s
        await self._client.delete(f"/v1/sessions/{session}")

    def _count(self, body: dict[str, Any], answer: Answer, before_s: float = 0.0) -> None:
        """Judge an answer. The call before it was answered after `before_s`."""
        self.worst_s = max(self.worst_s, answer.time_s - before_s)
        found = sorted(set(complaints(answer, frozenset())))
        if is_good(body, answer) and not found:
            self.fates["good"] += 1
        elif not found and REFUSAL in answer.body:
            self.fates["refused"] += 1
        elif not found and (answer.status != 200 or b'"error"' in answer.body):
            self.fates[f"failed cleanly: {answer.status if answer.status != 200 else 'event'}"] += 1
        else:
            self.fates["unclean"] += 1
            self.unclean.append(f"{found or 'wrong text'}: {body} {answer.status} {answer.body[-300:]!r}")


def _body(text: str, *, is_streamed: bool) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 8, "stream": is_streamed}
