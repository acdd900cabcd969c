"""The histogram of reuse distances at `/metrics`, and that each call is in it once."""

from __future__ import annotations

from array import array

from prometheus_client import CollectorRegistry

from plait.gateway.calls import reuse_metrics as module
from plait.gateway.calls.reuse_metrics import ReuseCollector
from plait.policy.prefix.reuse_distances import ONE_OF
from plait.policy.types import Call
from tests.gateway.calls.scripted_engines import JSON, LOST, WHOLE, Client, Exchange, FakeHttp, gateway
from tests.gateway.exposed import samples

NAME = "plait_reuse_distance_tokens"


def call(*hashes: int, model: str = "m") -> Call:
    return Call("c", model, 64 * len(hashes) + 1, 64, array("Q", hashes))


def of(registry: CollectorRegistry, model: str = "m") -> dict[str, float]:
    """The model's buckets by their bound, and its count."""
    found = {}
    for name, value in samples(registry).items():
        if name.startswith(NAME) and f'model="{model}"' in name:
            found[name.split('le="')[1].split('"')[0] if "le=" in name else "count"] = value
    return found


def test_hits_of_a_size_are_its_bucket_over_the_count() -> None:
    registry, collector = CollectorRegistry(), ReuseCollector()
    registry.register(collector)
    assert of(registry) == {}
    followed = [number << 8 for number in range(1, 11)]
    collector.used(call(*followed))
    for _ in range(2 * ONE_OF):
        collector.used(call(*followed))
    found, used = of(registry), 64 * 10 * (2 * ONE_OF + 1)
    assert list(found)[:2] == ["8000.0", "16000.0"]
    assert list(found)[7:9] == ["1.024e+06", "2.048e+06"]
    assert list(found)[-2:] == ["+Inf", "count"]
    assert found["count"] == found["+Inf"] == used
    assert found["8000.0"] == found["5.24288e+08"] == used - 64 * 10 * ONE_OF


async def test_a_call_counts_once_however_often_it_is_sent() -> None:
    well = Exchange(headers=JSON, pieces=[WHOLE])
    async with gateway(FakeHttp(LOST), FakeHttp(well)) as made:
        await made.deliver_call(Client(), call(1, 2, 3, 4, 5))
        assert made.outcomes() == {("a", "failed"): 1, ("b", "ok"): 1}
        assert of(made.registry)["count"] == 5 * 64


async def test_a_call_without_hashes_does_not_count() -> None:
    async with gateway(FakeHttp(Exchange(headers=JSON, pieces=[WHOLE]))) as made:
        await made.deliver_call(Client(), call())
        assert made.outcomes() == {("a", "ok"): 1}
        assert of(made.registry) == {}


def test_models_have_distances_of_their_own_up_to_a_number_of_them() -> None:
    registry, collector = CollectorRegistry(), ReuseCollector()
    registry.register(collector)
    for number in range(module.MOST_MODELS + 5):
        collector.used(call(1, 2, 3, model=f"m{number}"))
    assert of(registry, "m0")["count"] == 3 * 64
    assert of(registry, f"m{module.MOST_MODELS}") == {}
    assert of(registry, "other")["count"] == 5 * 3 * 64
    assert len(collector._of) == module.MOST_MODELS + 1
