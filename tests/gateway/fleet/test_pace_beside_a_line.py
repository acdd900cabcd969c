"""An engine's pace is compared with what the engine was sent, however many calls wait for it in the gateway."""

from __future__ import annotations

import pytest

from plait.gateway.fleet.booking import CallUsage
from plait.gateway.fleet.router import Router
from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.types import Call
from tests.invariants import check

COSTS = CostModel(PiecewiseLinear(((0, 0.010),), 0.0001), 0.0, 0.0, 1e-6, LongAttention())
"""Each iteration takes longer with each call and each token of context."""
RUNNING, ROUNDS, OUTPUT_TOKENS = 10, 10, 100
CALL = Call("c", "m", 1_000, 64, [], output_limit=OUTPUT_TOKENS)


@pytest.fixture
def router() -> Router:
    made = Router("round_robin")
    for name in "ab":
        made.add_engine(name, COSTS)
        made.health.answered(name, {"m": None})
    return made


def decode(router: Router, engine: str, begun_s: float) -> float:
    """Calls decode at an engine as the cost model says. Returns when they end."""
    bookings = [router.book(CALL, router.select(CALL, begun_s, prefer=engine), begun_s) for _ in range(RUNNING)]
    for booking in bookings:
        router.first_token(booking, begun_s)
    time_s = (OUTPUT_TOKENS - 1) * COSTS.decode_iteration_s(RUNNING, sum(one.context_tokens for one in bookings))
    for booking in bookings:
        router.settle(booking, CallUsage(CALL.prompt_tokens, OUTPUT_TOKENS), begun_s + time_s)
    return begun_s + time_s


@pytest.mark.parametrize("waiting", [0, 300])
def test_calls_that_wait_in_the_gateway_make_no_engine_look_fast(router: Router, waiting: int) -> None:
    line = [router.book(CALL, router.select(CALL, 0.0, prefer="a"), 0.0, waits=True) for _ in range(waiting)]
    ends_s = 0.0
    for _ in range(ROUNDS):
        ends_s = max(decode(router, engine, ends_s) for engine in "ab")
    router.age(ends_s)
    known = [router.engines[engine].view.pace.known(ends_s) for engine in "ab"]
    assert known[0] == pytest.approx(known[1], rel=0.01)
    assert [router.engines[engine].view.slowness for engine in "ab"] == [1.0, 1.0]
    for booking in line[::2]:
        router.send(booking, ends_s)
    for booking in line:
        router.release(booking, ends_s, delivered=False)
    assert router.engines["a"].view.unsent_context_tokens == 0.0
    check(router)
