from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from plait.backends.protocol.openai import CompletionRequest
from plait.gateway.calls.call import NOWHERE, Answer, Asked, Attempt, Ending, Outcome, known_finish
from plait.gateway.calls.delivery import Delivery
from plait.gateway.calls.metrics import CallMetrics
from plait.gateway.calls.outgoing import OutgoingBody
from plait.gateway.fleet.booking import CallUsage
from plait.gateway.fleet.router import Router
from plait.gateway.metrics import FastCounter, new_registry
from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.types import Call, Slo
from tests.gateway.exposed import exposed_text, samples

COSTS = CostModel(PiecewiseLinear(((0, 0.010),), 0.001), 0.0, 0.0, 0.0, LongAttention())
LABELS = 'engine="a",model="m"'


def ended(
    call: Call,
    attempt: Attempt | None,
    status: int = 200,
    outcome: Outcome = "ok",
    arrived_s: float = 9.0,
) -> Delivery:
    """A call that has ended."""
    body, call = OutgoingBody(b"{}", CompletionRequest(model="m", prompt="x")), call._replace(arrived_s=arrived_s)
    delivery = Delivery(Asked(call, "/v1/completions", (), body, tenant="t"), call, NOWHERE, None)
    delivery.attempt = attempt
    delivery.ending = Ending(
        outcome, status, "a", is_told=status == 200, path="/v1/completions", tenant="t", model=call.model,
        code="waiting" if status == 429 else None, arrived_s=arrived_s, ended_s=12.0,
    )  # fmt: skip
    return delivery


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
        if cached is not None:
            router.first_token(booking, 10.5)
        usage = CallUsage(call.prompt_tokens, 5, cached)
        metrics.left_engine(Attempt(booking, Answer(usage=usage)), "ok", None, 9.0, 12.0)
    metrics.left_engine(Attempt(booking, Answer()), "client_gone", None, 9.0, 99.0)
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


def test_calls_are_counted_by_tenant_status_and_finish_reason() -> None:
    router = Router()
    router.add_engine("a", COSTS)
    router.health.answered("a", {"m": None})
    registry = new_registry()
    metrics = CallMetrics(registry, lambda _tenant: "blue")
    for status, finish in ((200, "stop"), (200, "stop"), (200, "of my own"), (499, None)):
        call = Call("c", "m", 65, 64, [1])
        booking = router.book(call, router.select(call, 10.0), 10.0)
        router.first_token(booking, 10.5)
        answer = Answer(usage=CallUsage(65, 5, 64 if finish else None), finish=known_finish(finish))
        attempt = Attempt(booking, answer)
        metrics.ended(ended(call, attempt, status, "ok" if finish else "client_gone"))
    metrics.ended(ended(call, None, 429, "refused"))
    found = samples(registry)
    labels = 'model="m",status="{}",finish_reason="{}",tenant="blue"'
    calls = {name: value for name, value in found.items() if name.startswith("plait_tenant_calls_total{")}
    named = {frozenset(name[name.index("{") + 1 : -1].split(",")): value for name, value in calls.items()}

    def counted(status: int, finish: str) -> float:
        return named[frozenset(labels.format(status, finish).split(","))]

    assert [counted(200, "stop"), counted(200, "other"), counted(499, ""), counted(429, "")] == [2, 1, 1, 1]
    of_tenant = 'model="m",tenant="blue"'
    assert found[f"plait_tenant_prompt_tokens_total{{{of_tenant}}}"] == 4 * 65
    assert found[f"plait_tenant_cached_tokens_total{{{of_tenant}}}"] == 3 * 64
    assert found[f"plait_tenant_output_tokens_total{{{of_tenant}}}"] == 20
    assert found[f"plait_tenant_e2e_seconds_sum{{{of_tenant}}}"] == 3 * 3.0
    assert found[f"plait_tenant_ttft_seconds_sum{{{of_tenant}}}"] == 4 * 1.5


def test_a_request_that_is_no_call_counts_once_for_its_tenant_and_its_refusal() -> None:
    registry = new_registry()
    metrics = CallMetrics(registry, lambda _tenant: "blue")
    before = samples(registry)
    ending = Ending("refused", 404, path="/v1/completions", tenant="t", code="model_not_found")
    for _ in range(3):
        metrics.no_call(ending)
    found = samples(registry).items() - before.items()
    added = sorted(sample for sample in found if sample[0].startswith("plait_"))  # that of garbage runs by itself
    assert [(name.partition("{")[0], count) for name, count in added] == [
        ("plait_refusals_total", 3),
        ("plait_tenant_calls_total", 3),
    ]
    assert 'path="/v1/completions"' in added[0][0]


def test_deduced_slos_count_apart_from_promised_ones_and_not_for_the_goodput() -> None:
    router = Router()
    router.add_engine("a", COSTS)
    router.health.answered("a", {"m": None})
    registry = new_registry()
    metrics = CallMetrics(registry)
    # Each takes 3 s from its arrival.
    for is_deduced, jct_s in ((False, 5.0), (False, 1.0), (True, 5.0), (True, 1.0), (True, 1.0)):
        call = Call("c", "m", 65, 64, [1], slo=Slo(jct_s=jct_s, is_deduced=is_deduced))
        booking = router.book(call, router.select(call, 10.0), 10.0)
        metrics.ended(ended(booking.call, Attempt(booking, Answer(usage=CallUsage(65, 5, 0)))))
    found = samples(registry)
    counts = {
        (source, met): found[
            f'plait_slo_calls_total{{met="{met}",model="m",objective="",slo="jct",source="{source}",tenant="t"}}'
        ]
        for source in ("promised", "deduced")
        for met in ("yes", "no")
    }
    assert counts == {("promised", "yes"): 1, ("promised", "no"): 1, ("deduced", "yes"): 1, ("deduced", "no"): 2}
    assert found['plait_good_calls_total{model="m",objective="",tenant="t"}'] == 4


def test_a_fast_counter_shows_what_a_counter_of_prometheus_client_shows() -> None:
    new_registry()  # without the `_created` series
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    counter = Counter("plait_x", "A text", ["model", "engine"], registry=theirs)
    fast = FastCounter("plait_x", "A text", ["model", "engine"])
    ours.register(fast)
    assert exposed_text(ours) == exposed_text(theirs)
    for engine_id, amount in (("a", 1.0), ("b\n", 64.0), ("a", 0.0), ("a", 2.0)):
        counter.labels("m", engine_id).inc(amount)
        fast.of["m", engine_id].inc(amount)
    assert exposed_text(ours) == exposed_text(theirs)
