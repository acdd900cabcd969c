"""The order of a tenant's calls: by rank, and no rank waits for ever."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.policy.order import KEPT, Kept, Rank, rank_of
from plait.policy.types import NO_SLO, Objective, Slo


@pytest.mark.parametrize(
    ("slo", "objective", "rank"),
    [
        (Slo(ttft_s=1.0), None, Rank.PROMISED),
        (Slo(jct_s=1.0), Objective.THROUGHPUT, Rank.PROMISED),
        (Slo(tpot_s=1.0), None, Rank.PLAIN),
        (NO_SLO, Objective.LATENCY, Rank.LATENCY),
        (None, Objective.THROUGHPUT, Rank.THROUGHPUT),
        (None, None, Rank.PLAIN),
    ],
)
def test_the_rank_of_a_call(slo: Slo | None, objective: Objective | None, rank: Rank) -> None:
    assert rank_of(slo, objective) is rank


@given(st.lists(st.integers(1, 1_000), min_size=200, max_size=400), st.sets(st.sampled_from(Rank), min_size=2))
def test_each_rank_keeps_its_share_while_all_wait(sizes: list[int], ranks: set[Rank]) -> None:
    kept, served, calls = Kept(), Counter[Rank](), iter(sizes * 4)
    following = {rank: next(calls) for rank in ranks}
    for tokens in calls:
        rank = kept.first(following)
        kept.serve(rank, following[rank], ranks)
        served[rank] += following[rank]
        following[rank] = tokens
    for rank in ranks - {min(ranks)}:
        before = sum(served[other] for other in ranks if other < rank)
        assert KEPT * before - 2 * max(sizes) <= served[rank] <= KEPT * before


def test_what_a_rank_was_owed_is_gone_once_it_does_not_wait() -> None:
    kept = Kept()
    kept.serve(Rank.PLAIN, 1_000, {Rank.PLAIN, Rank.THROUGHPUT})
    assert kept.first({Rank.PLAIN: 9, Rank.THROUGHPUT: 100}) is Rank.THROUGHPUT
    kept.serve(Rank.PLAIN, 1, {Rank.PLAIN})
    assert kept.first({Rank.PLAIN: 9, Rank.THROUGHPUT: 100}) is Rank.PLAIN
