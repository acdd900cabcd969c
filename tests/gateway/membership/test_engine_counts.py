"""What engines without the adapter count in their own metrics."""

from __future__ import annotations

from array import array

import pytest

from plait.backends.protocol.dialects import DIALECTS
from plait.backends.protocol.engine_counts import EngineCounts, count_ranks, in_all, read_counts, read_loads
from plait.gateway.fleet.metrics import knowledge_of
from plait.gateway.fleet.router import Router
from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.types import Call
from tests.gateway.membership.stock_answers import LLAMACPP, SGLANG, TGI, TRTLLM, VLLM

COSTS = CostModel(PiecewiseLinear(((0, 0.010),), 0.001), 0.0, 0.0, 0.0, LongAttention())


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        (VLLM, EngineCounts(5, 1, 16_000, 0.25)),
        (SGLANG, EngineCounts(12, 0, 42_000)),
        (b"vllm:num_requests_running 1\n", EngineCounts(1, 0, None)),
        (LLAMACPP, EngineCounts(1, 0, None, 1_530.0)),
        (TGI, EngineCounts(7, 3, None, 44.0)),
        (TRTLLM, EngineCounts(6, 2, 32_000, 0.5, 64)),
        (TRTLLM.replace(b"32.0", b"many"), EngineCounts(6, 2, None, 0.5, 64)),
        (b"", None),
        (b"python_gc_objects_collected_total 9.0\n", None),
        (b'vllm:num_requests_running{a="b"} many\n<html>', None),
        (b"vllm:num_requests_running 1e+999\nvllm:num_requests_running 1.2.3\n", None),
    ],
)  # fmt: skip
def test_counts_are_read_under_the_engines_names(text: bytes, counts: EngineCounts | None) -> None:
    found = [in_all(read.values()) for row in DIALECTS.values() if (read := read_counts(row, text))]
    assert found == ([] if counts is None else [counts])


VLLM_SUMS = """
vllm:num_requests_running{{engine="0"}} 1.0
vllm:prefix_cache_queries_total{{engine="0"}} {0}
vllm:prefix_cache_hits_total{{engine="0"}} 100.0
vllm:external_prefix_cache_hits_total{{engine="0"}} 20.0
vllm:prompt_tokens_total{{engine="0"}} 700.0
"""


@pytest.mark.parametrize(
    ("kind", "text", "looked_up", "found"),
    [
        ("vllm", VLLM_SUMS.format("600.0"), 600, 120),
        ("vllm", VLLM_SUMS.format("0.0"), 700, 120),  # caching is off: nothing is looked up
        ("vllm", "vllm:num_requests_running 1\nvllm:prompt_tokens_total 700.0\n", None, 0),
        ("sglang", "sglang:num_running_reqs 1\nsglang:prompt_tokens_total 700.0\n", 700, 0),
        (
            "sglang",
            (
                "sglang:num_running_reqs 1\nsglang:prompt_tokens_total 700.0\n"
                'sglang:cached_tokens_total{cache_source="device"} 300.0\n'
                'sglang:cached_tokens_total{cache_source="host"} 30.0\n'
            ),
            700,
            330,
        ),
    ],
)
def test_the_sums_of_cached_tokens_are_read(kind: str, text: str, looked_up: int | None, found: int) -> None:
    counts = in_all(read_counts(DIALECTS[kind], text.encode()).values())
    assert (counts.looked_up, counts.found) == (looked_up, found)


def test_sums_are_read_beyond_ten_billion_tokens() -> None:
    """A busy engine has looked up as many within days."""
    text = VLLM_SUMS.format("1.2345678901e+10")
    assert in_all(read_counts(DIALECTS["vllm"], text.encode()).values()).looked_up == 12_345_678_901


VLLM_RANKS = """
vllm:prompt_tokens_total{{engine="{0}",model_name="m"}} {0}.0
vllm:cache_config_info{{block_size="16",engine="{0}",num_gpu_blocks="8000"}} 1.0
"""
"""What vLLM says of a rank before the first call: it writes the blocks of all ranks for each."""


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_each_rank_of_vllm_has_its_part_of_the_cache(ranks: int) -> None:
    text = "".join(VLLM_RANKS.format(rank) for rank in range(ranks))
    assert count_ranks(DIALECTS["vllm"], text.encode()) == ranks
    assert read_counts(DIALECTS["vllm"], text.encode()) == {}, "no gauge before the first call"
    counted = read_counts(DIALECTS["vllm"], f'{text}vllm:num_requests_running{{engine="0"}} 3\n'.encode())
    assert [one.kv_tokens for one in counted.values()] == [128_000 // ranks] * ranks
    assert [one.running for one in counted.values()] == [3, *[0] * (ranks - 1)]
    assert in_all(counted.values()).kv_tokens == 128_000


@pytest.mark.parametrize(("told", "kv_tokens"), [("9943", 9_943), ("None", 16_384)])
def test_the_size_in_tokens_of_a_rank_of_vllm_comes_before_its_blocks(told: str, kv_tokens: int) -> None:
    """Layers of several groups take blocks of their own, so a block is less than its tokens."""
    line = (
        'vllm:cache_config_info{{block_size="32",engine="{0}",kv_cache_size_tokens="{1}",num_gpu_blocks="1024"}} 1.0\n'
    )
    text = "".join(line.format(rank, told) for rank in range(2)) + 'vllm:num_requests_running{engine="0"} 3\n'
    assert [one.kv_tokens for one in read_counts(DIALECTS["vllm"], text.encode()).values()] == [kv_tokens] * 2


def test_ranks_of_sglang_are_found_by_their_label() -> None:
    """The counters of tokens are not a rank's, and a rank without a call may be missing."""
    lines = [b'sglang:prompt_tokens_total{model_name="m"} 9.0']
    for rank, running in ((3, 1), (1, 2)):
        lines.append(b'sglang:num_running_reqs{dp_rank="%d",model_name="m"} %d' % (rank, running))
        lines.append(b'sglang:max_total_num_tokens{dp_rank="%d",model_name="m"} 4096' % rank)
    counted = read_counts(DIALECTS["sglang"], b"\n".join(lines))
    assert counted == {1: EngineCounts(2, 0, 4_096), 3: EngineCounts(1, 0, 4_096)}


@pytest.mark.parametrize(
    ("body", "ranks"),
    [
        (b'{"loads":[{"dp_rank":0,"num_running_reqs":1},{"dp_rank":1}]}', 2),
        (b'{"loads":[{"dp_rank":0}]}', 1),
        (b'{"loads":[]}', 0),
        (b'{"loads":[{}]}', 0),
        (b"<html>", 0),
        (b"", 0),
    ],
)
def test_a_list_of_loads_counts_ranks(body: bytes, ranks: int) -> None:
    assert read_loads(body) == ranks


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
