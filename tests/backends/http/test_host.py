"""The addresses of an engine's host: which are tried, in which order, and what is said of them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from plait.backends.errors import EngineUnreachableError
from plait.backends.http import host as host_module
from plait.backends.http.client import HttpClient
from plait.backends.http.connection import Timeouts
from plait.backends.http.host import AddressError, Host, UnreachableHostError, addresses
from tests.backends.http.scripted_engine import always, ask, counts, full_backlog, on_both_loops, serving

FIRST, SECOND, THIRD = "10.0.0.1", "10.0.0.2", "fd00::3"


@contextmanager
def named(*found: str, stagger_s: float = 0.002) -> Iterator[None]:
    """Every name has these addresses, and attempts follow each other quickly."""

    async def resolve(_name: str, _port: int) -> list[str]:
        return list(found)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(host_module, "addresses", resolve)
        monkeypatch.setattr(host_module, "STAGGER_S", stagger_s)
        yield


class Opened:
    """A connection to an address."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Network:
    """Opens connections, unless an address is `refusing`, or `silent` until told otherwise."""

    def __init__(self, *, refusing: tuple[str, ...] = (), silent: tuple[str, ...] = ()) -> None:
        self.tried: list[str] = []
        self.opened: list[Opened] = []
        self._refusing = refusing
        self._silent = {address: asyncio.Event() for address in silent}

    async def open(self, address: str) -> Opened:
        self.tried.append(address)
        if address in self._refusing:
            raise AddressError("refused the connection")
        if address in self._silent:
            await self._silent[address].wait()
        self.opened.append(Opened(address))
        return self.opened[-1]

    def answer(self, address: str) -> None:
        self._silent[address].set()


# With sockets.


@on_both_loops
async def test_an_engine_is_reached_though_its_names_first_address_drops_packets() -> None:
    async with serving(always) as (engine, _):
        with full_backlog("127.0.0.2", engine.port), named("127.0.0.2", "127.0.0.1"):
            client = HttpClient(f"http://engine.test:{engine.port}")
            for _ in range(2):
                assert await ask(client) == b"ok"
            assert counts(client) == "open=1 idle=1"
            await client.aclose()


@on_both_loops
async def test_what_each_address_did_is_the_cause_of_an_error() -> None:
    with full_backlog("127.0.0.2") as port, named("127.0.0.2", "127.0.0.1"):
        client = HttpClient(f"http://engine.test:{port}", name="e", timeouts=Timeouts(connect_s=0.4))
        with pytest.raises(EngineUnreachableError, match=r"engine e cannot be reached$") as caught:
            await ask(client)
    refused = f"127.0.0.1:{port} refused the connection"
    said = rf"127\.0\.0\.2:{port} did not answer within 0\.\d+ s; {re.escape(refused)}"
    assert re.fullmatch(said, str(caught.value.__cause__))
    assert caught.value.cause == "connect_timeout"


@on_both_loops
async def test_one_address_is_named_too() -> None:
    with full_backlog() as port:
        pass
    with pytest.raises(EngineUnreachableError) as caught:
        await ask(HttpClient(f"http://127.0.0.1:{port}"))
    assert str(caught.value.__cause__) == f"127.0.0.1:{port} refused the connection"
    with full_backlog() as port, pytest.raises(EngineUnreachableError) as caught:
        await ask(HttpClient(f"http://127.0.0.1:{port}", timeouts=Timeouts(connect_s=0.005)))
    assert re.fullmatch(rf"127\.0\.0\.1:{port} did not answer within 0\.0\d+ s", str(caught.value.__cause__))


@on_both_loops
async def test_the_systems_resolver_is_asked() -> None:
    assert "127.0.0.1" in await addresses("localhost", 8000)
    for name in ("no-such-host.invalid", f"{'a' * 64}.localhost"):
        with pytest.raises(EngineUnreachableError) as caught:
            await ask(HttpClient(f"http://{name}"))
        assert f"the name {name} was not resolved" in str(caught.value.__cause__)


# The race.


async def test_an_address_needs_no_resolver() -> None:
    for address in (FIRST, THIRD):
        network = Network()
        with named():
            assert (await Host(address, 80).connect(network.open, 1.0)).address == address


async def test_a_refusal_is_followed_by_the_next_address_at_once() -> None:
    network = Network(refusing=(FIRST,))
    with named(FIRST, SECOND, stagger_s=60.0):
        assert (await Host("engine", 80).connect(network.open, 1.0)).address == SECOND


async def test_families_take_turns() -> None:
    network = Network(refusing=(FIRST, SECOND, THIRD))
    with named(FIRST, SECOND, THIRD), pytest.raises(UnreachableHostError) as caught:
        await Host("engine", 80).connect(network.open, 1.0)
    assert network.tried == [FIRST, THIRD, SECOND]
    assert str(caught.value) == "; ".join(
        f"{at}:80 refused the connection" for at in ("10.0.0.1", "[fd00::3]", "10.0.0.2")
    )
    assert not caught.value.timed_out


async def test_an_address_that_was_late_is_tried_last_for_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    network, host = Network(silent=(FIRST,)), Host("engine", 80)
    with named(FIRST, SECOND):
        for _ in range(2):
            assert (await host.connect(network.open, 1.0)).address == SECOND
        assert network.tried == [FIRST, SECOND, SECOND]
        monkeypatch.setattr(host_module, "LATE_S", 0.0)
        for _ in range(2):
            host._late_until_s.clear()
            await host.connect(network.open, 1.0)
        assert network.tried[3:] == [FIRST, SECOND, FIRST, SECOND]


async def test_only_one_connection_is_kept() -> None:
    network, before = Network(silent=(FIRST, SECOND)), asyncio.all_tasks()
    with named(FIRST, SECOND):
        connecting = asyncio.create_task(Host("engine", 80).connect(network.open, 5.0))
        while len(network.tried) < 2:  # noqa: ASYNC110 - of the host's own timer
            await asyncio.sleep(0.001)
        network.answer(FIRST)
        network.answer(SECOND)
        kept = await connecting
    assert [opened for opened in network.opened if not opened.is_closed] == [kept]
    assert asyncio.all_tasks() == before


async def test_a_cancelled_connect_ends_its_attempts() -> None:
    network, before = Network(silent=(FIRST, SECOND)), asyncio.all_tasks()
    with named(FIRST, SECOND):
        connecting = asyncio.create_task(Host("engine", 80).connect(network.open, 5.0))
        while len(network.tried) < 2:  # noqa: ASYNC110 - of the host's own timer
            await asyncio.sleep(0.001)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
    assert asyncio.all_tasks() == before


async def test_a_resolver_that_does_not_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(_name: str, _port: int) -> list[str]:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(host_module, "addresses", never)
    with pytest.raises(UnreachableHostError, match=r"^the name engine was not resolved within 0\.005 s$") as caught:
        await Host("engine", 80).connect(Network().open, 0.005)
    assert caught.value.timed_out
