"""A get or a call that comes later says what a call is for: it is served before others, wherever it waits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from e2e.server_process import eventually
from e2e.servers import Fleet, Launcher

CALLS = 24
RUNNING = 2
OUTPUT_TOKENS = 80


WHERE = {"gateway": ("--max-running-calls", str(RUNNING)), "engine": ("--kv-tokens", "256")}
"""Options of an engine that runs two calls at a time: without free slots the others wait before it, else in it."""


@pytest.fixture(params=WHERE)
def where(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def fleet(launch: Launcher, where: str) -> Fleet:
    """One engine that runs two calls at a time, behind a gateway."""
    engine = launch.engine("demo-1", time_scale=5, options=WHERE[where])
    fleet = Fleet(launch.gateway([engine]), {engine.name: engine})
    fleet.start()
    return fleet


def posted(fleet: Fleet, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    response = fleet.gateway.post(path, json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response


def submit_all(fleet: Fleet, where: str) -> None:
    """Calls of which nobody has said what they are for. All of them are in the engine then, or wait before it."""

    def submit(number: int) -> None:
        prompt = f"Tell me of the number {number}.\n{{{{n{number}}}}}"
        body = {"session_id": "s", "model": "demo", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
        posted(fleet, "/v1/submit", body | {"placeholders": [{"name": f"n{number}", "in_out": True}]})

    with ThreadPoolExecutor(CALLS) as pool:  # at once: none has ended before the last has come
        list(pool.map(submit, range(CALLS - 1)))
    submit(CALLS - 1)
    if where == "engine":
        eventually(lambda: fleet.engines["demo-1"].metric("plait_engine_calls_total") == CALLS)
    else:
        eventually(lambda: fleet.gateway.metric("plait_waiting_calls") >= CALLS / 2)


def done(fleet: Fleet) -> int:
    """How many of the calls have ended."""
    variables = fleet.gateway.get("/v1/sessions/s").json()["variables"]
    return sum(variable["state"] == "set" for variable in variables if variable["semantic_var_id"].startswith("n"))


def get_last(fleet: Fleet) -> None:
    """A get with an objective, of what the last call makes."""
    body = {"session_id": "s", "semantic_var_id": f"n{CALLS - 1}", "criteria": "latency"}
    assert posted(fleet, "/v1/get", body).json()["state"] == "set"


def consume_last(fleet: Fleet) -> None:
    """A call with an objective that takes what the last call makes."""
    message = {"role": "user", "content": f"Repeat {{{{n{CALLS - 1}}}}}"}
    headers = {"plait-session": "s", "plait-inputs": f"n{CALLS - 1}", "plait-objective": "latency"}
    posted(fleet, "/v1/chat/completions", {"model": "demo", "messages": [message], "max_tokens": 5}, **headers)


@pytest.mark.parametrize("say_what_for", [get_last, consume_last])
def test_the_last_of_many_calls_overtakes_those_that_nobody_waits_for(
    fleet: Fleet, where: str, say_what_for: Any
) -> None:
    submit_all(fleet, where)
    say_what_for(fleet)
    ended = done(fleet)
    assert ended < CALLS - 2 * RUNNING, "the others still wait"
    if where == "engine":
        assert fleet.gateway.metric("plait_changed_objectives_total", engine="demo-1", told="yes") == 1
    eventually(lambda: done(fleet) == CALLS)
    assert fleet.gateway.metric("plait_slo_calls_total", objective="latency", slo="tpot") >= 1
    report = fleet.engines["demo-1"].get("/cache_state").json()
    assert report["scheduler"]["takes_objectives"]
    assert report["scheduler"]["slo_attainment"] is not None
