"""Two gateways before the same engines: each knows of the other's calls, by the engines' reports."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from e2e.sdk import asking
from e2e.servers import NO_TLS, Launcher, Server, eventually

SEEN_WITHIN_S = 0.1
"""Of a report that is at most 20 ms old; asking for the metrics takes most of it."""
ROUNDS, AT_ONCE = 6, 5
Fleet = tuple[Server, Server]


@pytest.fixture
def gateways(tmp_path: Path) -> Iterator[Fleet]:
    """Two gateways over two engines."""
    with Launcher(tmp_path) as launch:
        engines = [launch.engine(name, time_scale=1) for name in ("a", "b")]
        one, two = (launch.gateway(engines, name) for name in ("one", "two"))
        for server in (*engines, one, two):
            server.start()
        for server in (*engines, one, two):
            server.wait_until_ready()
        for gateway in (one, two):
            knows(gateway)
        yield one, two


def knows(gateway: Server) -> None:
    """Wait until a gateway has the reports of both engines. Calls from before say nothing of it to the engine."""
    eventually(lambda: gateway.metric("plait_engine_reports") == 2)


def others(gateway: Server) -> float:
    """The calls that a gateway knows on all engines, and that it has not sent."""
    return gateway.metric("plait_engine_other_calls")


def seen_after_s(gateway: Server, calls: int) -> float:
    """How long it takes until a gateway knows of so many calls of others."""
    began_s = time.monotonic()
    eventually(lambda: others(gateway) == calls)
    return time.monotonic() - began_s


def stream(gateway: Server, stack: ExitStack, text: str) -> httpx.Response:
    """A call that has begun to answer, and takes long."""
    http = stack.enter_context(httpx.Client(base_url=gateway.url, verify=NO_TLS, timeout=60))
    body = asking(text, stream=True) | {"max_tokens": 4_000, "ignore_eos": True}
    return stack.enter_context(http.stream("POST", "/v1/chat/completions", json=body))


def test_each_sees_the_others_calls_and_their_end(gateways: Fleet) -> None:
    one, two = gateways
    with ExitStack() as stack:
        for number in range(3):
            stream(one, stack, f"Tell me story {number}.")
        assert seen_after_s(two, 3) < SEEN_WITHIN_S
        with ExitStack() as of_two:
            stream(two, of_two, "Tell me one more.")
            assert seen_after_s(one, 1) < SEEN_WITHIN_S
            assert one.metric("plait_engine_outstanding_calls") == 3, "own calls are counted once"
            assert others(two) == 3
        assert seen_after_s(one, 0) < 1
    assert seen_after_s(two, 0) < 1
    for gateway in gateways:
        assert gateway.metric("plait_engine_outstanding_calls") == 0


def test_a_gateway_that_is_killed_leaves_no_calls_behind_in_the_other(gateways: Fleet) -> None:
    one, two = gateways
    for number in range(ROUNDS):
        with ExitStack() as stack:
            threads = [
                threading.Thread(target=stream, args=(one, stack, f"Story {number} {call}.")) for call in range(AT_ONCE)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert seen_after_s(two, AT_ONCE) < SEEN_WITHIN_S
            one.kill()
            assert seen_after_s(two, 0) < 1
        one.start()
        one.wait_until_ready()
        knows(one)
    assert two.post("/v1/chat/completions", json=asking("Are you well?")).status_code == 200
