"""What metrics say of the waits of calls, and of what was predicted when they were placed."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from plait.backends.errors import LimitError
from plait.gateway.calls.call import Answer, Attempt
from plait.gateway.calls.metrics import CallMetrics
from plait.gateway.fleet.booking import CallUsage
from plait.gateway.fleet.router import Router
from plait.gateway.metrics import new_registry
from plait.policy.types import Call, Placement
from tests.gateway.calls.scripted_engines import Client, FakeHttp, gateway, until_stuck
from tests.gateway.calls.test_gate import close_gate, open_gate, whole
from tests.gateway.calls.test_metrics import COSTS, ended
from tests.gateway.exposed import samples

CALL = Call("c", "m", 257, 64, [1, 2, 3, 4])
WAIT_S = 0.05


def of(registry: CollectorRegistry, name: str) -> dict[str, float]:
    """The samples of a metric by their labels."""
    return {
        labels: n for full, n in samples(registry).items() for at, _, labels in (full.partition("{"),) if at == name
    }


def fleet(*engines: str) -> Router:
    router = Router()
    for engine_id in engines:
        router.add_engine(engine_id, COSTS)
        router.health.answered(engine_id, {"m": None})
    return router


def attempt(router: Router, placement: Placement, first_s: float | None = None) -> Attempt:
    """A call that is placed at 10 s, and gets its first token so much later."""
    booking = router.book(CALL, placement, 10.0)
    if first_s is not None:
        router.first_token(booking, 10.0 + first_s)
    return Attempt(booking, Answer(usage=CallUsage(257, 5, 64)))


async def test_each_call_counts_once_for_each_reason_for_which_it_waited() -> None:
    async with gateway(FakeHttp(whole(), whole(), whole())) as made:
        await made.deliver_whole(Client())
        assert of(made.registry, "plait_waited_seconds_count") == {}
        close_gate(made)
        calls = [asyncio.create_task(made.deliver_whole(Client())) for _ in range(2)]
        await asyncio.sleep(WAIT_S)
        assert of(made.registry, "plait_waited_seconds_count") == {}
        open_gate(made)
        await asyncio.gather(*calls)
        await until_stuck()
        counts, sums = (of(made.registry, f"plait_waited_seconds_{what}") for what in ("count", "sum"))
        assert counts == {'model="m",why="slot"}': 1, 'model="m",why="turn"}': 1}
        assert all(waited_s >= WAIT_S / 2 for waited_s in sums.values())


async def test_a_call_that_is_given_up_has_waited() -> None:
    async with gateway(FakeHttp()) as made:
        close_gate(made)
        made.gate._hold_s = WAIT_S
        with pytest.raises(LimitError):
            await made.deliver_whole(Client())
        assert of(made.registry, "plait_waited_seconds_count") == {'model="m",why="slot"}': 1}


def test_the_time_to_a_first_token_is_compared_with_what_was_predicted_for_it() -> None:
    router, registry = fleet("a", "b"), new_registry()
    metrics = CallMetrics(registry)
    for ratio in (2.0, 0.4):
        placement = router.select(CALL, 10.0)
        first_s = ratio * placement.first_token_s
        metrics.left_engine(attempt(router, placement, first_s), "ok", None, 9.0, 12.0)
    metrics.left_engine(attempt(router, router.select(CALL, 10.0)), "ok", None, 9.0, 12.0)  # a whole answer
    counts, sums = (of(registry, f"plait_first_token_ratio_{what}") for what in ("count", "sum"))
    assert sum(counts.values()) == 2
    assert sum(sums.values()) == pytest.approx(2.4)
    buckets = of(registry, "plait_first_token_ratio_bucket")
    assert sum(n for labels, n in buckets.items() if 'le="0.5"' in labels) == 1


def test_nothing_is_compared_where_nothing_was_predicted() -> None:
    router, registry = fleet("a"), new_registry()
    metrics = CallMetrics(registry)
    made = attempt(router, router.select(CALL, 10.0), 1.0)
    metrics.left_engine(made, "ok", None, 9.0, 12.0)
    metrics.ended(ended(CALL, made))
    assert sum(of(registry, "plait_first_token_ratio_count").values()) == 0
    assert sum(of(registry, "plait_compared_calls_total").values()) == 0


def test_the_margins_of_calls_add_up_and_none_counts_below_zero() -> None:
    router, registry = fleet("a", "b"), new_registry()
    metrics = CallMetrics(registry)
    attempt(router, router.select(CALL, 10.0))  # the other engine is ahead now
    placement = router.select(CALL, 10.0)
    margin, compared = placement.margin(), placement.compared
    assert margin.margin_s is not None
    assert compared is not None
    metrics.ended(ended(CALL, attempt(router, placement)))
    counted = [of(registry, f"plait_{name}_total") for name in ("compared_calls", "margin_seconds")]
    assert counted == [{'model="m"}': 1}, {'model="m"}': pytest.approx(margin.margin_s)}]
    assert margin.margin_s > 0

    dearer = compared.next_best
    assert dearer is not None
    cheaper = next(one for one in compared.candidates if one is not dearer)
    chosen = placement._replace(
        engine_id=dearer.engine.engine_id, cost=dearer.cost, compared=compared._replace(next_best=cheaper)
    )
    metrics.ended(ended(CALL, attempt(router, chosen)))
    counted = [of(registry, f"plait_{name}_total") for name in ("compared_calls", "margin_seconds")]
    assert counted == [{'model="m"}': 2}, {'model="m"}': pytest.approx(margin.margin_s)}]
