"""Agents whose contexts do not fit into an engine's cache together: some of them are held, and all are served."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from statistics import fmean
from typing import Any

import openai
import pytest

from e2e.programs import Program, ProgramCall, chained_by_gateway, metagpt
from e2e.sdk import asking, async_client
from e2e.server_process import eventually
from e2e.servers import Fleet, Launcher
from e2e.traces import ABSENT, METAGPT

KV_TOKENS = 12_000
SESSIONS, TURNS = 16, 7
CHAT_TOKENS = 300


@pytest.fixture(scope="module")
def agents_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """An engine that has room for half of the agents' contexts."""
    with Launcher(tmp_path_factory.mktemp("agents")) as launch:
        engine = launch.engine("demo-1", time_scale=1, options=("--kv-tokens", str(KV_TOKENS)))
        fleet = Fleet(launch.gateway([engine], admission={"chat_tokens": CHAT_TOKENS}), {engine.name: engine})
        fleet.start()
        yield fleet


def text_of(number: int, words: int) -> str:
    dice = random.Random(number)
    return " ".join(f"w{dice.randrange(1000)}" for _ in range(words))


class Agent:
    """A session that thinks for a moment between its turns. `shares` has the cached part of each of its prompts."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.messages: list[Any] = [{"role": "user", "content": text_of(number, 600)}]
        self.shares: list[float] = []
        self.waited_s: list[float] = []

    async def run(self, client: openai.AsyncOpenAI, turns: int = TURNS) -> None:
        for turn in range(turns):
            answer = await client.chat.completions.with_raw_response.create(
                model="demo",
                messages=self.messages,
                max_tokens=8,
                extra_headers={"x-session-id": f"agent-{self.number}"},
            )
            completion = answer.parse()
            usage = completion.usage
            assert usage is not None
            details = usage.prompt_tokens_details
            cached_tokens = 0 if details is None else details.cached_tokens or 0
            self.shares.append(cached_tokens / usage.prompt_tokens)
            self.waited_s.append(float(answer.headers.get("plait-waited-s", 0.0)))
            self.messages.append({"role": "assistant", "content": completion.choices[0].message.content})
            self.messages.append({"role": "user", "content": text_of(1000 * turn + self.number, 10)})
            await asyncio.sleep(0.2)


def test_agents_that_do_not_fit_are_held_and_all_of_them_are_served(agents_fleet: Fleet) -> None:
    agents = [Agent(number) for number in range(SESSIONS)]

    async def all_of_them() -> None:
        async with async_client(agents_fleet.gateway) as client:
            await asyncio.gather(*(agent.run(client) for agent in agents))

    asyncio.run(all_of_them())
    gateway = agents_fleet.gateway
    assert gateway.metric("plait_session_gate_closed", model="demo") == 1
    turns = [fmean(agent.shares[turn] for agent in agents) for turn in range(TURNS)]
    assert min(turns[1:]) < 0.2, "the contexts evict each other"
    assert fmean(turns[-2:]) > 0.5
    assert max(waited_s for agent in agents for waited_s in agent.waited_s) > 1.0
    assert not gateway.metric("plait_refusals_total")


def test_chat_passes_and_held_clients_that_leave_are_forgotten(agents_fleet: Fleet) -> None:
    """This comes within a minute of the agents, whose contexts keep the gate closed."""
    gateway = agents_fleet.gateway

    async def leave() -> None:
        async with async_client(gateway) as client:
            late = [asyncio.create_task(Agent(100 + number).run(client)) for number in range(3 * SESSIONS)]
            await asyncio.to_thread(eventually, lambda: gateway.metric("plait_sessions", state="held") > SESSIONS)
            chat = await client.chat.completions.with_raw_response.create(**asking("hello"))
            assert chat.parse().choices
            assert gateway.metric("plait_sessions", state="held") > 0, "they came before"
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    asyncio.run(leave())
    eventually(lambda: gateway.metric("plait_sessions", state="held") == 0)
    eventually(lambda: gateway.metric("plait_waiting_calls", model="demo") == 0)


def long_map_reduce(maps: int) -> Program:
    """Its chunks are too long for chat, so that a gate could take each for a session."""
    parts = [ProgramCall(f"part{n}", text_of(10_000 + n, CHAT_TOKENS)) for n in range(maps)]
    return [*parts, ProgramCall("all", " ".join(f"{{{{{part.output}}}}}" for part in parts))]


@pytest.mark.parametrize("name", ["map_reduce", "metagpt"])
def test_programs_pass_a_closed_gate(agents_fleet: Fleet, name: str) -> None:
    """While agents are held before and after: none of a program's calls waits for another session's end."""
    if name == "metagpt" and not METAGPT.is_file():
        pytest.skip(ABSENT)
    program, gateway = long_map_reduce(64) if name == "map_reduce" else metagpt(1 / 16), agents_fleet.gateway

    def holds() -> bool:
        return gateway.metric("plait_session_gate_closed", model="demo") == 1 and held() > 0

    def held() -> float:
        return gateway.metric("plait_sessions", state="held")

    async def beside() -> None:
        async with async_client(gateway) as client:
            first = 200 if name == "map_reduce" else 300
            agents = [asyncio.create_task(Agent(first + number).run(client, 60)) for number in range(24)]
            await asyncio.to_thread(eventually, holds)
            created = await asyncio.to_thread(gateway.post, "/v1/sessions", json={})
            answers = await chained_by_gateway(client, created.json()["id"], program)
            assert len(answers) == len(program)
            assert held() > 0
            assert not any(agent.done() for agent in agents)
            for agent in agents:
                agent.cancel()
            await asyncio.gather(*agents, return_exceptions=True)

    asyncio.run(beside())
