"""One program in which every kind of failure happens: each ends its waiters, with its own error, before the next."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import pytest

from e2e.faults.program_branches import CALLS, Branch, Wanted, wanted_cause
from e2e.faults.program_waiters import ProgramStream, Told, Waiters, program_stream
from e2e.faults.raw_client import CHAT, Client
from e2e.server_process import eventually
from e2e.servers import Fleet, Launcher
from tests.waiting import WITHIN_S

SESSION: Final = "failing"
GRACE_S: Final = 0.4
MAX_VALUE_BYTES: Final = 2_000
CONTEXT_TOKENS: Final = 64
"""Of the model `small`."""
LONG: Final = 20_000
"""Tokens of an output that takes a slow engine longer than the test."""

REFUSED = Branch("refused", wanted_cause("has a context of"), "small")
OUTSIDE = Branch("outside", wanted_cause("it was refused: "), fails_outside=True)
CUT = Branch("cut", wanted_cause("cut at its length limit", engine="quick"), truncated="fail")
TRANSFORM = Branch(
    "transform", wanted_cause("code_block", engine="quick", transform="code_block"), transforms="code_block"
)
TOO_LARGE = Branch("large", wanted_cause(f"at most {MAX_VALUE_BYTES:,} are allowed"), max_tokens=1_000)
LOST = Branch("lost", wanted_cause("", transient=True, engine="doomed"), "doomed", LONG, takes=False)
RUNNING = Branch("running", wanted_cause("a client cancelled it", transient=True), "slow", LONG, takes=False)
WAITING = Branch("waiting", wanted_cause("a client cancelled it", transient=True))
GONE = Branch(
    "gone",
    wanted_cause("nobody waits for it any more", transient=True),
    "slow",
    LONG,
    takes=False,
    fail_alone=True,
)
DELETED = Branch("deleted", Wanted(410, "session_ended", False, "was deleted"), "slow", LONG, takes=False)
BRANCHES: Final = (REFUSED, OUTSIDE, CUT, TRANSFORM, TOO_LARGE, LOST, RUNNING, WAITING, GONE, DELETED)


@dataclass(frozen=True)
class Stage:
    """The servers, a connection for what happens to them, and those who wait for the outcome."""

    fleet: Fleet
    client: Client
    sender: ProgramStream
    reader: ProgramStream
    waiters: Mapping[Branch, Waiters]

    async def set_input(self, branch: Branch, value: str) -> int:
        """Give a branch what it waits for; returns the status."""
        body = {"session_id": SESSION, "semantic_var_id": branch.input, "value": value}
        return (await self.client.post("/v1/variables", body)).status

    async def shown(self) -> dict[str, Any]:
        """The session as the gateway shows it."""
        shown: dict[str, Any] = msgspec.json.decode((await self.client.get(f"/v1/sessions/{SESSION}")).body)
        return shown

    async def running(self) -> float:
        """How many calls the slow engine runs."""
        return await asyncio.to_thread(self.fleet.engines["slow"].metric, "plait_engine_calls_running")


@pytest.fixture
async def stage(launch: Launcher) -> AsyncIterator[Stage]:
    """Everybody waits for everything."""
    engines = [
        launch.engine("quick", time_scale=100),
        launch.engine("small", model="small", options=["--max-context-tokens", str(CONTEXT_TOKENS)]),
        launch.engine("doomed", model="doomed", time_scale=1),
        launch.engine("slow", model="slow", time_scale=1),
    ]
    limits = {"gone_grace_s": GRACE_S, "max_value_bytes": MAX_VALUE_BYTES, "keep_alive_s": 0.2}
    gateway = launch.gateway(engines, models=["demo", "small", "doomed", "slow"], sessions=limits)
    fleet = Fleet(gateway, {engine.name: engine for engine in engines})
    fleet.start()
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(gateway.port))
        sender = await stack.enter_async_context(program_stream(gateway, program(), "sender"))
        gets = {"session": SESSION, "gets": names(branch for branch in BRANCHES if branch is not GONE)}
        reader = await stack.enter_async_context(program_stream(gateway, gets, "reader"))
        waiters = {branch: Waiters(client, SESSION, branch.awaited, f"end_{branch.name}") for branch in BRANCHES}
        running = sum(not branch.takes for branch in BRANCHES)
        held = len(BRANCHES) * (CALLS + 2) - running
        await asyncio.to_thread(eventually, lambda: gateway.metric("plait_held_calls") == held)
        await asyncio.to_thread(eventually, lambda: gateway.metric("plait_engine_outstanding_calls") == running)
        yield Stage(fleet, client, sender, reader, waiters)


def program() -> dict[str, Any]:
    calls = [call for branch in BRANCHES for call in branch.calls()]
    assert len(calls) == 200
    external = [branch.input for branch in BRANCHES if branch.takes]
    return {"session": SESSION, "calls": calls, "external": external, "gets": names(BRANCHES)}


def names(branches: Iterable[Branch]) -> dict[str, None]:
    return dict.fromkeys(name for branch in branches for name in branch.awaited)


# What happens to the branches.


async def refuse(stage: Stage) -> None:
    """With this input the call is longer than its model's context."""
    assert await stage.set_input(REFUSED, "word " * 300) == 200


async def refuse_outside(stage: Stage) -> None:
    """The request that would produce the input is refused."""
    headers = {"plait-session": SESSION, "plait-output": OUTSIDE.input}
    answer = await stage.client.post(CHAT, {"model": "none", "messages": [{"role": "user", "content": "Go"}]}, headers)
    assert answer.status == 404


async def cut(stage: Stage) -> None:
    assert await stage.set_input(CUT, "Go on.") == 200


async def transform(stage: Stage) -> None:
    assert await stage.set_input(TRANSFORM, "Go on.") == 200


async def enlarge(stage: Stage) -> None:
    """A value that is too large fails nothing, as the client may set another. A text that is too large does."""
    assert await stage.set_input(TOO_LARGE, "x" * (MAX_VALUE_BYTES + 1)) == 413
    assert stage.waiters[TOO_LARGE].answered == 0
    assert await stage.set_input(TOO_LARGE, "Go on.") == 200


async def kill(stage: Stage) -> None:
    await asyncio.to_thread(stage.fleet.engines["doomed"].kill)


async def cancel_running(stage: Stage) -> None:
    await _cancel(stage, RUNNING)


async def cancel_waiting(stage: Stage) -> None:
    await _cancel(stage, WAITING)


async def _cancel(stage: Stage, branch: Branch) -> None:
    variables = (await stage.shown())["variables"]
    (call,) = [one["producer"] for one in variables if one["semantic_var_id"] == branch.output(0)]
    assert (await stage.client.delete(f"/v1/sessions/{SESSION}/calls/{call}")).status == 200


async def delete(stage: Stage) -> None:
    assert (await stage.client.delete(f"/v1/sessions/{SESSION}")).status == 200


STRIKES: Final[Mapping[Branch, Callable[[Stage], Awaitable[None]]]] = {
    REFUSED: refuse, OUTSIDE: refuse_outside, CUT: cut, TRANSFORM: transform, TOO_LARGE: enlarge, LOST: kill,
    RUNNING: cancel_running, WAITING: cancel_waiting,
}  # fmt: skip
"""Those that fail one branch and leave the program as it is."""


# What the waiters are told.


def check(branch: Branch, told: Iterable[Told], cause_s: float) -> None:
    """Each was told of the branch's failure, with the right error, after its cause."""
    for one in told:
        assert one.error is not None, one
        assert cause_s <= one.at_s, (one.at_s - cause_s, one)
        check_error(branch, one)


def check_error(branch: Branch, told: Told) -> None:
    wanted, error = branch.wanted, told.error
    assert error is not None
    is_call = told.how.startswith("call")
    code = "input_failed" if is_call and wanted.status == 424 else wanted.code
    assert (told.status or wanted.status, error["code"]) == (wanted.status, code), told
    assert wanted.message in error["message"], told
    if wanted.status != 424:
        return
    assert error["transient"] is wanted.transient, told
    causes = error["causes"]
    assert dict(wanted.root).items() <= causes[-1].items(), told
    path = branch.path(told.variable)
    failed = [cause["variable"] for cause in causes if cause["variable"] is not None]
    assert failed == [name for name in path if name in failed], told
    assert (failed[0], failed[-1]) == (path[0], path[-1]), told


async def told_of(stage: Stage, branch: Branch, *streams: ProgramStream) -> list[Told]:
    """What all waiters of a branch were told, once they were."""
    async with asyncio.timeout(WITHIN_S):
        told = await stage.waiters[branch].told()
        for stream in streams:
            told += await stream.of(branch.awaited)
    return told


async def test_each_failure_ends_its_waiters_soon_and_no_others(stage: Stage) -> None:
    left = set(BRANCHES)
    for branch, strike in STRIKES.items():
        cause_s = time.monotonic()
        await strike(stage)
        check(branch, await told_of(stage, branch, stage.sender, stage.reader), cause_s)
        left.remove(branch)
        assert not any(stage.waiters[other].answered for other in left)
        await check_late_get(stage, branch)
    await check_gone(stage)
    assert await stage.running() == 1
    cause_s = time.monotonic()
    await delete(stage)
    check(DELETED, await told_of(stage, DELETED, stage.reader), cause_s)
    async with asyncio.timeout(WITHIN_S):
        await stage.reader.ended()
    assert stage.reader.is_over
    await asyncio.to_thread(check_nothing_is_left, stage.fleet)


async def check_late_get(stage: Stage, branch: Branch) -> None:
    """Who comes after the failure is told the same, without a wait."""
    for name in branch.awaited:
        answer = await stage.client.post("/v1/get", {"session_id": SESSION, "semantic_var_id": name})
        check_error(branch, Told("late", name, 0.0, answer.status, msgspec.json.decode(answer.body)["error"]))


async def check_gone(stage: Stage) -> None:
    """All who wait for a branch go. Its calls go on for their grace, and then end; those of others go on."""
    slow = stage.fleet.engines["slow"]
    await asyncio.to_thread(eventually, lambda: slow.metric("plait_engine_calls_running") == 2)
    cause_s = time.monotonic() + GRACE_S
    await stage.sender.go()
    await stage.waiters[GONE].go()
    failed_s: dict[str, float] = {}
    while len(failed_s) < CALLS and time.monotonic() < cause_s + WITHIN_S:
        variables = (await stage.shown())["variables"]
        now_s = time.monotonic()
        for one in variables:
            if one["state"] == "failed" and one["semantic_var_id"].startswith("gone_"):
                failed_s.setdefault(one["semantic_var_id"], now_s)
        await asyncio.sleep(0.01)
    assert failed_s.keys() == {GONE.output(number) for number in range(CALLS)}
    assert cause_s <= min(failed_s.values())
    await asyncio.to_thread(eventually, lambda: slow.metric("plait_engine_calls_running") == 1)
    await check_late_get(stage, GONE)


def check_nothing_is_left(fleet: Fleet) -> None:
    held = ("sessions", "semantic_variables", "held_calls", "held_bytes", "engine_outstanding_calls")
    eventually(lambda: not any(fleet.gateway.metric(f"plait_{name}") for name in held))
    eventually(lambda: fleet.engines["slow"].metric("plait_engine_calls_running") == 0)
