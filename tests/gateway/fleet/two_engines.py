"""Two engines, a and b, whose calls take a millisecond a token; and calls on the first."""

from __future__ import annotations

from plait.gateway.fleet.booking import Booking
from plait.gateway.fleet.router import Router
from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.types import Call

COSTS = CostModel(PiecewiseLinear(((0, 0.0),), 0.001), 0.0, 0.0, 0.0, LongAttention())
HANG_S = 8.0


def two_engines() -> Router:
    """A router that knows them, and that both serve m."""
    made = Router("round_robin")
    for name in "ab":
        made.add_engine(name, COSTS, hang_s=HANG_S)
        made.health.answered(name, {"m": None})
    return made


def booked(
    router: Router, now_s: float, *, tokens: int = 100, streamed: bool = True, limit: int | None = 10
) -> Booking:
    """A call on engine a."""
    call = Call("c", "m", tokens, 64, [], output_limit=limit, streamed=streamed)
    placement = router.select(call, 0.0, prefer="a")
    assert placement.engine_id == "a"
    return router.book(call, placement, now_s)
