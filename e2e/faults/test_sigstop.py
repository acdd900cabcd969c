"""An engine that is stopped (SIGSTOP) with calls on it: it keeps its connections, and says nothing more."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from e2e.faults.raw_client import CHAT, Answer, Client
from e2e.faults.verdicts import complaints
from e2e.faults.watching import Watch
from e2e.server_process import Server
from e2e.servers import Launcher
from plait.gateway.config.sections import UpstreamConfig

CALLS: Final = 64
RUNNING: Final = 24
"""How many of them the engine runs at once; the others wait for it in the gateway."""
TOKENS: Final = 3000
FIRST_TOKENS_S: Final = 0.5
"""A call counts as running once its prompt is in an iteration. Its first token comes with the end of that."""
WITHIN_S: Final = 12.0
BACK_WITHIN_S: Final = 6.0


async def test_nothing_waits_for_an_engine_that_is_stopped(launch: Launcher) -> None:
    options = ["--max-running-calls", str(RUNNING)]
    sleeper = launch.engine("sleeper", time_scale=1, options=options)
    other = launch.engine("other", time_scale=200)
    gateway = launch.gateway([sleeper, other], upstream=msgspec.structs.asdict(UpstreamConfig()))
    for server in (sleeper, gateway):
        server.start()
    for server in (sleeper, gateway):
        await asyncio.to_thread(server.wait_until_ready)
    async with Watch(gateway.port) as watch, Client(gateway.port) as client:
        calls = [asyncio.create_task(_call(client, number)) for number in range(CALLS)]
        await _until_running(sleeper, gateway)
        assert not any(call.done() for call in calls), "the engine is too fast for this test"

        stopped_s = time.monotonic()
        _signal(sleeper, signal.SIGSTOP)
        try:
            other.start()
            done, waiting = await asyncio.wait(calls, timeout=WITHIN_S + 8)
            assert not waiting, f"{len(waiting)} calls still wait for the engine"
        finally:
            _signal(sleeper, signal.SIGCONT)
        _check([call.result() for call in done], stopped_s)

        assert await watch.until(lambda: watch.state("sleeper") == "up", BACK_WITHIN_S) is not None
        assert await watch.until(lambda: set(watch.outstanding.values()) == {0.0}, WITHIN_S) is not None


def _check(answers: Sequence[Answer], stopped_s: float) -> None:
    """Those that had a first byte ended with an error, the others with an answer, all in time."""
    for answer in answers:
        assert not list(complaints(answer, frozenset())), answer
    begun = [answer for answer in answers if answer.first_s is not None and answer.first_s < stopped_s]
    moved = [answer for answer in answers if answer not in begun]
    assert len(begun) >= 8
    assert len(moved) >= 8
    assert all(b'"error"' in answer.body for answer in begun)
    assert all(answer.body.rstrip().endswith(b"[DONE]") for answer in moved)
    assert max(answer.ended_s for answer in begun) - stopped_s <= WITHIN_S
    firsts_s = [answer.first_s - stopped_s for answer in moved if answer.first_s is not None]
    assert len(firsts_s) == len(moved)
    assert max(firsts_s) <= WITHIN_S


async def _call(client: Client, number: int) -> Answer:
    messages = [{"role": "user", "content": f"Count from {number} on."}]
    body: dict[str, Any] = {"model": "demo", "messages": messages, "max_tokens": TOKENS, "stream": True}
    return await client.post(CHAT, body | {"ignore_eos": True})


async def _until_running(engine: Server, gateway: Server) -> None:
    """Until the engine runs as many as it can, these have their first tokens, and the others wait for it."""
    for _ in range(200):
        running = await asyncio.to_thread(engine.metric, "plait_engine_calls_running")
        waiting = await asyncio.to_thread(gateway.metric, "plait_waiting_calls")
        if running == RUNNING and running + waiting == CALLS:
            await asyncio.sleep(FIRST_TOKENS_S)
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{running} calls run and {waiting} wait")


def _signal(server: Server, number: signal.Signals) -> None:
    assert server._process is not None
    os.kill(server._process.pid, number)
