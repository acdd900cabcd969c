"""Two gateways before the same real engines: each knows of the other's calls, by the engines' reports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final

import pytest

from e2e.real_engines.engine import MODEL
from e2e.real_engines.findings import Findings
from e2e.real_engines.fleet import EngineFleet, new_gateway
from e2e.sdk import asking
from e2e.server_process import Server, eventually
from e2e.two_gateways import UNCHANGED_S, begin, begin_all, others, seen_after_s

AT_ONCE: Final = 3


@pytest.fixture(scope="module")
def other(fleet: EngineFleet, model: Path, folder: Path) -> Iterator[Server]:
    """A second gateway over the fleet's engines."""
    gateway = new_gateway("other-gateway", fleet.engines, model, folder, probe_interval_s=UNCHANGED_S)
    second = EngineFleet(gateway, fleet.engines)
    with ExitStack() as stack:
        second.start_gateway(stack)
        knows(second.gateway)
        yield second.gateway


def knows(gateway: Server) -> None:
    """Wait until a gateway has the reports of both engines. Calls from before say nothing of it to the engine."""
    eventually(lambda: gateway.metric("plait_engine_reports") == 2)


def story(number: int) -> dict[str, Any]:
    return asking(f"Tell me story {number}.", model=MODEL, max_tokens=3_000, ignore_eos=True)


def reported(fleet: EngineFleet) -> int:
    """The calls that the engines report."""
    return sum(len(engine.cache_state().calls or ()) for engine in fleet.engines.values())


def test_calls_through_either_are_seen_by_the_other(fleet: EngineFleet, other: Server, findings: Findings) -> None:
    gateway, times_s = fleet.gateway, []
    for round_ in range(3):
        with ExitStack() as stack:
            begin_all(gateway, stack, [story(10 * round_ + number) for number in range(AT_ONCE)])
            times_s.append(seen_after_s(other, AT_ONCE))
            begin(other, stack, story(10 * round_ + 9))
            times_s.append(seen_after_s(gateway, 1))
            assert gateway.metric("plait_engine_outstanding_calls") == AT_ONCE, "own calls are counted once"
            assert (others(gateway), others(other)) == (1, AT_ONCE)
        eventually(lambda: reported(fleet) == 0)
        eventually(lambda: others(gateway) == others(other) == 0)
    findings.figures["calls seen by the other gateway"] = {"after (s), median": median(times_s)}


def test_a_gateway_that_is_killed_leaves_no_calls_behind(fleet: EngineFleet, other: Server, findings: Findings) -> None:
    times_s = []
    for round_ in range(3):
        with ExitStack() as stack:
            begin_all(other, stack, [story(100 + 10 * round_ + number) for number in range(AT_ONCE)])
            seen_after_s(fleet.gateway, AT_ONCE)
            other.kill()
            eventually(lambda: reported(fleet) == 0)
            times_s.append(seen_after_s(fleet.gateway, 0))
        other.start()
        other.wait_until_ready()
        knows(other)
    findings.figures["killed gateway forgotten after its calls have left the engines"] = {"s, longest": max(times_s)}
    assert fleet.gateway.metric("plait_engine_outstanding_calls") == 0
