from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from plait.gateway.metrics import FastCounter, exposition, new_registry


def test_a_fast_counter_shows_what_a_counter_of_prometheus_client_shows() -> None:
    new_registry()  # without the `_created` series
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    counter = Counter("plait_x", "A text", ["model", "engine"], registry=theirs)
    fast = FastCounter("plait_x", "A text", ["model", "engine"])
    ours.register(fast)
    assert exposition(ours) == exposition(theirs)
    for engine_id, amount in (("a", 1.0), ("b\n", 64.0), ("a", 0.0), ("a", 2.0)):
        counter.labels("m", engine_id).inc(amount)
        fast.of("m", engine_id).inc(amount)
    assert exposition(ours) == exposition(theirs)
