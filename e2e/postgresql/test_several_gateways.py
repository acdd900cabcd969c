"""Gateways that share a PostgreSQL look as one gateway to clients, whichever of them gets a request."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from e2e.postgresql.server import ABSENT, binaries
from e2e.server_process import NO_TLS, Server, eventually
from e2e.servers import Fleet, Launcher
from e2e.several_gateways import Gateways
from e2e.tenants import KEYS
from tests.waiting import WITHIN_S

pytestmark = pytest.mark.skipif(binaries() is None, reason=ABSENT)

CHAT = "/v1/chat/completions"
FEW = "the-key-of-a-tenant-with-few-calls-at-once"
MOST_RUNNING = 6
CALLS_PER_S = 10.0
BURST_S = 10.0


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateways]:
    with Launcher(tmp_path_factory.mktemp("several")) as launch:
        engines = [launch.engine(name) for name in ("a", "b")]
        tenants = [
            {"name": "free", "api_keys": [KEYS[0]]},
            {"name": "limited", "api_keys": [KEYS[1]], "calls_per_s": CALLS_PER_S},
            {"name": "few", "api_keys": [FEW], "max_running": MOST_RUNNING},
        ]
        several = launch.gateways(engines, tenants=tenants, server={"admin_key": "admin"})
        Fleet(several, {engine.name: engine for engine in engines}).start()
        eventually(lambda: all(one.metric("plait_peer_up") == 3 for one in several.members))
        yield several


def chat(text: str, **more: object) -> dict[str, object]:
    return {"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": 8, **more}


def post(gateway: Server, path: str, body: object, key: str = KEYS[0], **headers: str) -> httpx.Response:
    return gateway.post(path, json=body, headers={"authorization": f"Bearer {key}", **headers})


def get(gateway: Server, path: str, key: str = KEYS[0]) -> httpx.Response:
    return gateway.get(path, headers={"authorization": f"Bearer {key}"})


def value(gateway: Server, session: str, variable: str) -> object:
    return get(gateway, f"/v1/variables/{session}/{variable}").json().get("value")


@pytest.mark.parametrize("durable", ["true", "false"])
def test_a_session_is_the_same_from_every_gateway(gateways: Gateways, durable: str) -> None:
    for number in range(6):
        session = post(gateways, "/v1/sessions", {}, **{"plait-durable": durable}).json()["id"]
        made = post(gateways, CHAT, chat("Write", plait={"session": session, "output": "a"}))
        assert made.status_code == 200, made.text
        used = post(gateways, CHAT, chat("Judge {{a}}", plait={"session": session, "inputs": ["a"]}))
        assert used.status_code == 200, used.text
        text = made.json()["choices"][0]["message"]["content"]
        assert {str(value(one, session, "a")) for one in gateways.members} == {text}, number


def test_a_deleted_session_is_refused_by_every_gateway(gateways: Gateways) -> None:
    given = {"session_id": "deleted", "semantic_var_id": "v", "value": "x"}
    assert post(gateways.members[0], "/v1/variables", given).status_code == 200
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    assert gateways.members[1].request("DELETE", "/v1/sessions/deleted", headers=headers).status_code == 200
    for gateway in gateways.members:
        refused = post(gateway, "/v1/variables", given)
        assert (refused.status_code, refused.json()["error"]["code"]) == (410, "session_ended")


def test_a_response_is_continued_and_shown_by_every_gateway(gateways: Gateways) -> None:
    body = {"model": "demo", "input": "Hello", "max_output_tokens": 16}
    previous = None
    for gateway in (*gateways.members, *gateways.members):
        made = post(gateway, "/v1/responses", {**body, "previous_response_id": previous})
        assert made.status_code == 200, made.text
        previous = made.json()["id"]
        assert all(get(one, f"/v1/responses/{previous}").json()["id"] == previous for one in gateways.members)
    assert get(gateways, "/v1/responses/resp_unknown").status_code == 404
    unknown = post(gateways, "/v1/responses", {**body, "previous_response_id": "resp_unknown"})
    assert unknown.json()["error"]["code"] == "previous_response_not_found"


def test_a_rate_is_that_of_all_gateways_together(gateways: Gateways) -> None:
    begun_s = time.monotonic()

    def call(number: int) -> int:
        return post(gateways.members[number % 3], CHAT, chat(f"call {number}", max_tokens=1), KEYS[1]).status_code

    with ThreadPoolExecutor(12) as pool:
        statuses = list(pool.map(call, range(300)))
    allowed = CALLS_PER_S * (BURST_S + time.monotonic() - begun_s)
    assert set(statuses) == {200, 429}
    assert 0.9 * CALLS_PER_S * BURST_S <= statuses.count(200) <= 1.05 * allowed


async def test_what_a_tenant_may_have_running_it_has_where_its_calls_are(gateways: Gateways) -> None:
    one, two, _ = gateways.members
    begun = Counter[str]()

    async def stream(gateway: Server) -> None:
        body = chat("a long answer", stream=True, max_tokens=8_000, ignore_eos=True)
        async with http.stream(
            "POST", f"{gateway.url}{CHAT}", json=body, headers={"authorization": f"Bearer {FEW}"}
        ) as answer:
            begun[gateway.name] += 1
            assert answer.status_code == 200
            await asyncio.sleep(10 * WITHIN_S)

    async def has_begun(calls: int) -> None:
        async with asyncio.timeout(WITHIN_S):
            while begun.total() < calls:  # noqa: ASYNC110 - the streams have no event for all
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert begun.total() == calls

    async with httpx.AsyncClient(verify=NO_TLS, timeout=WITHIN_S) as http, asyncio.TaskGroup() as tasks:
        first = [tasks.create_task(stream(one)) for _ in range(8)]
        await has_begun(MOST_RUNNING)
        second = [tasks.create_task(stream(two)) for _ in range(3)]
        await has_begun(MOST_RUNNING + 1)  # where it had none, one goes at once
        for task in first:
            task.cancel()
        await has_begun(MOST_RUNNING + 3)  # what the one gave back the other may have
        for task in second:
            task.cancel()


def test_a_change_of_the_engines_is_made_in_all_gateways(gateways: Gateways) -> None:
    key = {"authorization": "Bearer admin"}
    for state in ("draining", "active"):
        changed = gateways.post("/admin/engines/b", json={"state": state}, headers=key)
        assert changed.status_code == 200, changed.text
        assert {one.get("/admin/engines/b", headers=key).json()["state"] for one in gateways.members} == {state}


def test_only_gateways_may_pass_for_gateways(gateways: Gateways) -> None:
    refused = post(gateways, CHAT, chat("x"), **{"plait-peer": "guessed 80"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "plait-peer")


def test_another_gateway_goes_on_with_the_sessions_of_one_that_was_killed(gateways: Gateways) -> None:
    """The last test: a gateway is missing then."""
    first, *others = gateways.members
    given = {"session_id": "s", "semantic_var_id": "v", "value": "kept"}
    assert post(first, "/v1/variables", given).status_code == 200
    response = post(first, "/v1/responses", {"model": "demo", "input": "Hello", "max_output_tokens": 16}).json()["id"]
    peers = others[0].get("/ready").json()["peers"]
    assert peers == {one.url: "live" for one in gateways.members}
    assert others[0].metric("plait_peer_up") == 3
    first.kill()
    eventually(lambda: all(value(one, "s", "v") == "kept" for one in others))
    more = {"model": "demo", "input": "more", "previous_response_id": response, "max_output_tokens": 16}
    eventually(lambda: all(post(one, "/v1/responses", more).status_code == 200 for one in others))
    eventually(lambda: first.url not in others[0].get("/ready").json()["peers"])
    assert sum(one.metric("plait_sessions_taken_over_total") for one in others) > 0
