"""The built-in load: prompts without end, from bounded memory."""

from __future__ import annotations

import asyncio
from collections import Counter
from statistics import mean

import msgspec
import pytest

import plait.lab.simulation.endless_load
from plait.lab.simulation.endless_load import LEAST_SHARE, MOST_TURNS, EndlessLoad, send_endlessly
from tests.gateway.membership.watched_engine import until
from tests.waiting import WITHIN_S


def test_the_same_seed_gives_the_same_calls() -> None:
    one, other = EndlessLoad(3), EndlessLoad(3)
    assert [one.next_body("m") for _ in range(50)] == [other.next_body("m") for _ in range(50)]


def test_prefixes_are_shared_conversations_grow_and_nothing_else_is_kept() -> None:
    load = EndlessLoad()
    bodies = [load.next_body("m") for _ in range(2_000)]
    beginnings = [msgspec.json.encode([body["messages"], body.get("tools")])[:1500] for body in bodies]
    assert sum(count for count in Counter(beginnings).values() if count >= 10) > len(bodies) / 2
    turns = [len(body["messages"]) // 2 for body in bodies]
    assert max(turns) == MOST_TURNS
    assert len(msgspec.json.encode(load._conversations)) < 2_000_000
    assert len({msgspec.json.encode(body) for body in bodies}) == len(bodies)


def test_calls_come_at_the_rate_and_in_waves() -> None:
    load = EndlessLoad()
    assert abs(mean(load.pause_s(10.0, 0.0, 0.0) for _ in range(4_000)) - 0.1) < 0.01
    peak, low = (mean(load.pause_s(10.0, since_s, 0.6) for _ in range(4_000)) for since_s in (15.0, 45.0))
    assert 3 < low / peak < 5


class Gateway:
    """Takes calls, and says that it lives at once or, while it `is_late`, never."""

    def __init__(self) -> None:
        self.is_late = True
        self.calls = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            is_call = (await reader.readuntil(b"\r\n\r\n")).startswith(b"POST")
            self.calls += is_call
            if is_call or not self.is_late:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                writer.write_eof()
            await reader.read()
        finally:  # the test may end first
            writer.close()


async def test_a_late_machine_gets_fewer_calls_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plait.lab.simulation.endless_load, "LOOK_S", 0.01)
    monkeypatch.setattr(plait.lab.simulation.endless_load, "LATE_S", 0.05)
    gateway, said, rates = Gateway(), list[bool](), list[float]()
    pause_s = EndlessLoad.pause_s

    def told(load: EndlessLoad, calls_per_s: float, *others: float) -> float:
        rates.append(calls_per_s)
        return pause_s(load, calls_per_s, *others)

    monkeypatch.setattr(EndlessLoad, "pause_s", told)
    server = await asyncio.start_server(gateway.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, asyncio.timeout(WITHIN_S):
        task = asyncio.create_task(send_endlessly(url, "m", 640.0, 0.0, lambda: said.append(True)))
        await until(lambda: rates[-1:] == [640.0 * LEAST_SHARE])
        assert said == [True]
        gateway.is_late = False
        await until(lambda: rates[-1] == 640.0)
        task.cancel()
        await asyncio.wait([task])
    assert (rates[0], said) == (640.0, [True])
    assert gateway.calls
