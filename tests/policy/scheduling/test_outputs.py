"""What recent outputs tell of those to come."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean

from hypothesis import given
from hypothesis import strategies as st

from plait.policy.scheduling.outputs import (
    LEAST_OUTPUT_TOKENS,
    RECENT_OUTPUTS,
    START_OUTPUT_TOKENS,
    START_OUTPUTS,
    Outputs,
    RecentOutputs,
)
from plait.policy.scheduling.plan import LocalCall
from plait.policy.types import Objective, Slo


def ended(output_tokens: int, objective: Objective | None = None, slo: Slo | None = None) -> LocalCall:
    return LocalCall("ended", 0.0, 10, 10, output_tokens, slo, objective)


@given(tokens=st.lists(st.integers(1, 60), min_size=1, max_size=40), generated=st.integers(0, 70))
def test_four_of_five_longer_outputs_end_within_the_tokens_to_come(tokens: list[int], generated: int) -> None:
    to_come = Outputs(tuple(sorted(tokens)), fmean(tokens)).to_come(generated)
    longer = [one for one in tokens if one > generated]
    if not longer:
        assert to_come == LEAST_OUTPUT_TOKENS
        return
    within = [least for least in longer if sum(one <= least for one in longer) >= 0.8 * len(longer)]
    assert to_come == min(within) - generated >= 1


@given(st.lists(st.lists(st.tuples(st.integers(0, 50), st.sampled_from([None, *Objective])), max_size=9), max_size=9))
def test_the_recent_outputs_are_those_that_ended(batches: list[list[tuple[int, Objective | None]]]) -> None:
    outputs, found = RecentOutputs(), defaultdict(list)
    for batch in batches:
        before = dict(outputs.by_class), outputs.by_class
        outputs.on_ended(ended(tokens, objective) for tokens, objective in batch)
        assert before[0] == before[1], "a pace keeps the outputs of its moment"
        for tokens, objective in batch:
            found[objective, False].append(max(1, tokens))
        assert outputs.by_class == {kind: Outputs(tuple(sorted(some)), fmean(some)) for kind, some in found.items()}


def test_a_class_has_its_own_outputs() -> None:
    outputs = RecentOutputs()
    outputs.on_ended([ended(10), ended(20), ended(500, Objective.LATENCY, Slo(jct_s=9.0))])
    assert outputs.by_class == {
        (None, False): Outputs((10, 20), 15.0),
        (Objective.LATENCY, True): Outputs((500,), 500.0),
    }


def test_only_the_latest_outputs_count() -> None:
    outputs = RecentOutputs()
    outputs.on_ended([ended(3), ended(9000), ended(7)])
    outputs.on_ended(ended(7) for _ in range(RECENT_OUTPUTS - 1))
    assert outputs.by_class == {(None, False): Outputs((7,) * RECENT_OUTPUTS, 7.0)}


def test_one_output_is_assumed_until_a_call_has_ended() -> None:
    assert START_OUTPUTS.mean_tokens == START_OUTPUT_TOKENS
    assert [START_OUTPUTS.to_come(generated) for generated in (0, 200, 211)] == [211, 11, 32]
