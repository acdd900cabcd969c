"""What a waiting call gains by going to another engine: by hand, and as the difference of two delays.

The costs are those of `test_delay.py`: an iteration takes 10 ms, 1 ms for each new token and 10 us for each token of
context. A block has 10 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.policy.costs.delay import CallToPlace, DelayCost, change_gain_s
from plait.policy.costs.engine_view import EngineView
from plait.policy.costs.prefill_queue import Prefill
from plait.policy.costs.situation import Situation
from plait.policy.prefix.prefix_tree import Node, PrefixTree
from plait.policy.types import Placement, PlacementReason, Slo
from tests.policy.costs.test_delay import (
    COSTS,
    ENGINES,
    Engine,
    cached_blocks,
    call_of,
    hashes,
    naive,
    seconds_by_iteration,
    situation,
)

IDLE = Engine()
PROMPT = "prefix"
MISSED_S = 0.060
"""What six blocks add to an iteration, without attention. An engine that is idle needs 10 ms more."""


@dataclass(frozen=True)
class Change:
    """A call waits `there`, after work of `ahead_s`. `others` are the prompts of calls that are placed there too.

    What was cached of the call's prompt was evicted there, but for the first `kept_blocks`.
    """

    there: Engine = IDLE
    here: Engine = IDLE
    others: tuple[str, ...] = ()
    ahead_s: float = 0.0
    slowness: float = 1.0
    kept_blocks: int = 6
    slo: Slo | None = None
    age_s: float = 0.0

    def gain(self) -> tuple[float, Placement]:
        fleet = situation(self.there, self.here, prompt=PROMPT)
        there, here = fleet.engines
        there.slowness = self.slowness
        tree = there.residency._tree
        for block in hashes(PROMPT)[self.kept_blocks :]:
            there.residency.resident.remove(block)
        cached_blocks = there.residency.cached_blocks(tree.match(hashes(PROMPT)))
        leaf = hold(there, tree, PROMPT)
        for other in self.others:
            there.residency.book(tree.insert(hashes(other)))
        before = there.calls, there.context_tokens, here.calls, len(tree)
        moment = Situation(tree.match(hashes(PROMPT)), [here], 0, 0.0, fleet.traffic)
        asked = CallToPlace.of(call_of(PROMPT)._replace(slo=self.slo, arrived_s=-self.age_s), moment)
        found = change_gain_s(asked, moment, there, self.ahead_s, (cached_blocks, leaf))
        assert (there.calls, there.context_tokens, here.calls, len(tree)) == before, "nothing has changed"
        return found

    def gain_s(self) -> float:
        return self.gain()[0]


def hold(there: EngineView, tree: PrefixTree, prompt: str) -> Node:
    """The call waits there, and counts in all sums."""
    call, leaf = call_of(prompt), tree.insert(hashes(prompt))
    missed_tokens = call.prompt_tokens - 10 * there.residency.cached_blocks(tree.match(hashes(prompt)))
    there.residency.book(leaf)
    prefill_s = COSTS.prefill_time_s(missed_tokens)
    there.begin(call.prompt_tokens + there.ledger.mean_output_tokens / 2, Prefill(missed_tokens, prefill_s, 0.0, 0.0))
    return leaf


def test_between_equal_engines_the_gain_is_twice_the_work_ahead() -> None:
    gains = [Change(ahead_s=ahead_s).gain_s() for ahead_s in (0.0, 1.5, 60.0)]
    assert gains == pytest.approx([0.0, 3.0, 120.0]), "it delays the first token"


def test_a_prefix_that_is_cached_here_need_not_be_computed() -> None:
    gain_s, placement = Change(here=Engine(PROMPT)).gain()
    assert gain_s == pytest.approx(2 * MISSED_S)
    assert placement[:4] == ("1", PlacementReason.EXPLOIT, 60, 1)
    assert Change(here=Engine("pre")).gain_s() == pytest.approx(MISSED_S)


def test_a_prefix_that_is_cached_there_has_to_be_computed_again() -> None:
    gain_s, placement = Change(there=Engine(PROMPT), ahead_s=1.0).gain()
    assert gain_s == pytest.approx(2.0 - 2 * MISSED_S)
    assert placement[:4] == ("1", PlacementReason.EXPLORE, 0, 61)
    assert Change(there=Engine(PROMPT), here=Engine(PROMPT), ahead_s=1.0).gain_s() == pytest.approx(2.0)


def test_the_placement_has_the_delay_that_is_expected_here() -> None:
    _, placement = Change(here=Engine(waiting=(100,), contexts=(100,)), ahead_s=9.0).gain()
    assert placement.cost is not None
    assert isinstance(placement.cost, DelayCost)
    assert (placement.cost.queue_s, placement.cost.prefill_s) == pytest.approx((0.110, 0.071 + 0.000_61))


@pytest.mark.parametrize("slo", [Slo(ttft_s=9.0), Slo(jct_s=9.25)], ids=["ttft", "jct"])
def test_the_placement_says_whether_what_is_left_of_the_times_is_enough(slo: Slo) -> None:
    """A first token takes 0.07 s here, and the rest of the answer 0.23 s."""
    found = [Change(ahead_s=9.0, slo=slo, age_s=age_s).gain()[1].meets_slo for age_s in (0.0, 8.9, 8.95, 20.0)]
    assert found == [True, True, False, False]
    assert Change(ahead_s=9.0).gain()[1].meets_slo is None


def test_who_leaves_a_busy_engine_delays_nobody_there_any_more() -> None:
    """There, eight calls stand still while the prompt is computed, and their answers take longer beside it."""
    stalled_s = 8 * (0.061 + 0.000_61) / 2
    slowed_s = 8 * 10 * (0.001 + 0.000_71)
    own_s = 2 * 0.008 + 20 * (0.008 + 8 * 0.001)  # it computes and decodes beside eight calls with 100 tokens each
    busy = Change(there=Engine(contexts=(100,) * 8), ahead_s=1.0).gain_s()
    assert busy == pytest.approx(2.0 + stalled_s + slowed_s + own_s)


def test_on_a_slow_engine_more_is_gained() -> None:
    own_s = 2 * (0.071 + 0.000_61) + 20 * (0.011 + 0.000_71)
    assert Change(slowness=3.0).gain_s() == pytest.approx(2 * own_s)
    assert Change(slowness=3.0, ahead_s=2.0).gain_s() == pytest.approx(4.0 + 2 * own_s), "the work ahead is given"


# What is lost.


def lost_s(blocks: int, cached_blocks: int = 0) -> float:
    """Alone in an iteration after what is cached, before first tokens."""
    return 2 * (0.010 + 0.010 * blocks + 0.000_1 * (blocks + cached_blocks))


@pytest.mark.parametrize(
    ("others", "blocks"),
    [
        ((PROMPT,), 6),
        ((PROMPT, PROMPT), 6),
        (("prefix and more",), 6),
        (("preface",), 4),
        (("prefer", "preface", "pretty"), 4),
        (("other",), 0),
    ],
)
def test_what_others_count_on_is_lost(others: tuple[str, ...], blocks: int) -> None:
    gain_s = Change(others=others, ahead_s=2.0).gain_s()
    assert gain_s == pytest.approx(4.0 - (lost_s(blocks) if blocks else 0.0))


def test_what_is_there_already_is_not_lost() -> None:
    cached = Engine("pre")
    alone = Change(there=cached, ahead_s=2.0).gain_s()
    assert Change(there=cached, others=("pretty",), ahead_s=2.0).gain_s() == pytest.approx(alone)
    assert Change(there=cached, others=(PROMPT,), ahead_s=2.0).gain_s() == pytest.approx(alone - lost_s(3, 3))


def test_what_was_evicted_from_the_middle_of_a_node_is_lost() -> None:
    alone = Change(there=Engine(PROMPT), here=Engine(PROMPT), kept_blocks=2)
    shared = Change(there=Engine(PROMPT), here=Engine(PROMPT), kept_blocks=2, others=(PROMPT,))
    assert alone.gain_s() - shared.gain_s() == pytest.approx(lost_s(4, 2))


def test_a_slow_engine_takes_longer_to_compute_what_is_lost() -> None:
    alone, shared = Change(slowness=3.0), Change(slowness=3.0, others=(PROMPT,))
    assert alone.gain_s() - shared.gain_s() == pytest.approx(3 * lost_s(6))


@given(
    there=ENGINES,
    here=ENGINES,
    ahead_s=st.floats(0, 100),
    others=st.lists(st.sampled_from((PROMPT, "preface", "p", "other")), max_size=3).map(tuple),
)
def test_the_gain_is_the_difference_of_the_two_delays(
    there: Engine, here: Engine, ahead_s: float, others: tuple[str, ...]
) -> None:
    there_s = delay_s(there) + 2 * (ahead_s - seconds_by_iteration(there, sum(there.waiting)))
    held, shared = common(PROMPT, there.cached), max((common(PROMPT, other) for other in others), default=0)
    lost = lost_s(shared - held, held) if shared > held else 0.0
    gain_s = Change(there, here, others, ahead_s).gain_s()
    assert gain_s == pytest.approx(there_s - delay_s(here) - lost)


def delay_s(engine: Engine) -> float:
    """The delay of the prompt on an engine, while no other calls come."""
    return naive(engine, PROMPT, cached_blocks(engine, PROMPT), 0.0)[0]


def common(one: str, other: str) -> int:
    """How many letters are the same at their beginnings."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
