"""An engine that answers most calls and never answers some."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, Final

import pytest

from e2e.faults.fleet import ScriptedEngine, two_engines
from e2e.faults.raw_client import CHAT, Client
from e2e.faults.verdicts import is_good, text_of
from plait.gateway.membership.recovery import NOTHING_SAID
from tests.waiting import WITHIN_S

LOAD_S: Final = 15.0
WORKERS: Final = 16
SHARE: Final = 0.02
PACE: Final = ("--first-s", "0.1", "--token-s", "0.05")
"""By the times between tokens the gateway tells which engine is slower than its fleet, and gives that one no calls.

Without a pace of the engines' own these times are the lag of the machine, which may be another for each engine.
"""
FORGOTTEN: Final = "serves later calls and has forgotten this one"


class Load:
    """Calls of several workers, one after the other."""

    def __init__(self, client: Client, *, some_stream: bool) -> None:
        self._client = client
        self._some_stream = some_stream
        self._begun_s: dict[int, float] = {}  # of each worker's call

    async def work(self, worker: int, ends_s: float) -> None:
        """Call until then, and for as long as calls from before wait for their answers."""
        number = 0
        while time.monotonic() < ends_s or any(begun_s < ends_s for begun_s in self._begun_s.values()):
            number += 1
            body = _body(f"Question {number} of {worker}?", stream=self._some_stream and number % 2 == 0)
            self._begun_s[worker] = time.monotonic()
            answer = await self._client.post(CHAT, body)
            del self._begun_s[worker]
            assert is_good(body, answer)
            await asyncio.sleep(0.05)


def _body(question: str, *, stream: bool) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": "demo", "messages": messages, "max_tokens": 8, "stream": stream}


async def _heal(engine: ScriptedEngine, at_s: float) -> None:
    await asyncio.sleep(at_s - time.monotonic())
    await engine.heal()


@pytest.mark.parametrize("some_stream", [False, True], ids=["whole", "mixed"])
async def test_no_call_waits_because_others_are_answered(tmp_path: Path, some_stream: bool) -> None:
    """The calls that the engine forgets are answered elsewhere, while it goes on with others."""
    with two_engines(tmp_path, *PACE) as (gateway, engine):
        await engine.set_mode("hang_request", share=SHARE)
        async with Client(gateway.port) as client:
            load, ends_s = Load(client, some_stream=some_stream), time.monotonic() + LOAD_S
            await asyncio.gather(_heal(engine, ends_s), *(load.work(worker, ends_s) for worker in range(WORKERS)))
        assert FORGOTTEN in gateway.log()
        assert NOTHING_SAID not in gateway.log(), "a call waited for the end of all patience"


@pytest.mark.nightly
async def test_calls_that_are_forgotten_while_no_other_comes_end_nevertheless(tmp_path: Path) -> None:
    """Those without a byte of an answer are answered elsewhere. Streams that have begun end with an error.

    An engine without other calls answers its trials: what it has forgotten may as well be slow, for 45 s.
    """
    with two_engines(tmp_path) as (gateway, engine):
        async with Client(gateway.port, timeout_s=2 * WITHIN_S) as client:
            calls = []
            for mode in "hang_request", "hang_stream":
                await engine.set_mode(mode)
                bodies = [_body(f"Question {number} of {mode}?", stream=True) for number in range(4)]
                calls += [asyncio.create_task(client.post(CHAT, body)) for body in bodies]
                await asyncio.sleep(0.5)
            await engine.heal()
            answers = await asyncio.gather(*calls)
    assert not [answer for answer in answers if answer.broken]
    assert all(is_good(_body(f"Question {n} of hang_request?", stream=True), answers[n]) for n in range(4))
    ends = [text_of(answer, streamed=True) for answer in answers[4:]]
    assert any(has_error for *_, has_error in ends), "no call went to the engine"
    assert all(has_error or finish_reason for _, finish_reason, has_error in ends)
