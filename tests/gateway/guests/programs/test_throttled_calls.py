"""Calls of programs whose tenant is at a limit when they could begin."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from plait.backends.errors import LimitError
from plait.gateway.asgi import Sink
from plait.gateway.calls.call import Asked, Ending
from plait.gateway.guests.programs import chained_call
from plait.policy.types import Objective
from tests.gateway.guests.programs.chained_gateway import Engine, Exchange, Served, served_calls
from tests.waiting import WITHIN_S


class Throttling(Engine):
    """Refuses the first deliveries. `logged` has the refusals that the relay would log."""

    refusals: list[LimitError]
    logged: list[LimitError]

    async def run(self, asked: Asked, sink: Sink) -> Ending:
        if self.refusals:
            refusal = self.refusals.pop(0)
            assert asked.slot.begins_anew is not None
            if not asked.slot.begins_anew(Ending("refused", refusal.status, error=refusal)):
                self.logged.append(refusal)
            raise refusal
        return await super().run(asked, sink)


def throttled(served: Served, *refusals: LimitError) -> Throttling:
    served.engine.__class__ = Throttling
    served.engine.refusals, served.engine.logged = list(refusals), []  # type: ignore[attr-defined]
    return cast("Throttling", served.engine)


def limit(code: str | None = "calls_per_second", retry_after_s: float | None = 0.01) -> LimitError:
    return LimitError("too many", code=code, retry_after_s=retry_after_s)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not holds():  # noqa: ASYNC110 - the call wakes by the clock
            await asyncio.sleep(0.001)


async def chain(served: Served) -> Exchange:
    """Two calls, the second of which needs the first one's value; the answer to a get of its output."""
    await served.submit("Write {{code}}", "code")
    await served.submit("Test {{code}}: {{test}}", "test", inputs=("code",))
    return await served.get("test")


async def test_a_call_waits_for_its_tenants_limits() -> None:
    async with served_calls() as served:
        engine = throttled(served, limit(), limit("tokens_per_second"), limit("too_many_waiting"))
        got = await chain(served)
        await until(lambda: "Write " in served.engine.running)
        await served.engine.answer("Write ", "print()")
        await until(lambda: "Test print(): " in served.engine.running)
        await served.engine.answer("Test print(): ", "fine")
        await asyncio.wait_for(got.task, WITHIN_S)
        assert got.json["value"] == "fine"
        assert [refusal.code for refusal in engine.logged] == ["calls_per_second"], "once, however often it is refused"


async def test_a_call_that_waits_for_a_limit_gets_its_present_objectives() -> None:
    async with served_calls() as served:
        throttled(served, limit(retry_after_s=0.1))
        await served.submit("Write {{code}}", "code")
        got = await served.get("code", criteria="latency")
        await until(lambda: "Write " in served.engine.running)
        assert served.engine.running["Write "][0].call.objective is Objective.LATENCY
        await served.engine.answer("Write ", "print()")
        await asyncio.wait_for(got.task, WITHIN_S)


@pytest.mark.parametrize(
    "refusal",
    [
        limit("too_many_held_bytes"),
        limit(retry_after_s=None),
        limit("overloaded", retry_after_s=chained_call.THROTTLED_S + 1),
    ],
)
async def test_a_call_fails_at_a_limit_that_does_not_pass_in_time(refusal: LimitError) -> None:
    async with served_calls() as served:
        throttled(served, refusal)
        got = await chain(served)
        await asyncio.wait_for(got.task, WITHIN_S)
        assert got.refusal == (424, "variable_failed")


async def test_all_calls_that_wait_for_a_limit_are_told_that_their_session_has_ended() -> None:
    """They are told a few at a time, and wake in between."""
    async with served_calls() as served:
        throttled(served, *[limit(retry_after_s=0.002)] * 100_000)
        asked = [await served.chat(f"Hi {number}", session="s", output=f"v{number}") for number in range(300)]
        for _ in range(50):
            await asyncio.sleep(0)
        await served.send("/v1/sessions/s", method="DELETE")
        async with asyncio.timeout(WITHIN_S):
            for one in asked:
                await one.begun.wait()
    assert {one.refusal for one in asked} == {(410, "session_ended")}
