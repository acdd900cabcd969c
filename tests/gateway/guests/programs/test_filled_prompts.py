"""Filled prompts: bounded before they are put together, counted while they are there, and waiting for room."""

from __future__ import annotations

import threading
import tracemalloc
from typing import Any

import pytest

from plait.gateway.guests.programs.chained_calls import ChainedCalls
from plait.gateway.guests.programs.filled_prompts import FilledPrompts, fill_in
from tests.gateway.guests.programs.chained_gateway import Exchange, Served, served_calls, settle
from tests.invariants import check

MEBIBYTE = 2**20
LONG = "word " * 5_000
"""More than what is filled on the loop."""


def prompts_of(served: Served) -> FilledPrompts:
    return served.gateway.house[ChainedCalls].runner.prompts


def held_bytes(served: Served) -> int:
    return sum(tenant.held_bytes for tenant in served.executor.sessions.tenants.values())


async def until(served: Served, running: int) -> None:
    """Until so many calls are on the engine: long prompts are filled and read on threads."""
    for _ in range(10_000):
        if len(served.engine.running) == running:
            return
        await settle()
    raise AssertionError(f"{len(served.engine.running)} calls run, and not {running}")


async def until_runs(served: Served, prompt: str) -> None:
    """Until the call of this prompt is the only one on the engine."""
    for _ in range(10_000):
        if list(served.engine.running) == [prompt]:
            return
        await settle()
    raise AssertionError(f"{len(served.engine.running)} calls run, and not that one alone")


async def set_large(served: Served) -> None:
    """Set `a` to a text of a mebibyte. Such a body has to wait for its turn."""
    exchange = await served.value("a", "x" * MEBIBYTE)
    await exchange.begun.wait()


def take(served: Served, context_tokens: int) -> None:
    """The engine takes long prompts."""
    served.gateway.kernel.router.health.answered("e", {"m": context_tokens})


async def test_a_prompt_that_cannot_fit_is_refused_before_it_is_put_together() -> None:
    async with served_calls() as served:
        await set_large(served)
        await served.chat("{{a}}" * 2_000, inputs="a")  # what is loaded at the first refusal does not count
        tracemalloc.start()
        try:
            exchange = await served.chat("{{a}}" * 2_000, inputs="a")
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert exchange.refusal == (400, "context_length_exceeded")
        assert f"has {2_000 * MEBIBYTE} bytes" in exchange.json["error"]["message"]
        assert exchange.json["error"]["param"] == "messages"
        assert served.engine.delivered == []
        assert peak_bytes < MEBIBYTE
        assert held_bytes(served) == MEBIBYTE


async def test_a_submitted_prompt_that_cannot_fit_fails_its_output() -> None:
    async with served_calls() as served:
        await set_large(served)
        await served.submit("{{a}}" * 2_000 + " {{b}}", "b", inputs=("a",))
        got = await served.get("b")
        await got.begun.wait()
        assert got.refusal == (424, "variable_failed")
        assert f"has {2_000 * MEBIBYTE + 1} bytes" in got.json["error"]["message"]
        assert held_bytes(served) == MEBIBYTE


async def test_a_prompt_is_at_most_as_large_as_a_body() -> None:
    async with served_calls() as served:
        take(served, 10_000_000)
        await set_large(served)
        exchange = await served.chat("{{a}}" * 33, inputs="a")
        assert exchange.refusal == (413, "body_too_large")
        assert held_bytes(served) == MEBIBYTE


@pytest.mark.parametrize("value", ["short", LONG])
async def test_a_prompt_counts_until_its_call_has_ended(value: str) -> None:
    async with served_calls() as served:
        take(served, 100_000)
        await served.value("a", value)
        exchange = await served.chat("{{a}}{{a}}!", inputs="a")
        await until(served, 1)
        ((tenant, session),) = [
            (tenant, session)
            for tenant, owner in served.executor.sessions.tenants.items()
            for session in owner.sessions.values()
        ]
        (call,) = session.calls.values()
        filled = 2 * len(value) + 1
        assert call.held_bytes > filled
        assert held_bytes(served) == len(value) + call.held_bytes
        body_bytes = call.held_bytes - filled
        assert prompts_of(served).bodies.bytes_of(tenant) == body_bytes + filled
        check(served.executor)
        await served.engine.answer(value + value + "!", "done")
        assert exchange.text == "done"
        assert held_bytes(served) == len(value)
        assert prompts_of(served).bodies.bytes_of(tenant) == 0
        assert repr(prompts_of(served)) == "FilledPrompts(open={}, waiting={})"


async def waiting_calls(served: Served, calls: int) -> list[Exchange]:
    """Calls whose prompts have three times `LONG` each, of which one fits; the first of them runs."""
    take(served, 100_000)
    await served.value("a", LONG)
    exchanges = [await served.chat(f"{number}{{{{a}}}}{{{{a}}}}{{{{a}}}}", inputs="a") for number in range(calls)]
    await until(served, 1)
    for _ in range(5):
        await settle()
    return exchanges


ROOM: dict[str, Any] = {"max_held_bytes": 6 * len(LONG)}


async def test_a_prompt_without_room_waits_for_the_end_of_another() -> None:
    async with served_calls(**ROOM) as served:
        exchanges = await waiting_calls(served, 4)
        for number, exchange in enumerate(exchanges):
            await until(served, 1)
            assert list(served.engine.running) == [f"{number}{LONG * 3}"]
            await served.engine.answer(f"{number}{LONG * 3}", f"answer {number}")
            assert exchange.text == f"answer {number}"
        assert repr(prompts_of(served)) == "FilledPrompts(open={}, waiting={})"


async def test_a_prompt_for_which_there_is_never_room_is_refused() -> None:
    async with served_calls(**ROOM) as served:
        (first, *_) = await waiting_calls(served, 1)
        second = await served.chat("{{a}}" * 6, inputs="a")
        third = await served.chat("3{{a}}{{a}}{{a}}", inputs="a")
        await settle()
        assert second.messages == third.messages == []
        await served.engine.answer(f"0{LONG * 3}", "done")
        await until(served, 1)
        assert first.text == "done"
        assert second.refusal == (413, "value_too_large")
        await served.engine.answer(f"3{LONG * 3}", "done")
        assert third.text == "done"


async def test_those_that_wait_go_on_when_clients_leave() -> None:
    async with served_calls(**ROOM) as served:
        exchanges = await waiting_calls(served, 5)
        for number in (1, 0, 2):
            await exchanges[number].leave()  # the third one was woken, and may have begun
        await until_runs(served, f"3{LONG * 3}")
        await served.engine.answer(f"3{LONG * 3}", "done")
        await until_runs(served, f"4{LONG * 3}")
        await served.engine.answer(f"4{LONG * 3}", "done")
        assert [exchange.text for exchange in exchanges[3:]] == ["done", "done"]
        assert repr(prompts_of(served)) == "FilledPrompts(open={}, waiting={})"


async def test_one_tenants_prompts_do_not_wait_for_anothers() -> None:
    async with served_calls(**ROOM) as served:
        exchanges = await waiting_calls(served, 2)
        await served.value("a", LONG, key="two")
        other = await served.chat("other{{a}}{{a}}{{a}}", inputs="a", key="two")
        await until(served, 2)
        await served.engine.answer(f"other{LONG * 3}", "done")
        assert other.text == "done"
        assert exchanges[1].messages == []
        for number in range(2):
            await served.engine.answer(f"{number}{LONG * 3}", "done")
            await until(served, 1 - number)


@pytest.mark.parametrize(("value", "on_the_loop"), [("short", True), (LONG, False)])
async def test_long_prompts_are_put_together_on_threads(
    monkeypatch: pytest.MonkeyPatch, value: str, on_the_loop: bool
) -> None:
    threads = set[bool]()

    def filled(*given: Any) -> Any:
        threads.add(threading.current_thread() is threading.main_thread())
        return fill_in(*given)

    monkeypatch.setattr("plait.gateway.guests.programs.asked_step.fill_in", filled)
    async with served_calls() as served:
        take(served, 100_000)
        await served.value("a", value)
        await served.chat("{{a}}", inputs="a")
        await until(served, 1)
        await served.engine.answer(value, "done")
    assert threads == {on_the_loop}
