"""What engines without the adapter count in their own metrics."""

from __future__ import annotations

from array import array

import pytest

from plait.backends.protocol.dialects import DIALECTS
from plait.backends.protocol.engine_counts import EngineCounts, read_counts
from plait.gateway.fleet.metrics import knowledge_of
from plait.gateway.fleet.router import Router
from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.types import Call

COSTS = CostModel(PiecewiseLinear(((0, 0.010),), 0.001), 0.0, 0.0, 0.0, LongAttention())
VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="1000",x="None"} 1.0
"""
SGLANG = b"""sglang:num_running_reqs{model_name="m",tp_rank="0"} 1.2e+01
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 0.0
sglang:max_total_num_tokens{model_name="m"} 42000.0
"""
LLAMACPP = b"""llamacpp:prompt_tokens_total 1500
llamacpp:n_decode_total 30
llamacpp:requests_processing 1
llamacpp:requests_deferred 0
"""


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        (VLLM, EngineCounts(5, 1, 16_000, 0.25)),
        (SGLANG, EngineCounts(12, 0, 42_000)),
        (b"vllm:num_requests_running 1\n", EngineCounts(1, 0, None)),
        (LLAMACPP, EngineCounts(1, 0, None, 1_530.0)),
        (b"", None),
        (b"python_gc_objects_collected_total 9.0\n", None),
        (b'vllm:num_requests_running{a="b"} many\n<html>', None),
        (b"vllm:num_requests_running 1e+999\nvllm:num_requests_running 1.2.3\n", None),
    ],
)  # fmt: skip
def test_counts_are_read_under_the_engines_names(text: bytes, counts: EngineCounts | None) -> None:
    found = [read for row in DIALECTS.values() if (read := read_counts(row, text)) is not None]
    assert found == ([] if counts is None else [counts])


def test_calls_of_others_and_a_queue_count_in_placement_and_room() -> None:
    router = Router()
    router.add_engine("a", COSTS, kv_tokens=100)
    router.health.answered("a", {"m": None})
    router.no_reports("a")
    engine, view = router.engines["a"], router.engines["a"].view
    call = Call("r", "m", 100, 64, array("Q"))
    router.book(call, router.select(call, 0.0), 0.0)
    assert knowledge_of(engine) == "estimated"
    router.counted("a", EngineCounts(1, 0, 5_000), 0.0)
    assert (view.calls, view.slots, engine.cache.estimated_tokens) == (1, 0, 5_000)
    router.counted("a", EngineCounts(6, 2, None), 0.0)
    assert (view.calls, view.slots, view.others) == (7, 6, 6), "one may have come since"
    assert knowledge_of(engine) == "counts"
    router.no_reports("a")
    assert view.slots == 6, "the next probe finds no report again"
    router.counted("a", None, 0.0)
    assert (view.calls, view.slots) == (1, 0)


def test_work_that_is_counted_is_a_sign_of_life() -> None:
    router = Router()
    router.add_engine("a", COSTS)
    engine = router.engines["a"]
    for second, work in enumerate((0.0, 0.0, 7.0, 7.0)):
        router.counted("a", EngineCounts(1, 0, None, work), float(second))
    assert engine.progress.silent_s(3.0) == 1.0
