"""Names that no database takes, from a tenant and from an engine: the other tenants of gateways notice nothing."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import count, cycle
from string import ascii_letters
from typing import Any, Final
from urllib.parse import quote

import httpx
import pytest

from e2e.postgresql.server import ABSENT, binaries, new_database, shared_postgres
from e2e.server_process import eventually
from e2e.servers import Launcher
from e2e.several_gateways import Gateways
from e2e.stub_engine import JSON, Script, StubEngine
from e2e.tenants import KEYS
from tests.call_routes import ROUTES
from tests.waiting import WITHIN_S

pytestmark = pytest.mark.skipif(binaries() is None, reason=ABSENT)

LONG: Final = "".join(random.Random(7).choices(ascii_letters, k=8_000))  # PostgreSQL would compress one letter
NAMES: Final = ("z\0b", "z\nb", "z\ud800b", LONG)
PERIOD_S: Final = 0.1
"""Ten bad names a second, and as many of an engine."""
PROGRAMS_AT_ONCE: Final = 3
NOWHERE: Final = 300

RESPONSE: Final = {"id": f"resp_{LONG[:3_000]}", "object": "response", "status": "completed", "output": []}
A, B = ({"name": name, "in_out": True} for name in "ab")
CALLS: Final = [
    {"model": "demo", "prompt": "Write {{a}}", "placeholders": [A], "max_tokens": 8},
    {"model": "demo", "prompt": "Judge {{a}}: {{b}}", "placeholders": [{"name": "a"}, B], "max_tokens": 8},
]

Request = tuple[str, str, dict[str, Any] | None]
"""Method, path and body."""


def requests_with(name: str) -> Iterator[Request]:
    """A request for each place where a name may stand."""
    escaped = quote(name, safe="", errors="surrogatepass")
    yield "GET", f"/v1/sessions/{escaped}", None
    yield "DELETE", f"/v1/sessions/{escaped}", None
    yield "GET", f"/v1/variables/{escaped}/x", None
    yield "GET", f"/v1/variables/s/{escaped}", None
    yield "GET", f"/v1/responses/{escaped}", None
    yield "POST", "/v1/sessions", {"session_id": name}
    yield "POST", "/v1/get", {"session_id": name, "semantic_var_id": "x"}
    yield "POST", "/v1/programs", {"session": name, "calls": CALLS}
    yield "POST", "/v1/chat/completions", {"model": "demo", "messages": [], "plait": {"session": name}}
    yield "POST", "/v1/responses", {"model": "demo", "input": "Hi", "previous_response_id": name}


BAD: Final = [request for name in NAMES for request in requests_with(name)]


@pytest.fixture(scope="module")
def url() -> str:
    return new_database(shared_postgres())


@pytest.fixture(scope="module")
def gateways(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateways]:
    with Launcher(tmp_path_factory.mktemp("bad-names")) as launch, StubEngine("odd", routes=tuple(ROUTES)) as odd:
        odd.script = Script([json.dumps(RESPONSE).encode()], headers=JSON)
        engines = [launch.engine(name) for name in ("a", "b")]
        several = launch.gateways(
            [*engines, {"name": "odd", "url": odd.url}],
            database=url,
            models=["demo", "odd"],
            tenants=[{"name": name, "api_keys": [key]} for name, key in zip(("good", "bad"), KEYS, strict=True)],
        )
        for server in (*engines, several):
            server.start()
        several.wait_until_ready()
        for metric in ("plait_engine_up", "plait_peer_up"):
            eventually(lambda metric=metric: all(one.metric(metric) == 3 for one in several.members))  # type: ignore[misc]
        yield several


class Load:
    """What tenants send to random gateways, and how often each status came."""

    def __init__(self, gateways: Gateways) -> None:
        self.good, self.bad, self.odd = Counter[int](), Counter[int](), Counter[int]()
        """Of programs, of bad names, and of responses from the engine that names them badly."""
        self._members = gateways.members
        self._stops = asyncio.Event()
        self._numbers, self._bad = count(), cycle(BAD)

    @asynccontextmanager
    async def sent(self) -> AsyncIterator[None]:
        """All of it, beside what is in the block."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(PROGRAMS_AT_ONCE):
                tasks.create_task(self._repeat(self._program, 0.0))
            tasks.create_task(self._repeat(self._bad_name, PERIOD_S))
            tasks.create_task(self._repeat(self._odd_response, PERIOD_S))
            yield
            self._stops.set()

    async def _repeat(self, send: Callable[[httpx.AsyncClient], Awaitable[None]], pause_s: float) -> None:
        async with httpx.AsyncClient(timeout=WITHIN_S, trust_env=False) as http:
            while not self._stops.is_set():
                await send(http)
                await asyncio.sleep(pause_s)

    async def _program(self, http: httpx.AsyncClient) -> None:
        body = {"session": f"good-{next(self._numbers)}", "calls": CALLS, "gets": {"b": None}}
        answer = await self._answer(http, KEYS[0], ("POST", "/v1/programs", body))
        self.good[answer.status_code] += 1

    async def _bad_name(self, http: httpx.AsyncClient) -> None:
        answer = await self._answer(http, KEYS[1], next(self._bad))
        self.bad[answer.status_code] += 1

    async def _odd_response(self, http: httpx.AsyncClient) -> None:
        answer = await self._answer(http, KEYS[0], ("POST", "/v1/responses", {"model": "odd", "input": "Hi"}))
        assert answer.json()["id"] == RESPONSE["id"]
        self.odd[answer.status_code] += 1

    async def _answer(self, http: httpx.AsyncClient, key: str, request: Request) -> httpx.Response:
        method, path, body = request
        content = None if body is None else json.dumps(body)
        url, headers = random.choice(self._members).url + path, {"authorization": f"Bearer {key}"}
        return await http.request(method, url, content=content, headers=headers)


def names(url: str) -> list[str]:
    """The names of all streams in the store."""
    return shared_postgres().run("SELECT name FROM plait.streams", url).split()


@pytest.mark.parametrize("seconds", [5.0, pytest.param(60.0, marks=pytest.mark.nightly)])
async def test_bad_names_of_a_tenant_and_of_an_engine_cost_others_nothing(
    url: str, gateways: Gateways, seconds: float
) -> None:
    load, unnamed = Load(gateways), gateways.metric("plait_unnamed_responses_total")
    least = seconds / PERIOD_S / 3
    async with load.sent():
        await asyncio.sleep(seconds)
        async with asyncio.timeout(WITHIN_S):
            while load.good.total() <= seconds or min(load.bad.total(), load.odd.total()) <= least:  # noqa: ASYNC110
                await asyncio.sleep(PERIOD_S)
    assert (set(load.good), set(load.bad), set(load.odd)) == ({200}, {400, 404}, {200})
    assert gateways.metric("plait_unnamed_responses_total") == unnamed + load.odd.total()
    assert gateways.metric("plait_store_refused_total") == 0, "the store has not heard of them"
    assert "the store cannot be used" not in gateways.log()
    assert all(name.startswith("good-") for name in names(url))


def test_who_asks_for_sessions_that_are_nowhere_leaves_nothing(url: str, gateways: Gateways) -> None:
    headers, before = {"authorization": f"Bearer {KEYS[0]}"}, set(names(url))
    with httpx.Client(trust_env=False, headers=headers, timeout=WITHIN_S) as http:
        for number in range(NOWHERE):
            one = gateways.members[number % len(gateways.members)]
            assert http.get(f"{one.url}/v1/sessions/nowhere-{number}").status_code == 404
        assert set(names(url)) == before
        http.post(f"{gateways.members[0].url}/v1/sessions", json={"session_id": "good-here"}).raise_for_status()
        found = [http.get(f"{one.url}/v1/sessions/good-here").status_code for one in gateways.members]
    assert (found, set(names(url)) - before) == ([200, 200, 200], {"good-here"})
