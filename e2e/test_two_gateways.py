"""Two gateways before the same engines: each knows of the other's calls, by the engines' reports."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from e2e.sdk import asking
from e2e.server_process import Server, eventually
from e2e.servers import Launcher
from e2e.two_gateways import UNCHANGED_S, begin, begin_all, others

KILLS: Final = 100 if "PLAIT_NIGHTLY" in os.environ else 2
AT_ONCE: Final = 5
ENDLESS: Final = {"max_tokens": 4_000, "ignore_eos": True}
Fleet = tuple[Server, Server]


@pytest.fixture
def gateways(tmp_path: Path) -> Iterator[Fleet]:
    """Two gateways over two engines."""
    with Launcher(tmp_path) as launch:
        engines = [launch.engine(name, time_scale=1) for name in ("a", "b")]
        upstream = {"probe_interval_s": UNCHANGED_S}
        one, two = (launch.gateway(engines, name, upstream=upstream) for name in ("one", "two"))
        for servers in (engines, (one, two)):
            for server in servers:
                server.start()
            for server in servers:
                server.wait_until_ready()
        for gateway in (one, two):
            knows(gateway)
        yield one, two


def knows(gateway: Server) -> None:
    """Wait until a gateway has the reports of both engines. Calls from before say nothing of it to the engine."""
    eventually(lambda: gateway.metric("plait_engine_reports") == 2)


def test_each_sees_the_others_calls_and_their_end(gateways: Fleet) -> None:
    one, two = gateways
    with ExitStack() as stack:
        for number in range(3):
            begin(one, stack, asking(f"Tell me story {number}.", **ENDLESS))
        eventually(lambda: others(two) == 3)
        with ExitStack() as of_two:
            begin(two, of_two, asking("Tell me one more.", **ENDLESS))
            eventually(lambda: others(one) == 1)
            assert one.metric("plait_engine_outstanding_calls") == 3, "own calls are counted once"
            assert others(two) == 3
        eventually(lambda: others(one) == 0)
    eventually(lambda: others(two) == 0)
    for gateway in gateways:
        assert gateway.metric("plait_engine_outstanding_calls") == 0


def test_a_gateway_that_is_killed_leaves_no_calls_behind_in_the_other(gateways: Fleet) -> None:
    one, two = gateways
    for number in range(KILLS):
        with ExitStack() as stack:
            begin_all(one, stack, [asking(f"Story {number} {call}.", **ENDLESS) for call in range(AT_ONCE)])
            eventually(lambda: others(two) == AT_ONCE)
            one.kill()
            eventually(lambda: others(two) == 0)
        one.start()
        one.wait_until_ready()
        knows(one)
    assert two.post("/v1/chat/completions", json=asking("Are you well?")).status_code == 200
