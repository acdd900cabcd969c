"""An engine's pace is compared with what it was to do: also with prompts that it has begun and not finished."""

from __future__ import annotations

import pytest

from plait.gateway.fleet.booking import CallUsage
from plait.gateway.fleet.router import Router
from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.types import Call
from tests.invariants import check

COSTS = CostModel(PiecewiseLinear(((0, 0.010),), 0.0001), 0.0, 0.0, 0.0, LongAttention())
PROMPT_TOKENS, OUTPUT_TOKENS = 90_000, 50
PROMPT_S = PROMPT_TOKENS * 0.0001


@pytest.fixture
def router() -> Router:
    made = Router("round_robin")
    for name in "ab":
        made.add_engine(name, COSTS)
        made.health.answered(name, {"m": None})
    return made


def answer(router: Router, engine: str, begun_s: float, ended_s: float) -> None:
    """An engine answers a call with a short prompt in that time."""
    call = Call("c", "m", 100, 64, [], output_limit=OUTPUT_TOKENS)
    booking = router.book(call, router.select(call, begun_s, prefer=engine), begun_s)
    router.first_token(booking, begun_s)
    router.settle(booking, CallUsage(call.prompt_tokens, OUTPUT_TOKENS), ended_s)


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("fate", ["computed", "given up"])
def test_a_long_prompt_makes_the_answers_beside_it_no_slower_than_expected(
    router: Router, fate: str, streamed: bool
) -> None:
    alone_s = (OUTPUT_TOKENS - 1) * COSTS.decode_iteration_s(1, 0)
    now_s = 0.0
    for _ in range(10):
        call = Call("long", "m", PROMPT_TOKENS, 64, [], output_limit=OUTPUT_TOKENS, streamed=streamed)
        long = router.book(call, router.select(call, now_s, prefer="a"), now_s)
        for part in range(2):
            begun_s = now_s + part * PROMPT_S / 2
            answer(router, "a", begun_s + 0.1, begun_s + 0.1 + PROMPT_S / 3)
            answer(router, "b", begun_s, begun_s + alone_s)
        now_s += PROMPT_S
        if fate == "given up":
            router.release(long, now_s, delivered=False)
            continue
        if streamed:
            router.first_token(long, now_s)
        router.settle(long, CallUsage(PROMPT_TOKENS, 1), now_s)
    router.age(now_s)
    assert [router.engines[name].view.slowness for name in "ab"] == pytest.approx([1.0, 1.0], rel=0.2)
    check(router)
