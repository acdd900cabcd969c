"""Engines that come and go with the addresses of a name."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import cast

import pytest
from structlog.testing import capture_logs

from plait.gateway.config.file import ConfigError, parse_config
from plait.gateway.config.sections import EngineConfig, ServiceConfig
from plait.gateway.guests.discovery.discovery import Discovery, engine_at
from plait.gateway.membership.engine_set import EngineSet
from plait.gateway.metrics import new_registry
from plait.gateway.supervision import Supervisor
from tests.waiting import WITHIN_S

SERVICE = ServiceConfig(url="http://engines:8000", name="vllm", models=("m",), api_key="k", interval_s=0.01)


class FakeSet:
    """The engines by url; those that leave are gone at once."""

    def __init__(self) -> None:
        self.urls: dict[str, str] = {}
        self.successors: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self.urls

    def put(self, engine: EngineConfig) -> None:
        self.urls[engine.name] = engine.url

    def leave(self, name: str, successors: list[str]) -> None:
        del self.urls[name]
        self.successors = sorted(successors)


class Named:
    """A name with addresses, which may not be found."""

    def __init__(self) -> None:
        self.addresses: set[str] = set()
        self.fails = False
        self.lookups = 0

    async def lookup(self, host: str, port: int) -> set[str]:
        assert (host, port) == ("engines", 8000)
        self.lookups += 1
        if self.fails:
            raise OSError(-2, "Name or service not known")
        return set(self.addresses)


@pytest.fixture
async def parts() -> AsyncIterator[tuple[Named, FakeSet, Discovery]]:
    named, engines, supervisor = Named(), FakeSet(), Supervisor(new_registry())
    yield named, engines, Discovery([SERVICE], cast("EngineSet", engines), supervisor, named.lookup)
    await supervisor.close()


async def test_engines_follow_the_addresses(parts: tuple[Named, FakeSet, Discovery]) -> None:
    named, engines, discovery = parts
    dice = random.Random(7)
    for _ in range(200):
        named.addresses = {f"10.0.0.{number}" for number in range(6) if dice.random() < 0.5}
        named.fails = dice.random() < 0.2
        before = dict(engines.urls)
        await discovery.look_up(SERVICE)
        expected = {f"vllm-{one}": f"http://{one}:8000" for one in named.addresses}
        assert engines.urls == (before if named.fails or not named.addresses else expected)


async def test_engines_that_leave_wait_for_those_that_come(parts: tuple[Named, FakeSet, Discovery]) -> None:
    named, engines, discovery = parts
    for found in ({"fd00::1"}, {"fd00::2", "fd00::3"}):
        named.addresses = found
        await discovery.look_up(SERVICE)
    assert engines.urls == {"vllm-fd00::2": "http://[fd00::2]:8000", "vllm-fd00::3": "http://[fd00::3]:8000"}
    assert engines.successors == ["vllm-fd00::2", "vllm-fd00::3"]


async def test_addresses_that_are_left_out_are_said_once(parts: tuple[Named, FakeSet, Discovery]) -> None:
    named, engines, discovery = parts
    named.addresses = {"10.0.0.1", "fd00::1"}
    with capture_logs() as logs:
        for _ in range(2):
            await discovery.look_up(SERVICE)
        assert engines.urls.keys() == {"vllm-10.0.0.1"}
        (said,) = logs
        assert (said["event"], said["log_level"]) == ("only addresses of one family are used", "warning")
        assert (said["used"], said["left_out"]) == ("IPv4", ["fd00::1"])
        named.addresses = {"10.0.0.1"}
        await discovery.look_up(SERVICE)
        named.addresses = {"10.0.0.1", "fd00::1"}
        await discovery.look_up(SERVICE)
    assert len(logs) == 2, "it is said again after it was not so"


async def test_the_name_is_looked_up_again_and_again(parts: tuple[Named, FakeSet, Discovery]) -> None:
    named, _, discovery = parts
    discovery.open()
    async with asyncio.timeout(WITHIN_S):
        while named.lookups < 3:  # noqa: ASYNC110 - of the discovery's own task
            await asyncio.sleep(0.005)


def test_an_engine_has_the_keys_of_its_service() -> None:
    engine = engine_at(SERVICE, "10.0.0.1")
    assert (engine.url, engine.name, engine.models, engine.api_key) == (
        "http://10.0.0.1:8000", "vllm-10.0.0.1", ("m",), "k",
    )  # fmt: skip


def test_a_service_is_enough_and_has_no_certificate() -> None:
    config = parse_config({"services": [{"url": "http://engines:8000"}]}, "test")
    assert config.services[0].name == "engines:8000"
    with pytest.raises(ConfigError, match="expected http"):
        parse_config({"services": [{"url": "https://engines"}]}, "test")
