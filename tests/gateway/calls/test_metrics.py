from __future__ import annotations

from plait.backends.http.client import HttpClient
from plait.backends.protocol.openai import CompletionRequest
from plait.gateway.calls.delivery import Delivery
from plait.gateway.calls.engine_link import EngineLink
from plait.gateway.calls.exchange import Exchange
from plait.gateway.calls.metrics import CallMetrics
from plait.gateway.calls.open_answers import OpenAnswers
from plait.gateway.calls.outgoing import OutgoingBody
from plait.gateway.fleet.booking import Booking, CallUsage
from plait.gateway.fleet.router import Router
from plait.gateway.metrics import Buckets, new_registry
from plait.policy.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.types import Call
from tests.gateway.exposed import samples

COSTS = CostModel(PiecewiseLinear(((0, 0.010),), 0.001), 0.0, 0.0, 0.0, LongAttention())
LABELS = 'engine="a",model="m"'


def exchange(router: Router, booking: Booking, usage: CallUsage | None) -> Exchange:
    """A call that arrived at 9 s."""
    body = OutgoingBody(b"{}", CompletionRequest(model="m", prompt="x"))
    delivery = Delivery(booking.call, "/v1/completions", (), body, 9.0, tenant="t")
    link = EngineLink(HttpClient("http://127.0.0.1:1"))
    known = router.engines["a"].cache
    made = Exchange(booking, delivery, link, known, router, Buckets(()), OpenAnswers(1), sends_client_key=False)
    made.usage = usage
    return made


def test_predicted_and_reported_cache_hits_are_counted_where_both_are_known() -> None:
    router = Router()
    router.add_engine("a", COSTS)
    router.health.answered("a", {"m": None})
    registry = new_registry()
    metrics = CallMetrics(registry)
    # Expected are nothing, then the first call's block, then both; found are 0, 128, it does not say, and 0.
    for hashes, cached in (([1], 0), ([1, 2], 128), ([1, 2], None), ([1, 2], 0)):
        call = Call("c", "m", 64 * len(hashes) + 1, 64, hashes)
        booking = router.book(call, router.select(call, 10.0), 10.0)
        metrics.placed(booking)
        if cached is not None:
            router.first_token(booking, 10.5)
        usage = CallUsage(call.prompt_tokens, 5, cached)
        metrics.ended(exchange(router, booking, usage), "ok", None, 12.0)
    metrics.ended(exchange(router, booking, None), "client_gone", None, 99.0)
    found = samples(registry)
    assert found[f"plait_cached_tokens_predicted_total{{{LABELS}}}"] == 0 + 64 + 128
    assert found[f"plait_cached_tokens_reported_total{{{LABELS}}}"] == 0 + 128 + 0
    assert found[f"plait_cached_tokens_mispredicted_total{{{LABELS}}}"] == 0 + 64 + 128
    assert found[f"plait_prompt_tokens_total{{{LABELS}}}"] == 65 + 3 * 129
    assert found[f"plait_output_tokens_total{{{LABELS}}}"] == 20
    assert found[f'plait_calls_total{{{LABELS},outcome="ok"}}'] == 4
    assert found[f'plait_calls_total{{{LABELS},outcome="client_gone"}}'] == 1
    assert found[f'plait_placements_total{{{LABELS},reason="explore"}}'] == 2
    assert found[f"plait_ttft_seconds_sum{{{LABELS}}}"] == 4 * 1.5
    assert found[f"plait_e2e_seconds_sum{{{LABELS}}}"] == 4 * 3.0
