"""An engine that is stopped (SIGSTOP) with calls on it: it keeps its connections, and says nothing more."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from typing import Any, Final

from e2e.faults.raw_client import CHAT, Answer, Client
from e2e.faults.verdicts import complaints
from e2e.faults.watching import Watch
from e2e.server_process import Server, eventually
from e2e.servers import PATIENT, Launcher
from plait.gateway.membership.recovery import NOTHING_SAID
from tests.waiting import WITHIN_S

CALLS: Final = 64
RUNNING: Final = 24
"""How many of them the engine runs at once; the others wait for it in the gateway."""
TOKENS: Final = 3000
FIRST_TOKENS_S: Final = 0.5
"""A call counts as running once its prompt is in an iteration. Its first token comes with the end of that."""


async def test_nothing_waits_for_an_engine_that_is_stopped(launch: Launcher) -> None:
    options = ["--max-running-calls", str(RUNNING)]
    sleeper = launch.engine("sleeper", time_scale=1, options=options)
    other = launch.engine("other", time_scale=200)
    gateway = launch.gateway([sleeper, other], upstream=PATIENT)
    for server in (sleeper, gateway):
        server.start()
    for server in (sleeper, gateway):
        await asyncio.to_thread(server.wait_until_ready)
    async with Watch(gateway.port) as watch, Client(gateway.port) as client:
        calls = [asyncio.create_task(_call(client, number)) for number in range(CALLS)]
        await _until_running(sleeper, gateway)
        assert not any(call.done() for call in calls), "the engine is too fast for this test"

        _signal(sleeper, signal.SIGSTOP)
        try:
            other.start()
            done, waiting = await asyncio.wait(calls, timeout=WITHIN_S)
            assert not waiting, f"{len(waiting)} calls still wait for the engine"
        finally:
            _signal(sleeper, signal.SIGCONT)
        _check([call.result() for call in done])

        assert await watch.until(lambda: watch.state("sleeper") == "up") is not None
        assert await watch.until(lambda: set(watch.outstanding.values()) == {0.0}) is not None
    assert NOTHING_SAID not in gateway.log(), "the engine is given up before a limit on its calls ends them"


def _check(answers: Sequence[Answer]) -> None:
    """Those that had a first byte of the engine ended with an error, the others with an answer."""
    for answer in answers:
        assert not list(complaints(answer, frozenset())), answer
    begun = [answer for answer in answers if answer.header("plait-engine") == "sleeper"]
    moved = [answer for answer in answers if answer not in begun]
    assert len(begun) >= 8
    assert len(moved) >= 8
    assert all(b'"error"' in answer.body for answer in begun)
    assert all(answer.body.rstrip().endswith(b"[DONE]") for answer in moved)


async def _call(client: Client, number: int) -> Answer:
    messages = [{"role": "user", "content": f"Count from {number} on."}]
    body: dict[str, Any] = {"model": "demo", "messages": messages, "max_tokens": TOKENS, "stream": True}
    return await client.post(CHAT, body | {"ignore_eos": True})


async def _until_running(engine: Server, gateway: Server) -> None:
    """Until the engine runs as many as it can, these have their first tokens, and the others wait for it."""
    calls = {"run": 0.0, "wait": 0.0}

    def all_are_there() -> bool:
        calls["run"] = engine.metric("plait_engine_calls_running")
        calls["wait"] = gateway.metric("plait_waiting_calls")
        has_begun = engine.metric("plait_engine_output_tokens_total") >= RUNNING
        return calls == {"run": RUNNING, "wait": CALLS - RUNNING} and has_begun

    try:
        await asyncio.to_thread(eventually, all_are_there)
    except AssertionError as error:
        raise AssertionError(f"{calls}") from error
    await asyncio.sleep(FIRST_TOKENS_S)


def _signal(server: Server, number: signal.Signals) -> None:
    assert server._process is not None
    os.kill(server._process.pid, number)
