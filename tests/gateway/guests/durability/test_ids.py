"""What is no id, in each place of each route that takes one: it is refused, and no store hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from starlette.routing import Route

from plait.gateway.ids import SESSION_ID
from tests.gateway.guests.durability.durable_gateway import DurableServed
from tests.gateway.guests.durability.shared_gateways import gateway, shared_memory
from tests.gateway.guests.peers.shared_memory import SharedMemory
from tests.gateway.guests.programs.chained_gateway import CHAT, GET, SUBMIT, Served, served_calls
from tests.waiting import WITHIN_S

BAD = {
    "NUL": "z\0b",
    "a control character": "z\nb",
    "long": "a" * 8_000,
    "half a surrogate pair": "z\ud800",
    "empty": "",
}
PROGRAM, VARIABLES, RESPONSES = "/v1/programs", "/v1/variables", "/v1/responses"
MESSAGES = [{"role": "user", "content": "Hi"}]
CALL = {"model": "m", "prompt": "{{a}} {{b}}", "placeholders": [{"name": "a"}, {"name": "b", "in_out": True}]}


class Bad:
    """Stands for the id in a body."""


@dataclass(frozen=True)
class Place:
    """Where a request has an id: in its path at `{}`, in its body at `Bad`, or in a header. The error names `param`."""

    path: str
    param: str
    body: Any = None
    header: str | None = None
    method: str = "POST"
    status: int = 400

    def __str__(self) -> str:
        return f"{self.method} {self.path} {self.header or ''} {self.param}"


def paths(path: str, param: str, *methods: str) -> list[Place]:
    return [Place(path, param, method=method, status=404) for method in methods]


def bodies(path: str, **given: Any) -> list[Place]:
    """A place for each field: the body that has an id in it."""
    return [Place(path, param, body) for param, body in given.items()]


PLACES = [
    *paths("/v1/sessions/{}", "session_id", "GET", "DELETE"),
    *paths("/v1/sessions/{}/close", "session_id", "POST"),
    *paths("/v1/sessions/{}/calls/c", "session_id", "DELETE"),
    *paths("/v1/sessions/s/calls/{}", "call_id", "DELETE"),
    *paths("/v1/variables/{}/x", "session_id", "GET"),
    *paths("/v1/variables/s/{}", "semantic_var_id", "GET"),
    *paths("/v1/responses/{}", "response_id", "GET", "DELETE"),
    *paths("/v1/responses/{}/input_items", "response_id", "GET"),
    *paths("/v1/responses/{}/cancel", "response_id", "POST"),
    *bodies("/v1/sessions", session_id={"session_id": Bad}),
    *bodies(
        VARIABLES,
        session_id={"session_id": Bad, "semantic_var_id": "x", "value": "1"},
        semantic_var_id={"session_id": "s", "semantic_var_id": Bad, "value": "1"},
        inputs={"session_id": "s", "semantic_var_id": "x", "inputs": [Bad]},
    ),
    *bodies(
        GET,
        session_id={"session_id": Bad, "semantic_var_id": "x"},
        semantic_var_id={"session_id": "s", "semantic_var_id": Bad},
    ),
    *bodies(
        SUBMIT,
        session_id={**CALL, "session_id": Bad},
        placeholders={**CALL, "session_id": "s", "placeholders": [{"name": "a", "semantic_var_id": Bad}]},
    ),
    Place(SUBMIT, "placeholders", {**CALL, "session_id": "s", "placeholders": [{"name": Bad, "in_out": True}]}),
    *bodies(
        PROGRAM,
        session={"session": Bad},
        external={"session": "s", "external": [Bad]},
        values={"session": "s", "values": {Bad: "1"}},
        gets={"session": "s", "gets": {Bad: None}},
        natives={"session": "s", "natives": [{"output": Bad, "inputs": ["x"]}]},
    ),
    Place(PROGRAM, "natives", {"session": "s", "natives": [{"output": "y", "inputs": [Bad]}]}),
    *(
        Place(
            path, f"plait.{key}", {"model": "m", "plait": {**more, key: [Bad] if key == "inputs" else Bad}, **request}
        )
        for path, request in (
            (CHAT, {"messages": MESSAGES}),
            ("/v1/completions", {"prompt": "Hi"}),
            ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}),
            (RESPONSES, {"input": "Hi"}),
            ("/v1/embeddings", {"input": "Hi"}),
        )
        for key, more in (("session", {}), ("inputs", {"session": "s"}), ("output", {"session": "s"}))
    ),
    *(
        Place(CHAT, f"plait-{key}", {"model": "m", "messages": MESSAGES}, header=f"plait-{key}")
        for key in ("session", "inputs", "output")
    ),
    *bodies(RESPONSES, previous_response_id={"model": "m", "input": "Hi", "previous_response_id": Bad}),
]


def put_in(body: Any, bad: str) -> Any:
    """A body with the id where `Bad` stands."""
    if isinstance(body, dict):
        return {bad if name is Bad else name: put_in(value, bad) for name, value in body.items()}
    return [put_in(value, bad) for value in body] if isinstance(body, list) else bad if body is Bad else body


async def refusal(served: Served, place: Place, bad: str) -> tuple[int, str]:
    """Status and `param` of the answer."""
    headers = {} if place.header is None else {place.header: bad}
    exchange = await served.send(place.path.format(bad), put_in(place.body, bad), method=place.method, **headers)
    await asyncio.wait_for(exchange.task, WITHIN_S)
    return exchange.status, exchange.json["error"].get("param") or place.param  # those of Anthropic name none


def walk(place: Place, bad: str) -> bool:
    """Whether an id can stand there: a header has no halves, and without an id a path is another one."""
    if place.header is not None:
        return bad.isprintable()
    return bool(bad) or "{}" not in place.path


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> SharedMemory:
    return shared_memory(monkeypatch)


@pytest.fixture
async def sharing(shared: SharedMemory) -> AsyncIterator[DurableServed]:
    async with gateway("one") as served:
        yield served


@pytest.fixture
async def alone() -> AsyncIterator[Served]:
    async with served_calls() as served:
        yield served


@pytest.mark.parametrize("bad", BAD)
async def test_no_route_takes_what_is_no_id(alone: Served, bad: str) -> None:
    await alone.value("known", "1")
    places = [place for place in PLACES if walk(place, BAD[bad])]
    refusals = {str(place): await refusal(alone, place, BAD[bad]) for place in places}
    assert refusals == {str(place): (place.status, place.param) for place in places}
    assert [session.session_id for session in alone.executor.sessions] == ["s"]


@pytest.mark.parametrize("bad", BAD)
async def test_no_store_hears_of_what_is_no_id(shared: SharedMemory, sharing: DurableServed, bad: str) -> None:
    await sharing.value("known", "1")
    places = [place for place in PLACES if walk(place, BAD[bad])]
    refusals = {str(place): await refusal(sharing, place, BAD[bad]) for place in places}
    assert refusals == {str(place): (place.status, place.param) for place in places}
    assert [key.name for key in shared.asked if not SESSION_ID.fits(key.name)] == []


async def test_who_asks_for_a_session_that_is_nowhere_leaves_nothing(
    shared: SharedMemory, sharing: DurableServed
) -> None:
    for method, path in (
        *(("GET", "/v1/sessions/no"), ("DELETE", "/v1/sessions/no"), ("POST", "/v1/sessions/no/close")),
        *(("GET", "/v1/variables/no/x"), ("DELETE", "/v1/sessions/no/calls/c")),
    ):
        exchange = await sharing.send(path, method=method)
        await asyncio.wait_for(exchange.task, WITHIN_S)
        assert exchange.refusal == (404, "session_not_found")
    assert shared.owners == {}


async def test_the_walk_has_all_routes_with_ids(alone: Served) -> None:
    known = {(place.method, place.path) for place in PLACES if "{}" in place.path}
    routes = [route for route in alone.gateway.routes if isinstance(route, Route) and route.param_convertors]
    for route in routes:
        if route.path.startswith(("/v1/sessions", "/v1/variables", "/v1/responses")):
            for method in (route.methods or set()) - {"HEAD"}:
                for name in route.param_convertors:
                    others = {other: "s" if other == "session_id" else "x" for other in route.param_convertors}
                    path = route.path_format.format(**{**others, name: "{}"}).replace("calls/x", "calls/c")
                    assert (method, path) in known
