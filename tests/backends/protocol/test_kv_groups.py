"""The size of a KV cache in tokens, for models whose layers take blocks of several groups."""

from __future__ import annotations

from math import ceil

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.protocol.cache_state import CacheState, KvGroup, KvState

GEMMA = [KvGroup(32), *[KvGroup(32, 33)] * 5]
"""One group with full attention, five with a window of 512, which an iteration of 512 tokens passes over."""


def state(groups: list[KvGroup]) -> CacheState:
    return CacheState(
        engine="e", kind="vllm", epoch="1", cursor=1, model="m", block_tokens=32, granularity_tokens=64,
        snapshot=True, stored=[], removed=[], kv=KvState(10, 10, 0, groups),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("call_tokens", "tokens"),
    [
        (0, 2725),  # 6 blocks for each 32 tokens
        (1056, 2725),
        (1600, 511 * 1600 // (50 + 5 * 33)),
        (8192, 511 * 8192 // (256 + 5 * 33)),  # vLLM's own figure, with a context of 8192
    ],
)
def test_long_calls_need_fewer_blocks_for_each_token(call_tokens: float, tokens: int) -> None:
    assert KvState(511, 511, 0, GEMMA).tokens(511, 32, call_tokens) == tokens


@given(call_tokens=st.floats(0, 1e6), blocks=st.integers(0, 10_000), block_tokens=st.sampled_from((1, 16, 528)))
def test_a_plain_model_has_its_blocks_times_their_size(call_tokens: float, blocks: int, block_tokens: int) -> None:
    for groups in ([], [KvGroup(block_tokens)]):
        assert KvState(0, 0, 0, groups).tokens(blocks, block_tokens, call_tokens) == blocks * block_tokens


@given(
    st.lists(st.integers(1, 20_000), min_size=1, max_size=20),
    st.lists(st.builds(KvGroup, st.sampled_from((16, 32, 544)), st.integers(0, 40)), min_size=1, max_size=4),
)
def test_calls_of_any_lengths_fit_into_what_their_mean_length_says(calls: list[int], groups: list[KvGroup]) -> None:
    """Each call's last block of a group may be partly filled."""
    mean = sum(calls) / len(calls)
    taken = sum(min(ceil(call / one.block_tokens), one.most_blocks or call) for call in calls for one in groups)
    ends = len(calls) * len(groups)
    if taken > ends:
        most = max(one.block_tokens for one in groups)
        assert KvState(0, 0, 0, groups).tokens(taken - ends, 16, mean) <= sum(calls) + most * len(calls)


@pytest.mark.parametrize("group", [KvGroup(0), KvGroup(2**40), KvGroup(16, -1)])
def test_a_group_that_cannot_be_is_refused(group: KvGroup) -> None:
    with pytest.raises(ValueError, match="a block has no tokens"):
        state([group]).check()


def test_a_report_without_groups_is_read() -> None:
    told = msgspec.json.encode(KvState(10, 4, 3))
    old = msgspec.json.decode(told.replace(b',"groups":[]', b""), type=KvState)
    assert old == KvState(10, 4, 3)
    assert msgspec.json.decode(msgspec.json.encode(KvState(9, 9, 0, GEMMA)), type=KvState).groups == GEMMA
