"""Chained calls that an engine fails: what is tried again where, what never is, and what those see who watch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from plait.gateway.guests.programs.recorded_answer import KEEP_ALIVE
from tests.gateway.exposed import samples
from tests.gateway.guests.programs.chained_gateway import Served, events, served_calls, settle


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with served_calls(max_attempts=2) as served:
        yield served


def retries(served: Served, engine: str = "e") -> int:
    found = samples(served.registry)
    return sum(
        int(n) for name, n in found.items() if name.startswith(f'plait_calls_restarted_total{{engine="{engine}"')
    )


# Calls with a client of their own.


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_all_engines_failed_is_told_to_all(served: Served, stream: bool) -> None:
    """The relay has tried them all by then: there is nothing left to try."""
    first = await served.chat("Write", output="code", stream=stream)
    second = await served.chat("Test {{code}}", inputs="code")
    await served.engine.lose("Write")
    assert first.refusal == (502, "engine_error")
    assert second.refusal == (424, "input_failed")
    failed = (await served.get("code")).json["error"]
    assert failed["causes"][-1]["engine"] == "e"
    assert (served.engine.delivered, retries(served)) == (["Write"], 0)


async def test_where_no_engine_is_left_the_failure_before_is_told(served: Served) -> None:
    await served.submit("Do {{code}}", "code")
    served.engine.up = []
    await served.engine.break_off("Do ", "x = ")
    refused = await served.get("code")
    assert refused.json["error"]["causes"][0]["message"] == "engine e: stream lost"


async def test_a_refusal_of_the_caller_is_never_tried_again(served: Served) -> None:
    first = await served.chat("Write", output="code")
    await served.engine.refuse("Write", 429)
    assert (first.status, retries(served)) == (429, 0)


async def test_what_a_client_has_seen_cannot_be_taken_back(served: Served) -> None:
    first = await served.chat("Write", output="code", stream=True)
    second = await served.chat("Test {{code}}", inputs="code")
    sending = asyncio.create_task(served.engine.break_off("Write", "x ="))
    await first.begun.wait()
    await sending
    assert b"stream lost" in first.body
    assert (second.refusal, retries(served)) == ((424, "input_failed"), 0)


async def test_what_no_client_is_left_to_see_can_be_taken_back(served: Served) -> None:
    first = await served.chat("Write", output="code", stream=True)
    second = await served.chat("Test {{code}}", inputs="code")
    await first.leave()
    await served.engine.break_off("Write", "y")
    late = await served.chat("Write", output="code", stream=True)
    await served.engine.answer("Write", "x = 1")
    await served.engine.answer("Test x = 1", "fine")
    assert second.text == "fine"
    assert b"".join(late.body.split()).count(b'"content"') == 2
    assert b"lost" not in late.body


async def test_a_stream_that_waited_ends_with_the_error() -> None:
    async with served_calls(max_attempts=2, keep_alive_s=0.001) as served:
        first = await served.chat("Write", output="code", stream=True)
        await first.begun.wait()
        await served.engine.lose("Write")
        assert b"connection lost" in first.body.replace(KEEP_ALIVE, b"")


# Submitted calls.


async def test_a_step_that_breaks_off_runs_again_and_the_next_follow_it(served: Served) -> None:
    await served.submit("Do {{code}} Test: {{test}}", "code", "test")
    await served.engine.break_off("Do ", "x = ")
    assert served.engine.running["Do "][0].avoids == {"e"}
    await served.engine.answer("Do ", "x = 2")
    assert (await served.get("code")).json["value"] == "x = 2"
    assert served.engine.running["Do |x = 2 Test:"][0].slot.continues_on == "f"
    await served.engine.break_off("Do |x = 2 Test:", "no")
    await served.engine.answer("Do |x = 2 Test:", " fine")
    assert (await served.get("test")).json["value"] == "fine"
    assert (retries(served, "e"), retries(served, "f")) == (1, 1)


async def test_a_step_fails_when_all_attempts_have(served: Served) -> None:
    await served.submit("Do {{code}}", "code")
    for _ in range(2):
        await served.engine.break_off("Do ", "x = ")
    refused = await served.get("code")
    assert refused.refusal == (424, "variable_failed")
    assert refused.json["error"]["causes"][0]["message"] == "engine f: stream lost"


# Those who watch.


async def test_who_watches_sees_the_same_text_go_on(served: Served) -> None:
    await served.submit("Do {{code}}", "code")
    early = await served.get("code", stream=True)
    await served.engine.break_off("Do ", "x = 1")
    late = await served.get("code", stream=True)
    await served.engine.answer("Do ", "x = 1 + 1")
    for watching, deltas in ((early, ["x = 1", " + 1"]), (late, ["x = 1 + 1"])):
        *pieces, whole, _ = events(watching)
        assert ([piece["delta"] for piece in pieces], whole["value"]) == (deltas, "x = 1 + 1")


@pytest.mark.parametrize("text", ["y = 1", "x "])
async def test_who_has_seen_another_text_is_told_and_the_program_goes_on(served: Served, text: str) -> None:
    await served.submit("Do {{code}}", "code")
    held = await served.chat("Test {{code}}", inputs="code")
    watching = await served.get("code", stream=True)
    waiting = await served.get("code")
    await served.engine.break_off("Do ", "x = 1")
    await settle()
    await served.engine.answer("Do ", text)
    delta, last = events(watching)
    assert (delta["delta"], last["error"]["code"]) == ("x = 1", "text_changed")
    assert waiting.json["value"] == (await served.get("code")).json["value"] == text
    await served.engine.answer(f"Test {text}", "fine")
    assert held.text == "fine"
