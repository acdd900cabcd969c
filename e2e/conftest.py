"""The servers that most tests share, and the clients they are asked through."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI, OpenAI

from e2e.postgresql.server import stop_shared_postgres
from e2e.sdk import Sdk, async_client, sync_client
from e2e.server_process import STARTED, Server
from e2e.servers import Fleet, Launcher
from e2e.tenants import KEYS

CONTEXT_TOKENS = 512
"""Of the model `small`; that of `demo` is the engine's whole KV cache."""
MAX_BODY_BYTES = 256 * 1024

# A shell starts what runs in its background with SIGINT ignored, which all processes of the tests would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that are marked `nightly` run in `make nightly` only."""
    if "PLAIT_NIGHTLY" not in os.environ:
        for item in items:
            if item.get_closest_marker("nightly") is not None:
                item.add_marker(pytest.mark.skip(reason="runs in `make nightly`"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show with a failed test what the servers logged meanwhile."""
    report = yield
    if report.failed:
        active = [server for server in STARTED if server.log() and server.log_path.stat().st_mtime >= call.start]
        report.sections += [(f"stderr of {server.name}", server.log_tail()) for server in active]
    return report


@pytest.fixture(scope="session", autouse=True)
def no_server_left() -> Iterator[None]:
    """Whatever the tests did, no process outlives them."""
    yield
    left = [server for server in STARTED if server.running]
    for server in left:
        server.kill()
    stop_shared_postgres()
    assert not left, f"still running: {', '.join(server.name for server in left)}"


def two_models(launch: Launcher) -> Fleet:
    """Two engines with the model `demo` and one with `small`, behind one gateway, started."""
    small = launch.engine("small-1", model="small", options=["--max-context-tokens", str(CONTEXT_TOKENS)])
    engines = [launch.engine("demo-1"), launch.engine("demo-2"), small]
    gateway = launch.gateway(engines, models=["demo", "small"], server={"max_body_bytes": MAX_BODY_BYTES})
    fleet = Fleet(gateway, {engine.name: engine for engine in engines})
    fleet.start()
    return fleet


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The servers of all tests that do not care what was called before."""
    with Launcher(tmp_path_factory.mktemp("fleet")) as launch:
        yield two_models(launch)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launcher]:
    """For servers of a test's own, which stop with it."""
    with Launcher(tmp_path) as launcher:
        yield launcher


@pytest.fixture
def client(fleet: Fleet) -> Iterator[OpenAI]:
    """The SDK on the gateway."""
    with sync_client(fleet.gateway) as client:
        yield client


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two engines behind a gateway with two tenants, which shows held streams that it lives at once."""
    with Launcher(tmp_path_factory.mktemp("team")) as launch:
        engines = [launch.engine(name, time_scale=50) for name in ("demo-1", "demo-2")]
        gateway = launch.gateway(engines, server={"api_keys": KEYS}, sessions={"keep_alive_s": 0.05})
        fleet = Fleet(gateway, {engine.name: engine for engine in engines})
        fleet.start()
        yield fleet


@pytest.fixture
async def tenant(team: Fleet) -> AsyncIterator[AsyncOpenAI]:
    """The SDK's async client of the team's first tenant."""
    async with async_client(team.gateway, api_key=KEYS[0]) as client:
        yield client


@pytest.fixture(params=["gateway", "engine"])
def server(request: pytest.FixtureRequest, fleet: Fleet) -> Server:
    """The gateway, then an engine with the model `demo` itself: clients are to see no difference."""
    return fleet.gateway if request.param == "gateway" else fleet.engines["demo-1"]


@pytest.fixture(params=["sync", "async"])
async def sdk(request: pytest.FixtureRequest, server: Server) -> AsyncIterator[Sdk]:
    """Either client on either server."""
    sdk = Sdk(sync_client(server) if request.param == "sync" else async_client(server))
    yield sdk
    await sdk.close()
