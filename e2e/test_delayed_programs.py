"""Programs over a network with a delay: what each front end costs in round trips, and what the router knows of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("langchain_core", reason="LangChain is not installed (pip install langchain-core langchain-openai)")
pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")

from e2e.delaying_proxy import DelayingProxy
from e2e.front_ends import LINKS, MAPS, OUTPUT_TOKENS, document, front_ends
from e2e.server_process import eventually
from e2e.servers import Fleet, Launcher
from plait.client import Client, SemanticVariable, Text, native_function, semantic_function
from tests.waiting import SLOWNESS

PROGRAM = "POST /v1/programs"
FRONT_ENDS = ["sync", "async", "langchain", "programs"]


@pytest.fixture
def proxy(fleet: Fleet) -> Iterator[DelayingProxy]:
    with DelayingProxy(fleet.gateway.port, round_trip_s=0.1) as proxy:
        yield proxy


@pytest.fixture
def gathering(launch: Launcher) -> Fleet:
    """Calls that come one by one are gathered for as long as a busy machine needs to send them."""
    engine = launch.engine("demo-1")
    fleet = Fleet(launch.gateway([engine], sessions={"gather_ms": round(500 * SLOWNESS)}), {engine.name: engine})
    fleet.start()
    return fleet


def logged(fleet: Fleet) -> list[dict[str, Any]]:
    return [json.loads(line) for line in fleet.gateway.log().splitlines() if '"event":"call"' in line]


async def test_each_front_end_has_the_value_that_a_client_gets_by_hand(proxy: DelayingProxy) -> None:
    async with front_ends(proxy.url) as clients:
        parts = document("the same")
        assert len({await run(parts) for run in clients.map_reduces().values()}) == 1
        assert len({await run("the same") for run in clients.chains(4).values()}) == 1


@pytest.mark.parametrize("kind", FRONT_ENDS)
async def test_a_program_is_one_round_trip(proxy: DelayingProxy, kind: str) -> None:
    """The end of a client's own session is another, for which nobody waits."""
    async with front_ends(proxy.url) as clients:
        await clients.map_reduces()[kind](document(kind))
        assert proxy.requests[0] == PROGRAM
        await clients.chains(4)[kind](kind)
    assert proxy.requests.count(PROGRAM) == 2
    assert all(request == PROGRAM or request.startswith("DELETE /v1/sessions/") for request in proxy.requests)
    assert proxy.connections <= 2


async def test_by_hand_each_call_is_a_round_trip(proxy: DelayingProxy) -> None:
    async with front_ends(proxy.url) as clients:
        await clients.map_reduces()["by hand"](document("by hand"))
        assert len(proxy.requests) == MAPS + 1
        proxy.forget()
        await clients.chains(4)["by hand"]("by hand")
        assert len(proxy.requests) == LINKS


@pytest.mark.parametrize("kind", [*FRONT_ENDS, "headers"])
async def test_the_first_stage_knows_its_objective_and_its_group(kind: str, request: pytest.FixtureRequest) -> None:
    fleet: Fleet = request.getfixturevalue("gathering" if kind == "headers" else "fleet")
    async with front_ends(fleet.gateway.url) as clients:
        known = len(logged(fleet))
        await clients.map_reduces()[kind](document(f"groups of {kind}"))
    eventually(lambda: len(logged(fleet)) == known + MAPS + 1)
    calls = logged(fleet)[known:]
    assert {call["objective"] for call in calls} == {"latency"}
    groups = Counter(call["group"] for call in calls if call["group"])
    assert list(groups.values()) == [MAPS]
    assert (len({call["session"] for call in calls}), len({call["output"] for call in calls})) == (1, MAPS + 1)
    assert max(calls, key=lambda call: call["held_s"])["group"] is None, "the reduce waits for its inputs"


async def test_a_native_step_is_a_stream_for_its_input_and_a_request_for_its_value(proxy: DelayingProxy) -> None:
    @semantic_function(max_tokens=OUTPUT_TOKENS)
    def go_on(text: Text) -> SemanticVariable:
        """Go on: {{text}} {{more}}"""
        raise NotImplementedError

    @native_function
    def shorten(text: str) -> str:
        return text[:10]

    def program(text: str) -> SemanticVariable:
        return go_on(shorten(go_on(text)))

    requests = [PROGRAM, PROGRAM, "POST /v1/variables"]
    with Client(f"{proxy.url}/v1", model="demo", tls=False) as client, client.session() as session:
        with session.current():
            value = program("once").get("latency")
        assert (proxy.requests, proxy.connections) == (requests, 2), "the value goes over the stream's connection"
    proxy.forget()
    async with Client(f"{proxy.url}/v1", model="demo", tls=False) as client:
        assert await client.arun(program, "once", objective="latency") == value
        assert (proxy.requests[:3], proxy.connections) == (requests, 2)


def test_a_loop_of_dependent_gets_is_a_round_trip_each_on_one_connection(proxy: DelayingProxy) -> None:
    @semantic_function(max_tokens=OUTPUT_TOKENS)
    def go_on(text: Text) -> SemanticVariable:
        """Go on: {{text}} {{more}}"""
        raise NotImplementedError

    with Client(f"{proxy.url}/v1", model="demo", tls=False) as client, client.session() as session:
        text = session.variable("once")
        for _ in range(4):
            text = go_on(text)
            text.get("latency")
        assert (proxy.requests, proxy.connections) == ([PROGRAM] * 4, 1)
    assert (proxy.requests[4:], proxy.connections) == ([f"DELETE /v1/sessions/{session.id}"], 1)
