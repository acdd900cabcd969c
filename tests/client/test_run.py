"""Whole functions in one trip: `Client.run` and `Client.arun`."""

from __future__ import annotations

from typing import Annotated, Any

import pytest

from plait.client import Client, Output, SemanticVariable, TemplateError, Text, semantic_function
from tests.client.fake_gateway import PROGRAMS, FakeGateway


@semantic_function()
def step(text: Text) -> SemanticVariable:
    """Go on from {{text}}: {{then}}"""
    raise NotImplementedError


@semantic_function()
def both(text: Text) -> tuple[Annotated[SemanticVariable, Output("a")], Annotated[SemanticVariable, Output("b")]]:
    """{{text}} {{a}} {{b}}"""
    raise NotImplementedError


def plan(texts: list[str], times: int) -> dict[str, Any]:
    chains = []
    for text in texts:
        then = step(text)
        for _ in range(times - 1):
            then = step(then)
        chains.append(then)
    return {"chains": chains, "pair": both(chains[0]), "times": times}


async def aplan(texts: list[str], times: int) -> dict[str, Any]:
    return plan(texts, times)


def shape(result: dict[str, Any]) -> list[Any]:
    assert all(text.startswith("text of then_") for text in result["chains"])
    assert all(text.startswith("text of ") for text in result["pair"])
    return [len(result["chains"]), type(result["pair"]), result["times"]]


def test_a_semantic_function_runs_in_one_trip(fake: FakeGateway, client: Client) -> None:
    assert client.run(step, "now", objective="latency", timeout_s=5).startswith("text of then_")
    first, second = client.run(both, text="now")
    assert (first[:9], second[:9]) == ("text of a", "text of b")
    assert [list(body["gets"].values()) for body in fake.programs] == [["latency"], [None, None]]
    assert fake.programs[0]["timeout_s"] <= 5
    client.close()
    ended = sorted(asked.what for asked in fake.asked if asked.what != PROGRAMS)
    assert ended == sorted(f"DELETE /v1/sessions/{body['session']}" for body in fake.programs)


async def test_a_function_of_several_calls_runs_in_one_trip(fake: FakeGateway, client: Client) -> None:
    assert shape(client.run(plan, ["1", "2"], times=2)) == [2, tuple, 2]
    assert shape(await client.arun(plan, ["1", "2"], times=2)) == [2, tuple, 2]
    assert shape(await client.arun(aplan, ["1", "2"], times=2)) == [2, tuple, 2]
    assert [len(body["calls"]) for body in fake.programs] == [5, 5, 5]


def test_outside_of_run_the_session_has_to_be_named(client: Client) -> None:
    client.run(step, "now")
    with pytest.raises(TemplateError, match=r"step\.on\(session\)"):
        step("now")


def test_a_function_that_fails_sends_nothing(fake: FakeGateway, client: Client) -> None:
    def broken() -> None:
        step("now")
        raise KeyError

    with pytest.raises(KeyError):
        client.run(broken)
    assert fake.programs == []
