"""Many streams at once, with every engine up and with one that is killed under them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest

from e2e.sdk import asking, async_client, sync_client
from e2e.server_process import Server, eventually
from e2e.servers import Fleet, Launcher

STREAMS = 64
CHUNKS = 200
UNDER_WAY_CHUNKS = 10


@dataclass
class Followed:
    """What one client saw: its engine, the chunks without their time, and the error that ended them."""

    engine: str = ""
    chunks: list[dict[str, Any]] = field(default_factory=list)
    error: openai.APIError | None = None

    @property
    def texts(self) -> list[str]:
        """The pieces of text."""
        deltas = [choice["delta"] for chunk in self.chunks for choice in chunk["choices"]]
        return [delta["content"] for delta in deltas if delta["content"]]


async def follow(
    server: Server, count: int = STREAMS, on_chunk: Callable[[list[Followed]], None] | None = None
) -> list[Followed]:
    """Ask for that many streams at once and read them to their ends; `on_chunk` is called with all at each chunk."""
    followed = [Followed() for _ in range(count)]

    async def read(client: openai.AsyncOpenAI, number: int) -> None:
        seen = followed[number]
        text = f"Stream {number}: " + f"count to {number}, please. " * 20
        request = asking(text, max_tokens=CHUNKS, seed=number, stream=True, extra_body={"ignore_eos": True})
        headers = {"x-request-id": f"stream-{number}"}
        raw = await client.chat.completions.with_raw_response.create(**request, extra_headers=headers)
        seen.engine = raw.headers.get("plait-engine", "")
        try:
            async for chunk in raw.parse():
                seen.chunks.append(chunk.model_dump(exclude={"created"}))
                if on_chunk:
                    on_chunk(followed)
        except openai.APIError as error:
            seen.error = error

    async with async_client(server) as client:
        await asyncio.gather(*(read(client, number) for number in range(count)))
    return followed


@pytest.fixture(scope="module")
def expected(fleet: Fleet) -> list[list[dict[str, Any]]]:
    """The chunks of each stream as an engine sends them by itself."""
    direct = asyncio.run(follow(fleet.engines["demo-2"]))
    assert [len(seen.texts) for seen in direct] == [CHUNKS] * STREAMS
    return [seen.chunks for seen in direct]


async def test_every_client_gets_every_event_as_the_engine_sent_it(
    fleet: Fleet, expected: list[list[dict[str, Any]]]
) -> None:
    followed = await follow(fleet.gateway)
    assert [seen.chunks for seen in followed] == expected
    assert fleet.gateway.metric("plait_engine_outstanding_calls") == 0


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Three engines slow enough (a stream takes some ten seconds) to be killed in the middle."""
    with Launcher(tmp_path_factory.mktemp("trio")) as launch:
        engines = [launch.engine(f"trio-{number}", time_scale=0.5) for number in range(3)]
        fleet = Fleet(launch.gateway(engines), {engine.name: engine for engine in engines})
        fleet.start()
        yield fleet


async def test_a_killed_engine_is_noticed_by_its_own_clients_only(
    trio: Fleet, expected: list[list[dict[str, Any]]]
) -> None:
    killed: list[str] = []

    def kill_once_all_are_under_way(followed: list[Followed]) -> None:
        if not killed and all(len(seen.chunks) >= UNDER_WAY_CHUNKS for seen in followed):
            killed.append(followed[0].engine)
            trio.engines[followed[0].engine].kill()

    followed = await follow(trio.gateway, on_chunk=kill_once_all_are_under_way)
    (victim,) = killed
    assert {seen.engine for seen in followed} == trio.engines.keys()
    for seen, whole in zip(followed, expected, strict=True):
        if seen.engine == victim:
            assert seen.error is not None
            assert (seen.error.code, seen.error.type) == ("engine_error", "engine_error")
            assert UNDER_WAY_CHUNKS <= len(seen.chunks) < len(whole)
            assert seen.chunks == whole[: len(seen.chunks)]
        else:
            assert (seen.error, seen.chunks) == (None, whole)

    await asyncio.to_thread(check_that_the_others_serve, trio, victim)
    await asyncio.to_thread(check_that_it_comes_back, trio, victim)


def check_that_the_others_serve(trio: Fleet, down: str) -> None:
    eventually(lambda: trio.gateway.metric("plait_engine_up", engine=down) == 0)
    assert trio.gateway.metric("plait_engine_up") == 2
    assert trio.gateway.metric("plait_engine_outstanding_calls") == 0
    ready = trio.gateway.get("/ready")
    assert (ready.status_code, ready.json()["engines_up"]) == (200, {"demo": 2})
    assert down not in {engine_of_a_call(trio.gateway, number) for number in range(6)}


def check_that_it_comes_back(trio: Fleet, victim: str) -> None:
    assert trio.gateway.metric("plait_engine_resident_tokens", engine=victim) > 0
    trio.engines[victim].start()
    eventually(lambda: trio.gateway.metric("plait_engine_up", engine=victim) == 1)
    # It starts cold, and the gateway learns so from its new epoch.
    eventually(lambda: trio.gateway.metric("plait_engine_resident_tokens", engine=victim) == 0)
    assert victim in {engine_of_a_call(trio.gateway, number) for number in range(6, 18)}


def engine_of_a_call(gateway: Server, number: int) -> str:
    with sync_client(gateway) as client:
        raw = client.chat.completions.with_raw_response.create(**asking(f"Call {number} " * 30, max_tokens=1))
    return raw.headers["plait-engine"]


async def test_a_call_without_a_byte_moves_from_a_killed_engine(trio: Fleet) -> None:
    """A call that does not stream has brought nothing to its client yet."""
    async with async_client(trio.gateway, max_retries=0) as client:
        request = asking("Take your time.", max_tokens=CHUNKS, extra_body={"ignore_eos": True})
        call: Any = asyncio.ensure_future(client.chat.completions.with_raw_response.create(**request))
        victim = await asyncio.to_thread(busy_engine, trio)
        victim.kill()
        raw = await call
    assert raw.headers["plait-engine"] != victim.name
    answer = raw.parse()
    assert (answer.usage and answer.usage.completion_tokens) == CHUNKS
    assert trio.gateway.metric("plait_calls_total", engine=victim.name, outcome="failed") >= 1


def busy_engine(fleet: Fleet) -> Server:
    """The one engine that runs something."""
    busy: list[Server] = []

    def found() -> bool:
        busy[:] = [engine for engine in fleet.engines.values() if engine.metric("plait_engine_calls_running")]
        return bool(busy)

    eventually(found)
    return busy[0]
